"""Root filesystems not made from this host: Debian's releases, and images with hardly any files."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.commands import run
from harness.images import PROBES, REPOSITORY

# Releases in which /bin, /sbin and /lib are links into /usr, and one in which they aren't.
DEBIANS = ("bullseye", "bullseye-unmerged", "bookworm", "trixie")
TRIPLET = f"{os.uname().machine}-linux-gnu"
MUSL_LOADER = f"ld-musl-{os.uname().machine}.so.1"


def fetch_one(name: str) -> Path:
    """Return the root of a Debian release; debootstrap makes it the first time."""
    command = REPOSITORY / "scripts/lib/debian-root"
    printed = run([command, *name.split("-")], timeout=1200.0).ok().stdout
    return Path(printed.splitlines()[-1])


def fetch() -> dict[str, Path]:
    """Return the root of each Debian release."""
    return {name: fetch_one(name) for name in DEBIANS}


def add_probe(root: Path) -> None:
    """Add to a Debian root a dlprobe that runs with the root's C library."""
    probe = root / "usr/local/bin/dlprobe"
    shutil.copy(PROBES / "dlprobe.pl", probe)
    probe.chmod(0o755)


def build_distroless(folder: Path, programs: Sequence[Path], *, debian: bool) -> Path:
    """Build a root with only a loader, the C library and the ``programs``.

    It has no shell, no loader cache and no /etc. With ``debian``, it has /etc/debian_version,
    as distroless images made from Debian do.
    """
    libraries = folder / "usr/lib" / TRIPLET
    for made in (libraries, folder / "usr/lib64", folder / "bin", folder / "proc", folder / "dev"):
        made.mkdir(parents=True)
    (folder / "lib").symlink_to("usr/lib")
    (folder / "lib64").symlink_to("usr/lib64")
    for library in _needed(programs):
        place = folder / "usr/lib64" if library.name.startswith("ld-") else libraries
        shutil.copy(library, place / library.name)
    for program in programs:
        shutil.copy(program, folder / "bin")
    if debian:
        (folder / "etc").mkdir()
        (folder / "etc/debian_version").write_text("12.0\n")
    return folder


def _needed(programs: Sequence[Path]) -> list[Path]:
    """Return the loader and the libraries that programs and GPU libraries need."""
    found = {Path(f"/lib/{TRIPLET}/{name}") for name in ("libm.so.6", "libdl.so.2")}
    found |= {Path(f"/lib/{TRIPLET}/{name}") for name in ("libpthread.so.0", "librt.so.1")}
    for program in programs:
        for line in run(["ldd", program]).stdout.splitlines():
            found |= {Path(word) for word in line.split() if word.startswith("/")}
    return sorted(found)


def build_musl(folder: Path) -> Path:
    """Build a root with Alpine's layout: musl's loader in /lib, no /usr/lib64, no loader cache.

    Its /bin/dlprobe is compiled for musl.
    """
    for name in ("bin", "lib", "usr/lib", "etc", "proc", "dev"):
        (folder / name).mkdir(parents=True)
    shutil.copy(Path("/lib", MUSL_LOADER).resolve(), folder / "lib" / MUSL_LOADER)
    compile_for_musl(PROBES / "dlprobe.c", folder / "bin/dlprobe")
    return folder


def compile_for_musl(source: Path, target: Path, *flags: str) -> None:
    """Compile a C program or library with musl-gcc."""
    run(["musl-gcc", "-O1", "-Wall", "-Werror", *flags, "-o", target, source]).ok()
