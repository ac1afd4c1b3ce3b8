"""What the kernel says to this process that would open a device, without opening it.

A device cgroup's refusal is EPERM, that of a node's mode EACCES. Sources: access(2), and the
kernel's ``inode_permission``, which asks the mode first and then the cgroup, of v1 and v2.
"""

import errno
import os

from gpuhook.ground.container.clib import Library, get_errno

_ACCESS = Library().access


def answer(path: str) -> int:
    """Return 0 where this process may read a device, or the number of the error."""
    return 0 if _ACCESS(os.fsencode(path), os.R_OK) == 0 else get_errno()


def is_withheld(path: str) -> bool:
    """Tell whether the device cgroup keeps this process from a device."""
    return answer(path) == errno.EPERM
