"""A simulated driver: the folder that gpuhook is pointed to, and what is true of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.commands import run
from harness.installation import Installation

# Not one GPU's minor is its index, so that mixing up the two can't go unnoticed.
MINORS = (3, 0, 1, 2, 7, 4, 5, 6)


@dataclass(frozen=True)
class Gpu:
    """A GPU as /proc/driver/nvidia describes it; ``index`` counts PCI addresses upwards."""

    index: int
    minor: int
    uuid: str
    model: str


@dataclass(frozen=True)
class Driver:
    """A driver root and its GPUs."""

    root: Path
    gpus: tuple[Gpu, ...]

    @property
    def version(self) -> str:
        """The version in the names of the driver's libraries."""
        return self.library("libcuda.so.1").name.removeprefix("libcuda.so.")

    @property
    def minors(self) -> list[int]:
        """The minors of all GPUs."""
        return [gpu.minor for gpu in self.gpus]

    def library(self, name: str) -> Path:
        """Return the file that ``name`` leads to below the driver root, links resolved."""
        [link] = [path for path in self.root.glob(f"usr/lib*/**/{name}") if _is_real(path)]
        return link.resolve()

    def chosen(self, *indices: int) -> list[Gpu]:
        """Return the GPUs with these indices."""
        return [self.gpus[index] for index in indices]


def _is_real(path: Path) -> bool:
    return path.exists() and not any(part.is_symlink() for part in path.parents)


def simulate(installation: Installation, root: Path, *options: str) -> Driver:
    """Build a simulated driver in ``root`` with the command that users have for it."""
    run([installation.command, "simulate", root, *options]).ok()
    gpus: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        text = (folder / "information").read_text()
        facts = dict(line.split(":", 1) for line in text.splitlines())
        values = {name.strip(): value.strip() for name, value in facts.items()}
        minor = int(values["Device Minor"])
        gpus.append(Gpu(len(gpus), minor, values["GPU UUID"], values["Model"]))
    return Driver(root, tuple(gpus))


def lines_of_nvidia_smi(gpus: Sequence[Gpu]) -> list[str]:
    """Return what ``nvidia-smi -L`` prints where exactly ``gpus`` can be reached."""
    return [f"GPU {at}: {gpu.model} (UUID: {gpu.uuid})" for at, gpu in enumerate(gpus)]
