"""Who asks the process that stands ready: whether it is who it is said to be, and where we are."""

import os

from gpuhook.ground.host import proc

# Where the hook of a CDI document has the seat that it reads from, and how many ancestors of it
# may be in the container.
_HOOKS_SEAT, _ANCESTORS = 9, 4


def check_hook(pid: int, answer: int) -> None:
    """ValueError unless a hook waits for an answer, in a container that was made where we are.

    It runs in the container's namespaces. The low-level runtime that made those is the first of
    its ancestors that has others.
    """
    hook = f"/proc/{pid}"
    # protects: asking-hook
    if not os.path.samestat(os.stat(f"{hook}/fd/{_HOOKS_SEAT}"), os.fstat(answer)):
        raise ValueError("another process waits for this answer")
    inside = os.stat(f"{hook}/ns/mnt")
    if os.path.samestat(inside, os.stat("/proc/self/ns/mnt")):
        raise ValueError("it isn't in a container")
    for _ in range(_ANCESTORS):
        pid = int(proc.stat_fields(proc.read(f"/proc/{pid}/stat"))[1])
        if not os.path.samestat(os.stat(f"/proc/{pid}/ns/mnt"), inside):
            break
    # protects: hooks-runtime
    for name in ("ns/mnt", "ns/pid", "ns/user", "root"):
        theirs, ours = os.stat(f"/proc/{pid}/{name}"), os.stat(f"/proc/self/{name}")
        if not os.path.samestat(theirs, ours):
            raise ValueError("the container was made in other namespaces")


def open_launcher(pid: int) -> int:
    """Return a pidfd of the launcher; ValueError for one in another mount namespace."""
    launcher = os.pidfd_open(pid)
    theirs, ours = os.stat(f"/proc/{pid}/ns/mnt"), os.stat("/proc/self/ns/mnt")
    if not os.path.samestat(theirs, ours):  # protects: also-namespaces
        raise ValueError("the launcher is in another mount namespace")
    return launcher
