"""Checks whether the driver's programs and libraries can run in an image, for `gpuhook explain`."""

import os
from collections.abc import Iterator, Sequence

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import ElfError, GpuhookError
from gpuhook.base.loader import elf
from gpuhook.base.names import machine_name

# Where glibc's loader is, or would be where a layer has no link to it (x86-64, 64-bit ARM).
_GLIBC = tuple(
    f"{folder}/{loader}"
    for loader, folders in {
        "ld-linux-x86-64.so.2": ("/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu"),
        "ld-linux-aarch64.so.1": ("/lib", "/usr/lib", "/usr/lib/aarch64-linux-gnu"),
    }.items()
    for folder in (*folders, folders[-1].removeprefix("/usr"))
)
MUSL = (
    "The image has musl and no glibc, like Alpine, and the driver's programs and libraries need "
    'glibc: they fail with "no such file or directory". Use an image with glibc'
)
# Programs of which an image has at least one; a layer may lack the link /bin.
_PROGRAMS = tuple(
    f"{folder}/{name}"
    for name in ("sh", "bash", "busybox", "env", "true", "ldconfig")
    for folder in ("/bin", "/usr/bin", "/sbin", "/usr/sbin")
)
# e_machine of an ELF header (elf.h), and images' names of architectures (GOARCH), as uname -m.
_MACHINES = {
    3: "i386", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64",
    258: "loongarch64",
}  # fmt: skip
_ARCHITECTURES = {
    "386": "i386", "amd64": "x86_64", "arm64": "aarch64", "loong64": "loongarch64",
}  # fmt: skip
# 32-bit architecture that a host can also run; compat32 provides the libraries.
_ALSO_RUNS = {"x86_64": "i386", "aarch64": "arm"}


def has_musl(folders: Sequence[str]) -> bool:
    """Tell whether an image has musl's loader and not glibc's; its layers may be several folders.

    A folder that can't be read is skipped.
    """
    machine = machine_name()
    musl = glibc = False
    for folder in folders:
        try:
            with Rootfs(folder) as root:
                musl |= root.exists(f"/lib/ld-musl-{machine}.so.1")
                glibc |= any(map(root.exists, _GLIBC))
        except (OSError, GpuhookError):
            continue
    return musl and not glibc


def other_machine(folders: Sequence[str], told: str, program: str) -> str:
    """Return the warning about an image for another architecture, "" if it fits this host.

    ``told`` is the engine's architecture of the image, used if its files don't show one.
    ``program`` is the program of the container, "" if unknown.
    """
    theirs = next(_machines(folders, program), _ARCHITECTURES.get(told, told))
    ours = machine_name()
    if theirs in ("", ours, _ALSO_RUNS.get(ours)):
        return ""
    return (
        f"The image is for {theirs} and this host is {ours}: the driver's programs and "
        f"libraries, which are for {ours}, don't run in it. Use the image for {ours}"
    )


def _machines(folders: Sequence[str], program: str) -> Iterator[str]:
    """Yield the architectures of an image's programs."""
    own = (program,) if program.startswith("/") else ()
    for folder in folders:
        try:
            with Rootfs(folder) as root:
                for path in (*own, *_PROGRAMS):
                    yield from _machine_of(root, path)
        except (OSError, GpuhookError):
            continue


def _machine_of(root: Rootfs, path: str) -> Iterator[str]:
    fd = root.open_file(path)
    if fd is None:
        return
    try:
        number = elf.machine(fd, path)
    except ElfError:  # a script
        return
    finally:
        os.close(fd)
    yield _MACHINES.get(number, f"architecture number {number} of elf.h")
