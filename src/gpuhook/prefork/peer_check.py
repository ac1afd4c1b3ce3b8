"""Who asks the process that stands ready: whether it is who it is said to be, and where we are."""

import os

from gpuhook.ground.container import kernel
from gpuhook.ground.host import proc

# Where the hook of a CDI document has the slot that it reads from, and how many ancestors of it
# may be in the container.
HOOKS_SEAT, _ANCESTORS = 9, 4


def check_hook(pid: int, answer: int) -> None:
    """ValueError unless a hook waits for an answer, in a container that was made where we are.

    It runs in the container's namespaces. The low-level runtime that made those is the first of
    its ancestors that has others.
    """
    hook = f"/proc/{pid}"
    # protects: asking-hook
    if not os.path.samestat(os.stat(f"{hook}/fd/{HOOKS_SEAT}"), os.fstat(answer)):
        raise ValueError("another process waits for this answer")
    inside = os.stat(f"{hook}/ns/mnt")
    if os.path.samestat(inside, os.stat("/proc/self/ns/mnt")):
        raise ValueError("it isn't in a container")
    for _ in range(_ANCESTORS):
        pid = int(proc.stat_fields(proc.read(f"/proc/{pid}/stat"))[1])
        if not os.path.samestat(os.stat(f"/proc/{pid}/ns/mnt"), inside):
            break
    if not _is_where_we_are(pid):  # protects: hooks-runtime
        raise ValueError("the container was made in other namespaces")


def open_launcher(pid: int) -> int:
    """Return a pidfd of the launcher; ValueError for one in other namespaces, or another root."""
    launcher = os.pidfd_open(pid)
    if not _is_where_we_are(pid):  # protects: also-namespaces
        raise ValueError("the launcher is in other namespaces")
    return launcher


def _is_where_we_are(pid: int) -> bool:
    """Tell whether paths and numbers mean to a process what they mean to us."""
    return _root(str(pid)) == _root("self") and all(
        os.path.samestat(os.stat(f"/proc/{pid}/{name}"), os.stat(f"/proc/self/{name}"))
        for name in ("ns/mnt", "ns/pid", "ns/user")
    )


def _root(process: str) -> tuple[int, tuple[int, int]]:
    """Return which root a process has: a folder, and the mount of it."""
    root = os.open(f"/proc/{process}/root", os.O_PATH | os.O_CLOEXEC)
    try:
        return kernel.mount_id(root), kernel.identity(root)
    finally:
        os.close(root)
