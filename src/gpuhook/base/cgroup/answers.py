"""Check whether the kernel would let this process open a device, without opening it.

A refusal by the device cgroup is EPERM, one by the node's mode EACCES. Sources: access(2), and
the kernel's ``inode_permission``, which checks the mode first and then the cgroup (v1 and v2).
"""

import errno
import os

from gpuhook.base.container.clib import CLibrary, get_errno

_ACCESS = CLibrary().access


def answer(path: str) -> int:
    """Return 0 if this process may read a device, or else the error number."""
    return 0 if _ACCESS(os.fsencode(path), os.R_OK) == 0 else get_errno()


def is_withheld(path: str) -> bool:
    """Tell whether the device cgroup denies this process a device."""
    return answer(path) == errno.EPERM
