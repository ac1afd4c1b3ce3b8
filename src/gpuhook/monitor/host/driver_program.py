"""Programs of gpuhook, and of the driver.

The driver root may be another system than this process's: a pod's image has no C library for the
node's programs. It is then the node's system, or that of a driver container, and the programs run
with it as their root.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from gpuhook.base import names
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, ElfError, EngineError
from gpuhook.base.host import files, proc
from gpuhook.base.loader import elf
from gpuhook.core.inventory.model import Inventory

_LINE = 256  # bytes that the kernel reads of a script's first line (execve(2))


def find(inventory: Inventory, name: str) -> str | None:
    """Return the host path of a driver's program, None if there is none.

    UntrustedPathError if another user than root could have put it there.
    """
    for file in inventory.files:
        if file.kind == "binary" and file.target.rpartition("/")[2] == name:
            found = inventory.root.rstrip("/") + file.path
            if os.path.isfile(found):  # an inventory may be older than a package's removal
                files.check_way(found)
                return found
    return None


def starter(program: str) -> str:
    """Return a program's loader or a script's interpreter; "" for none.

    DriverError if the program can't be read.
    """
    try:
        with open(program, "rb") as file:
            line = file.read(_LINE).partition(b"\n")[0]
            if line.startswith(b"#!"):
                return os.fsdecode(proc.words(line[2:])[0])
            return elf.loader(file.fileno(), program)
    except (OSError, IndexError, ElfError) as error:
        raise DriverError(
            f"{program} can't be run: {error}", "Install the driver's programs again"
        ) from None


def runs_here(program: str) -> bool:
    """Tell whether this system has a program's loader or interpreter."""
    return os.path.exists(starter(program) or "/")


def root_of(root: str, program: str) -> str:
    """Return the root with which a driver root's program can run; DriverError if there is none."""
    if runs_here(program):
        return "/"
    with Rootfs(root) as driver:
        if driver.stat(starter(program)) is not None:
            return root
    raise DriverError(
        f"{program} needs {starter(program)}, which neither this system nor {root} has",
        "Run gpuhook on the node, as a service",
    )


def run(
    root: str, program: str, arguments: Sequence[str], libraries: str, seconds: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a program of a driver root to its end.

    ``libraries`` is the folder of the driver's libraries on this host, "" if the loader finds them,
    as it does in a root that is a separate system. DriverError if it can't be run,
    subprocess.TimeoutExpired if it takes longer than ``seconds``.
    """
    with_root = root_of(root, program)
    environment = {"PATH": names.SYSTEM_PATH, "LC_ALL": "C.UTF-8"}
    if with_root != "/":
        program = program.removeprefix(root.rstrip("/"))
    elif libraries:
        environment["LD_LIBRARY_PATH"] = libraries

    def enter() -> None:
        os.chroot(with_root)
        os.chdir("/")

    return subprocess.run(
        [program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds,
        env=environment, check=False, preexec_fn=enter,
    )  # fmt: skip


def our_program(
    name: str, remedy: str = "Reinstall gpuhook, or give its place with --runtime-path"
) -> str:
    """Return the absolute path of a gpuhook program: in gpuhook's folder, else on PATH."""
    folders = [os.path.dirname(os.path.abspath(word)) for word in (sys.argv[0], sys.executable)]
    for folder in folders:
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK):
            return path
    found = shutil.which(name)
    if found is None:
        raise EngineError(
            f"The program {name} was found neither in gpuhook's folder nor on PATH",
            remedy,
        )
    return os.path.abspath(found)
