"""The host's mounts, for a program that an engine starts in a container's namespace.

Its own mount table isn't sufficient: Apptainer's contains a filesystem that it mounted only for
this container. The tables of the engine's caller and of the first process have the host's mounts.
"""

import os

from gpuhook.base.host import proc

_FIRST = 1


def parent(process: str = "self") -> int:
    """Return the parent of a process, by default of this one.

    It is read from /proc, because only /proc's numbers are valid there: Apptainer's --pid starts us
    in the container's PID namespace, where os.getppid has another number, with the host's /proc.
    OSError if that process is gone.
    """
    return int(proc.status(proc.read(f"/proc/{process}/status"))["PPid"][0])


def mount_tables() -> list[bytes]:
    """Return the mount tables of the engine's caller and of the first process.

    An empty list if one of them can't be read: then nothing is known about the host.
    """
    try:
        return [_table(_caller()), _table(_FIRST)]
    except OSError:
        return []


def _caller() -> int:
    """Return the first ancestor that runs another program than the engine, our parent.

    The engine may consist of several processes. OSError if one is gone.
    """
    process = parent()
    engine = os.stat(f"/proc/{process}/exe")
    while process > _FIRST and _runs(process, engine):
        process = parent(str(process))
    return process


def _runs(process: int, program: os.stat_result) -> bool:
    """Tell whether a process runs a program; one outside our user namespace counts as another."""
    try:
        found = os.stat(f"/proc/{process}/exe")
    except PermissionError:
        return False
    return (found.st_dev, found.st_ino) == (program.st_dev, program.st_ino)


def _table(process: int) -> bytes:
    return proc.read(f"/proc/{process}/mountinfo")
