"""A simulated driver: the root that gpuhook uses, and the facts about it."""

import fcntl
import hashlib
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.bundles import Bundle
from harness.commands import Result, run
from harness.images import REPOSITORY
from harness.installation import Installation
from harness.namespaces import HOLD, Namespace, held

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpuhook")
# No GPU's minor equals its index, so that tests notice if the two are mixed up.
MINORS = (3, 0, 1, 2, 7, 4, 5, 6)


@dataclass(frozen=True)
class Gpu:
    """A GPU as /proc/driver/nvidia describes it; ``index`` is its place by PCI address."""

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

    def path(self, name: str) -> Path:
        """Return the target of the absolute path ``name`` below the driver root."""
        return resolve_below(self.root, name)

    @property
    def minors(self) -> list[int]:
        """The minors of all GPUs."""
        return [gpu.minor for gpu in self.gpus]

    def library(self, name: str) -> Path:
        """Return the target of a library's ``name`` below the driver root."""
        return self.path(f"/usr/lib/{os.uname().machine}-linux-gnu/{name}")

    def chosen(self, *indices: int) -> list[Gpu]:
        """Return the GPUs with these indices."""
        return [self.gpus[index] for index in indices]


def resolve_below(root: Path, name: str) -> Path:
    """Follow links as a process with the root folder ``root`` does; raise OSError if broken."""
    place, todo = root, name.strip("/").split("/")
    while todo:
        place = place / todo.pop(0)
        if place.is_symlink():
            target = str(place.readlink())
            todo = [*target.strip("/").split("/"), *todo]
            place = root if target.startswith("/") else place.parent
    place.lstat()
    return place


def simulate(installation: Installation, root: Path, *options: str) -> Driver:
    """Build a simulated driver in ``root`` with the command that users have for it.

    A new root is a copy of one that the command built for the same options before. This works
    because its files contain no paths.
    """
    if os.path.lexists(root) or any("/" in option for option in options):
        run([installation.command, "simulate", root, *options]).ok()
    else:
        root.parent.mkdir(parents=True, exist_ok=True)
        run(["cp", "-a", _built(installation, options), root]).ok()
    return driver_in(root)


def driver_in(root: Path) -> Driver:
    """Return the facts about the simulated driver in ``root``."""
    gpus: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        text = (folder / "information").read_text()
        facts = dict(line.split(":", 1) for line in text.splitlines())
        values = {name.strip(): value.strip() for name, value in facts.items()}
        minor = int(values["Device Minor"])
        gpus.append(Gpu(len(gpus), minor, values["GPU UUID"], values["Model"]))
    return Driver(root, tuple(gpus))


def _built(installation: Installation, options: Sequence[str]) -> Path:
    """Return a root for these options, built once for each installation.

    Tests must not change it. It isn't below the source tree, which may be in a user's folder,
    where gpuhook builds no simulated driver.
    """
    folder = Path(f"/var/tmp/gpuhook-{installation.bin.parent.name}.simulated")
    folder.mkdir(exist_ok=True)
    kept = folder / hashlib.sha256("\0".join(options).encode()).hexdigest()[:12]
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as unfinished:
            run([installation.command, "simulate", f"{unfinished}/root", *options]).ok()
            with suppress(OSError):  # another worker was faster
                os.rename(f"{unfinished}/root", kept)
    return kept


# A kernel with the driver shows the same /proc/driver/nvidia in every procfs. This one has no
# driver, so a hook before ours puts the simulated driver's into the container's procfs.
_INSIDE = """
pid=$(grep -o '"pid" *: *[0-9]*' | grep -o '[0-9]*$') &&
    exec nsenter -t "$pid" -m mount --bind "$1" "$2/proc/driver"
"""
# Puts the same folder into the procfs that the runtime and our hooks read.
_OUTSIDE = 'mount --bind "$1" /proc/driver && shift && exec "$@"'


def run_with_driver_in_kernel(
    bundle: Bundle, runtime: str | Path, driver: Driver, env: dict[str, str] | None = None
) -> Result:
    """Run a container where /proc/driver/nvidia shows all GPUs."""
    source = driver.root / "proc/driver"
    args = ["sh", "-c", _INSIDE, "sh", str(source), str(bundle.root)]
    hook = {"path": "/bin/sh", "args": args, "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
    bundle.change(lambda spec: spec.setdefault("hooks", {}).update(prestart=[hook]))
    started = (str(runtime), "run", "--bundle", str(bundle.path), bundle.name)
    kernel = ("unshare", "--mount", "sh", "-c", _OUTSIDE, "sh", source)
    return bundle.call(*kernel, *started, env=env)


@contextmanager
def in_kernel(driver: Driver) -> Iterator[Namespace]:
    """Yield a namespace where engines and our programs see the driver in /proc."""
    with held(["sh", "-c", show_in_proc(driver)]) as entered:
        yield entered


def show_in_proc(driver: Driver) -> str:
    """Return the script for a held namespace where /proc shows the driver."""
    return f"mount --bind {shlex.quote(f'{driver.root}/proc/driver')} /proc/driver && {HOLD}"


def fetch_driver_files() -> Path:
    """Return the real driver files of Debian's packages, downloaded the first time.

    They are kept where scripts/fetch-driver-files keeps the packages.
    """
    folder = CACHE / "driver-files/tree"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "tree.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another session may do the same
        if not (folder / ".driver-files").exists():
            run([REPOSITORY / "scripts/fetch-driver-files", folder], timeout=1200.0).ok()
    return folder


def lines_of_nvidia_smi(gpus: Sequence[Gpu]) -> list[str]:
    """Return the output lines of ``nvidia-smi -L`` if exactly ``gpus`` can be reached."""
    return [f"GPU {at}: {gpu.model} (UUID: {gpu.uuid})" for at, gpu in enumerate(gpus)]
