"""Creation of missing device nodes with the driver's own nvidia-modprobe.

After a boot without a display, no process has opened the driver yet: its modules may not be
loaded, and /dev/nvidia-uvm doesn't exist. NVIDIA's programs call nvidia-modprobe in that case.
gpuhook does the same before it queries NVML, and only if a node is missing. The program is in the
driver root, writable only by root, and runs below that root with gpuhook's environment. Failures
are not errors here: later steps check which nodes exist.
"""

import os

from gpuhook.base import names
from gpuhook.base.container import kernel
from gpuhook.base.errors import UntrustedPathError
from gpuhook.base.host import signals
from gpuhook.vendors.nvidia import driver_files
from gpuhook.vendors.nvidia.model import CONTROL, UVM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.vendors.nvidia.locations import Locations

PROGRAM = "nvidia-modprobe"
_NODES = (CONTROL.path, UVM.path)
# Load nvidia and make /dev/nvidia0, load nvidia-uvm and make its nodes: nvidia-modprobe(1).
_ARGUMENTS = ("-c", "0", "-u")
_ENVIRONMENT = {"PATH": names.SYSTEM_PATH}
_SECONDS = 10.0
_REAP_SECONDS = 0.5


def prepare(root: "Rootfs", locations: "Locations", environment: tuple[str, ...] = ()) -> bool:
    """Run nvidia-modprobe if a control node is missing; return whether it ran.

    ``environment`` are NAME=VALUE settings for it. Does nothing unless root.
    """
    if os.geteuid() != 0 or all(root.exists(node) for node in _NODES):
        return False
    program = driver_files.find_program(root, PROGRAM, locations)
    if program is None:
        return False
    try:
        check_program(root, program)  # protects: modprobe-writers
    except UntrustedPathError:
        return False
    pairs = (entry.partition("=") for entry in environment)
    variables = {**_ENVIRONMENT, **{name: value for name, equals, value in pairs if equals}}
    child = os.fork()
    if child == 0:
        _become(root.path, program, variables)
    if kernel.reap(child, _SECONDS) is None:
        signals.send_to_child(child, 9)
        kernel.reap(child, _REAP_SECONDS)
    return True


def check_program(root: "Rootfs", path: str) -> None:
    """Raise UntrustedPathError if users other than root can have written a program.

    It runs with all of root's rights. Links are resolved below the driver root, as at its start.
    """
    from gpuhook.base.host import files  # noqa: PLC0415 - only if a node is missing

    fd = root.open(path)
    try:
        files.check_writers(os.readlink(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


def _become(root: str, program: str, variables: dict[str, str]) -> "NoReturn":
    try:
        kernel.keep_only(())
        if root != "/":
            os.chroot(root)
        os.chdir("/")
        os.execve(program, [program, *_ARGUMENTS], variables)  # noqa: S606 - no shell is meant
    finally:
        os._exit(127)
