"""Control groups that count what containers cost in processor time, and know what still runs.

All lie below one group of our own. Each kind of container has one with two parts: "programs"
for what the benchmark starts while it has entered the group, and "containers", below which the
low-level runtime makes the group of each container.
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TOP = Path("/sys/fs/cgroup")
_PATIENCE = 10.0  # seconds to wait until killed processes are gone and groups can be removed
_STANDING = ("gpuhook-standby\n", "gpuhook-next\n")  # process names of gpuhook's prefork servers
_PAUSE = 0.01  # seconds between two attempts


class Group:
    """All processes of one kind of container, and the processor time that they took.

    Counted is the user and system time, as the kernel's scheduler knows it, of

    - the calls of the runtime and all that comes out of them, hooks and helpers included,
      whoever is their parent by now;
    - the containers' own processes;
    - processes that stand from one container to the next, also what they do in between: they
      leave the group in which they were started, and are brought back (``bring_back``).

    Not counted are the benchmark itself, though it enters the group, and kernel threads.
    """

    def __init__(self, path: str, home: Path) -> None:
        self.containers = f"/{path}/containers"  # as cgroupsPath in config.json names it
        self.folder = _hierarchy() / path
        self._home = home
        self._our_own = 0.0
        for part in ("programs", "containers"):
            (self.folder / part).mkdir(parents=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in this group, so that all that we start is in it, and return home after."""
        enter(self.folder / "programs")
        before = time.process_time()
        try:
            yield
        finally:
            self._our_own += time.process_time() - before
            enter(self._home)

    def bring_back(self, config: str) -> None:
        """Count the prefork servers for a configuration, and what comes out of them."""
        mark = f"\0GPUHOOK_CONFIG={config}\0".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has just ended
                if (entry / "comm").read_text() in _STANDING:
                    environ = b"\0" + (entry / "environ").read_bytes()
                    if mark in environ:
                        (self.folder / "programs/cgroup.procs").write_text(entry.name)

    def seconds(self) -> float:
        """Return the processor time of all its processes so far, dead ones included."""
        if is_unified():
            lines = (self.folder / "cpu.stat").read_text().splitlines()
            counted = int(dict(line.split() for line in lines)["usage_usec"]) / 1e6
        else:
            counted = int((self.folder / "cpuacct.usage").read_text()) / 1e9
        return counted - self._our_own


class Groups:
    """The group of our own, and those that were made below it."""

    def __init__(self) -> None:
        self._name = f"gpuhook-benchmark-{secrets.token_hex(6)}"
        self._home = _home()
        self._count = 0

    def new(self) -> Group:
        """Return another group."""
        self._count += 1
        return Group(f"{self._name}/{self._count}", self._home)

    def tear_down(self) -> None:
        """End every process that is in a group, and remove them in every hierarchy.

        The low-level runtime makes the same path in all of cgroup v1's hierarchies.
        """
        for top in (_TOP, *_TOP.iterdir()):
            if (top / self._name).is_dir() and not _remove(top / self._name):
                print(f"{top / self._name} stays: something in it doesn't end", file=sys.stderr)


@contextmanager
def new_groups() -> Iterator[Groups]:
    """Give groups that go away with all that still runs in them."""
    groups = Groups()
    try:
        yield groups
    finally:
        groups.tear_down()


def enter(folder: Path) -> None:
    """Move the calling process into a group."""
    (folder / "cgroup.procs").write_text("0")


def is_unified() -> bool:
    """Tell whether the machine has cgroup v2 alone; runc and crun look at the same folder."""
    return (_TOP / "cgroup.controllers").exists()


def _hierarchy() -> Path:
    """Return the mount point of the hierarchy that counts processor time."""
    return _TOP if is_unified() else _TOP / "cpuacct"


def _home() -> Path:
    """Return the group that the benchmark was started in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" if is_unified() else "cpuacct" in controllers.split(","):
            return _hierarchy() / path.lstrip("/")
    raise RuntimeError("This kernel has no control groups that count processor time (cpuacct)")


def _remove(folder: Path) -> bool:
    """End what is in a tree of groups and remove the tree; return whether that was possible."""
    deadline = time.monotonic() + _PATIENCE
    while folder.exists() and time.monotonic() < deadline:
        with suppress(OSError):  # its processes exit meanwhile, or are still exiting
            for file in folder.glob("**/cgroup.procs"):
                for pid in file.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            for group, _, _ in os.walk(folder, topdown=False):
                os.rmdir(group)
        time.sleep(_PAUSE)
    return not folder.exists()
