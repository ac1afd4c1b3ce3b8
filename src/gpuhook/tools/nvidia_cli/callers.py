"""What the host has mounted, to a program that an engine starts in a container's namespace.

Its own mount table doesn't say: Apptainer's holds a filesystem that it mounted for this
container alone. The table of whoever called the engine does, and that of the first process.
"""

import os

from gpuhook.ground.host import proc

_FIRST = 1


def parent(process: str = "self") -> int:
    """Return the process that started a process, this one unless said otherwise.

    It is asked of /proc, whose numbers count there: Apptainer's --pid starts us in a PID namespace
    of the container's, where os.getppid has another number, with the host's /proc. OSError
    if that process is gone.
    """
    return int(proc.status(proc.read(f"/proc/{process}/status"))["PPid"][0])


def mount_tables() -> list[bytes]:
    """Return the mount tables of the engine's caller and of the first process.

    None at all where one of them can't be had: nothing is known of the host then.
    """
    try:
        return [_table(_caller()), _table(_FIRST)]
    except OSError:
        return []


def _caller() -> int:
    """Return the first process above this one that runs another program than its parent.

    The engine may be several processes. OSError where one is gone.
    """
    process = parent()
    engine = os.stat(f"/proc/{process}/exe")
    while process > _FIRST and _runs(process, engine):
        process = parent(str(process))
    return process


def _runs(process: int, program: os.stat_result) -> bool:
    """Tell whether a process runs a program; one outside our user namespace is another's."""
    try:
        found = os.stat(f"/proc/{process}/exe")
    except PermissionError:
        return False
    return (found.st_dev, found.st_ino) == (program.st_dev, program.st_ino)


def _table(process: int) -> bytes:
    return proc.read(f"/proc/{process}/mountinfo")
