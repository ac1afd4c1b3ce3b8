"""gpuhook as a user has it: installed by pip into a virtual environment, with a config.toml."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.commands import run
from harness.images import REPOSITORY


@dataclass(frozen=True)
class Installation:
    """The bin folder of the virtual environment that gpuhook was installed into."""

    bin: Path

    @property
    def runtime(self) -> Path:
        """The OCI runtime."""
        return self.bin / "gpu-py"

    @property
    def hook(self) -> Path:
        """The prestart hook."""
        return self.bin / "gpuhook-prestart"

    @property
    def command(self) -> Path:
        """The command line."""
        return self.bin / "gpuhook"


def install() -> Installation:
    """Install this tree with pip, or find the installation of it that is still fresh."""
    folder = run([REPOSITORY / "scripts/lib/installed"], timeout=600.0).ok().stdout.strip()
    return Installation(Path(folder) / "bin")


def write_config(
    folder: Path, driver_root: Path, runtimes: Sequence[str | Path], more: str = ""
) -> Path:
    """Write config.toml into a new ``folder``.

    ``runtimes`` are the low-level runtimes in the order in which they are tried, ``more``
    is further TOML for the section of the runtime.
    """
    folder.mkdir(parents=True)
    state = folder / "state"
    names = ", ".join(f'"{runtime}"' for runtime in runtimes)
    config = folder / "config.toml"
    config.write_text(
        f'[nvidia-container-cli]\nroot = "{driver_root}"\nload-kmods = false\n'
        f'[gpuhook]\nstate-dir = "{state}"\n'
        f"[nvidia-container-runtime]\nruntimes = [{names}]\n{more}"
    )
    return config


def open_kinds(config: Path, *kinds: str) -> Path:
    """Let the environment name CDI devices of these kinds."""
    setting = f"cdi-kinds-from-environment = {list(kinds)}\n"
    config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{setting}"))
    return config


def harden(config: Path) -> Path:
    """Let only mounts hand out GPUs to containers without privileges, as clusters should."""
    settings = (
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false",
        "accept-nvidia-visible-devices-as-volume-mounts = true",
    )
    config.write_text("\n".join((*settings, config.read_text())))
    return config
