"""Verification that a requester, or the runtime that called it, is in our namespaces."""

import os

from gpuhook.base.container import kernel
from gpuhook.base.host import proc

# The descriptor from which the hook of a CDI spec reads its slot, and how many of its ancestors
# may be in the container.
HOOK_SLOT, _ANCESTORS = 9, 4


def check_hook(pid: int, answer: int) -> None:
    """Raise ValueError unless a hook waits for this response, and its runtime is in our namespaces.

    The hook runs in the container's namespaces. The low-level runtime that created them is its
    first ancestor in another mount namespace.
    """
    hook = f"/proc/{pid}"
    # protects: asking-hook
    if not os.path.samestat(os.stat(f"{hook}/fd/{HOOK_SLOT}"), os.fstat(answer)):
        raise ValueError("another process waits for this answer")
    container = os.stat(f"{hook}/ns/mnt")
    if os.path.samestat(container, os.stat("/proc/self/ns/mnt")):
        raise ValueError("it isn't in a container")
    for _ in range(_ANCESTORS):
        pid = int(proc.stat_fields(proc.read(f"/proc/{pid}/stat"))[1])
        if not os.path.samestat(os.stat(f"/proc/{pid}/ns/mnt"), container):
            break
    if not _shares_namespaces(pid):  # protects: hooks-runtime
        raise ValueError("the container was made in other namespaces")


def open_launcher(pid: int) -> int:
    """Return a pidfd of this process; ValueError if its namespaces or root aren't ours."""
    launcher = os.pidfd_open(pid)
    if not _shares_namespaces(pid):  # protects: also-namespaces
        raise ValueError("the launcher is in other namespaces")
    return launcher


def _shares_namespaces(pid: int) -> bool:
    """Return whether paths and process ids mean the same to a process as to us."""
    return _root(str(pid)) == _root("self") and all(
        os.path.samestat(os.stat(f"/proc/{pid}/{name}"), os.stat(f"/proc/self/{name}"))
        for name in ("ns/mnt", "ns/pid", "ns/user")
    )


def _root(process: str) -> tuple[int, tuple[int, int]]:
    """Return the identity of a process' root: its mount and its folder."""
    root = os.open(f"/proc/{process}/root", os.O_PATH | os.O_CLOEXEC)
    try:
        return kernel.mount_id(root), kernel.identity(root)
    finally:
        os.close(root)
