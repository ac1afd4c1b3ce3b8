"""Release of memory that a process needed only for its start."""

from gpuhook.base.container import clib
from gpuhook.base.host import proc

_MAPS = "/proc/self/maps"
_PAGEOUT = 21  # MADV_PAGEOUT: linux/mman.h, since Linux 5.4; an older one refuses it


def give_back() -> None:
    """Release pages of programs and libraries that no other process has mapped.

    Pages that are used again are read again, and no written data is lost. When gRPC's library is
    loaded, 10 MiB of it are mapped for hundreds of constructors that run once. OSError without
    /proc. Sources: madvise(2), proc_pid_maps(5).
    """
    libc = clib.Library()
    for line in proc.lines(proc.read(_MAPS)):
        place, mode, _, _, inode, *_ = line.split(b" ", 5)
        if inode != b"0" and b"w" not in mode:
            start, end = (int(each, 16) for each in place.split(b"-"))
            libc.madvise(clib.c_long(start), clib.c_long(end - start), _PAGEOUT)
