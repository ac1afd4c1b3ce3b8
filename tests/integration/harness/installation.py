"""gpuhook as users install it: with pip into a virtual environment, with a config.toml."""

import shutil
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


def copied(
    installation: Installation, folder: Path, python_log: Path | None = None
) -> Installation:
    """Make another installation of the same package, with its programs in ``folder``/bin.

    Each start of its interpreter adds the arguments to ``python_log``.
    """
    bin_folder = folder / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("gpu-py", "gpuhook", "gpuhook-prestart", "gpuhook-cdi-hook"):
        shutil.copy(installation.bin / name, bin_folder)
    python = bin_folder / "python3"
    if python_log is None:
        python.symlink_to(installation.bin / "python3")
    else:
        real = installation.bin / "python3"
        python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{python_log}\nexec {real} "$@"\n')
        python.chmod(0o755)
    packages = next(installation.bin.parent.glob("lib/python3*"))
    (folder / "lib").mkdir()
    (folder / "lib" / packages.name).symlink_to(packages)
    shutil.copy(installation.bin.parent / "pyvenv.cfg", folder)
    return Installation(bin_folder)


def install() -> Installation:
    """Return an installation of this tree, made with pip unless one is up to date."""
    folder = run([REPOSITORY / "scripts/lib/installed"], timeout=600.0).ok().stdout.strip()
    return Installation(Path(folder) / "bin")


def write_config(
    folder: Path, driver_root: Path, runtimes: Sequence[str | Path], more: str = ""
) -> Path:
    """Write config.toml into a new ``folder``.

    ``runtimes`` are the low-level runtimes in the order in which they are tried. ``more`` is
    further TOML for the section of the runtime.
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
    """Change a configuration, so that the environment may name CDI devices of these kinds."""
    setting = f"cdi-kinds-from-environment = {list(kinds)}\n"
    config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{setting}"))
    return config


def harden(config: Path) -> Path:
    """Change a configuration, so that unprivileged containers get GPUs only by mounts.

    Clusters should use these settings.
    """
    settings = (
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false",
        "accept-nvidia-visible-devices-as-volume-mounts = true",
    )
    config.write_text("\n".join((*settings, config.read_text())))
    return config
