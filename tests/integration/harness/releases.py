"""Other Debian releases with their engines, as if this host had booted them."""

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.commands import run
from harness.driver import Driver, show_in_proc
from harness.images import REPOSITORY
from harness.installation import Installation, write_config
from harness.namespaces import LAYOUTS, Namespace, held, host_cgroups

NAMES = ("trixie", "sid")
PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Release:
    """A running release: its namespace has the session's /run and its own /etc.

    gpuhook is installed in it for its own Python. ``config`` is the configuration for the
    simulated driver, which /proc also shows.
    """

    name: str
    namespace: Namespace
    installation: Installation
    config: Path

    @property
    def etc(self) -> Path:
        """The release's /etc, as a path for this process."""
        return Path(f"/proc/{self.namespace.pid}/root/etc")

    def gpuhook(self, *words: str | Path) -> None:
        """Run our command line, which must succeed."""
        env = {"GPUHOOK_CONFIG": str(self.config)}
        self.namespace.run(self.installation.command, *words, env=env).ok()

    def which(self, program: str) -> str:
        """Return the path of a program of the release."""
        return self.namespace.run("sh", "-c", f"command -v {program}").ok().stdout.strip()


def fetch_apptainer() -> Path:
    """Return the root of a release with only Apptainer, which Debian 12 and 13 don't have."""
    return fetch_one("sid", "apptainer")


def fetch_charliecloud() -> Path:
    """Return the root of a release with only Charliecloud, of which Debian 12 has an older one."""
    return fetch_one("sid", "charliecloud")


def fetch_gvisor() -> Path:
    """Return the root of a release with gVisor's runsc.

    The runsc of Debian 12 doesn't know GPUs, and the runsc of sid panics.
    """
    return fetch_one("trixie", "runsc")


def fetch_one(name: str, *package: str) -> Path:
    """Return the root of a release with its engines or one package; it is made the first time."""
    command = REPOSITORY / "scripts/lib/engine-root"
    printed = run([command, name, *package], timeout=1200.0).ok().stdout
    return Path(printed.splitlines()[-1])


def fetch() -> dict[str, Path]:
    """Return the root of each release with its engines."""
    return {name: fetch_one(name) for name in NAMES}


@contextmanager
def release(
    name: str, lower: Path, folder: Path, installation: Installation, driver: Driver
) -> Iterator[Release]:
    """Run the release whose root is ``lower`` until the end of the block.

    Its changes are kept below ``folder``.
    """
    root, layers = folder / "root", [folder / "upper", folder / "work"]
    for made in (root, *layers):
        made.mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={layers[0]},workdir={layers[1]}"
    inside = [REPOSITORY / "scripts/lib/inside", "--same-run", root, "/"]
    layout = "v1" if host_cgroups() == "hybrid" else "host"  # crun needs v1 on a hybrid host
    words = [*inside, "sh", "-c", f"{LAYOUTS[layout]} && {show_in_proc(driver)}"]
    script = f"mount -t overlay -o {options} overlay {root} && exec {shlex.join(map(str, words))}"
    with held(["sh", "-c", script], layout, Path("/")) as entered:
        ours = _install(entered, folder / "gpuhook", installation)
        yield Release(name, entered, ours, write_config(folder / "config", driver.root, ["runc"]))


def _install(release: Namespace, target: Path, installation: Installation) -> Installation:
    """Install the files that pip has installed here for a release's Python, without network."""
    release.run(PYTHON, "-m", "venv", "--without-pip", target).ok()
    [packages] = target.glob("lib/python3*/site-packages")
    [ours] = installation.bin.parent.glob("lib/python3*/site-packages")
    shutil.copytree(ours, packages, symlinks=True, dirs_exist_ok=True)
    for program in installation.bin.iterdir():
        text = program.read_bytes() if program.is_file() else b""
        if program.name.startswith(("gpu", "nvidia")):
            own = text.replace(os.fsencode(installation.bin), os.fsencode(target / "bin"))
            (target / "bin" / program.name).write_bytes(own)
            (target / "bin" / program.name).chmod(0o755)
    return Installation(target / "bin")
