"""A prefork server for the containers of one configuration, and those containers."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path

import pytest

from gpuhook.prefork.slots import ANSWER, ASKED, FOLDER_FD
from harness.bundles import Bundle
from harness.commands import Result, daemon, wait_until
from harness.driver import Driver
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import runtime_layouts

LAUNCHERS = Path("/run/gpuhook/launcher")
NAMES = b"gpuhook-standby\n", b"gpuhook-next\n"
OPTIONS = "[gpuhook]\n"
# ONE is for tests whose results depend neither on the low-level runtime nor on the layout of its
# cgroups. RUNTIMES is for tests whose results don't depend only on that layout.
ONE, RUNTIMES = (
    pytest.mark.parametrize("low_level", runtime_layouts()[:count], ids="-".join, indirect=True)
    for count in (1, 2)
)
SERVED = rf'"--helper", *"\d+", *"{ASKED}", *"{ANSWER}", *"{FOLDER_FD}"'

# Options of gpuhook simulate for machines that differ from one with four GPUs, minors 3,0,1,2.
CHANGES = {
    "minors": ["--gpus=4", "--minors=5,4,3,2"],
    "GPUs": ["--gpus=3", "--minors=1,2,3"],
    "driver": ["--gpus=4", "--driver-version=570.86.15"],
    "MIG": ["--gpus=3", "--model=H100", "--mig=1:1g.10gb,1g.10gb"],
}


class Site:
    """A configuration with its own prefork server, and containers that use it."""

    def __init__(
        self, bundle: Bundle, installation: Installation, driver: Driver, runtime: str, folder: Path
    ) -> None:
        self.bundle = bundle
        self.installation = installation
        self.driver = driver
        self.low_level = runtime
        self.config = write_config(folder / "etc", driver.root, [runtime])
        (self.config.parent / "state").mkdir()
        self.folder = Path(f"{LAUNCHERS}{self.config}/ready")
        self.settle()
        bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
        bundle.command(*look(driver.minors))
        self.plain = bundle.config.read_bytes()

    def settle(self) -> None:
        """Set old file times, so that the configuration doesn't count as just written."""
        past = time.time() - 10
        for place in (self.config, self.config.parent):
            os.utime(place, (past, past))

    def configure(self, line: str) -> None:
        """Add a line to our section of the configuration."""
        self.config.write_text(self.config.read_text().replace(OPTIONS, f"{OPTIONS}{line}\n"))
        self.settle()

    def run(self, *prefix: str | Path, runtime: Path | None = None) -> Result:
        """Create, start and delete a container as an engine does, with a new config.json."""
        self.bundle.config.write_bytes(self.plain)
        env = {"GPUHOOK_CONFIG": str(self.config)}
        words: list[str | Path] = [runtime or self.installation.runtime]
        create = [*prefix, *words, "create", "--bundle", self.bundle.path, self.bundle.name]
        return self.bundle.live(create, words, self.bundle.name, env)

    def works(self, *prefix: str | Path, runtime: Path | None = None) -> None:
        """Start a container, and check that it has its GPUs and no others."""
        self.sees_its_gpus(self.run(*prefix, runtime=runtime))

    def serves(self, asked: str) -> None:
        """Check that the prefork server serves a container that has one more setting.

        Afterwards a prefork server must be ready for the next container.
        """
        self.asks(asked)
        self.stand()
        self.works()
        assert self.served
        wait_until(self.is_standing, "it stands for the next")

    def asks(self, setting: str) -> None:
        """Add a setting to the environment of all further containers."""
        self.bundle.config.write_bytes(self.plain)
        self.bundle.environ(setting)
        self.plain = self.bundle.config.read_bytes()

    def sees_its_gpus(self, result: Result) -> None:
        inside = seen(result)
        given = {gpu.minor for gpu in self.driver.chosen(0, 2)}
        assert inside.gpu_minors == given
        opened = {minor for minor, what in inside.by_hand.items() if what != "EPERM"}
        assert opened == given

    @property
    def helper(self) -> int:
        """The id of the last container's helper process, or 0 if it had none."""
        found = re.search(r'"--helper", *"(\d+)"', self.bundle.config.read_text())
        return int(found[1]) if found else 0

    @property
    def served(self) -> bool:
        """Return whether the prefork server served the last container."""
        return re.search(SERVED, self.bundle.config.read_text()) is not None

    @property
    def ready(self) -> set[int]:
        """The ids of the processes that have a file with their id in the folder."""
        return {int(path.name) for path in self.folder.glob("[0-9]*")}

    @property
    def server(self) -> int:
        """The process id of the only prefork server."""
        [pid] = self.ready
        return pid

    @property
    def processes(self) -> set[int]:
        """The prefork server, the process that tidies up after it, and its children."""
        mark = f"\0GPUHOOK_CONFIG={self.config}\0".encode()
        found = set()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/comm", "rb") as file:
                    if file.read() not in NAMES:
                        continue
                found |= pids_with(Path(f"/proc/{pid}/environ"), mark)
            except OSError:
                continue
        return {pid for pid in found if is_running(pid)}

    @property
    def standing(self) -> set[int]:
        """The prefork server and its parent, which stay from one container to the next."""
        return {pid for server in self.ready for pid in (server, parent_of(server))}

    @property
    def ahead(self) -> int:
        """The worker that waits for the next request, or 0 if none waits."""
        children = [pid for server in self.ready for pid in children_of(server)]
        return next(filter(is_ahead, children), 0)

    def is_standing(self) -> bool:
        """Return whether one prefork server runs, and no process of an earlier one is left."""
        return len(self.ready) == 1 and self.processes == self.standing | {self.ahead}

    def stand(self, *prefix: str | Path) -> None:
        """Start containers, with ``prefix`` before the command, until a prefork server runs.

        No prefork server runs for two seconds after an installation, or after a file was made.
        """

        def stands() -> bool:
            self.works(*prefix)
            try:
                wait_until(self.is_standing, "it stands", timeout=5.0)
            except AssertionError:
                return False
            return True

        wait_until(stands, "a prefork server runs")

    def stand_again(self, before: Container[int]) -> None:
        """Start containers until a prefork server runs that isn't in ``before``.

        The first container may still find the lock of the old prefork server. It may also find
        a file so young that it may have changed since it was read.
        """

        def stands() -> bool:
            if self.is_standing() and not any(pid in before for pid in self.processes):
                return True
            self.works()
            return False

        wait_until(stands, "another stands", interval=0.3)

    def is_gone(self) -> bool:
        """Return whether no process of a prefork server is left, and no file with its id."""
        return not self.processes and not list(self.folder.iterdir())

    def clear(self) -> None:
        """Kill the prefork server and its processes."""
        while left := self.processes:
            for pid in left:
                with suppress(ProcessLookupError):  # a child may have ended by itself
                    os.kill(pid, signal.SIGKILL)


def ended_in_a_container(
    site: Site, start: Callable[[], Result], log: Path, end: Callable[[int], None]
) -> Result:
    """Start a container, and kill its prefork server while its worker is in the container.

    The worker is stopped there, so that the kernel tells the whole process group to exit.
    ``end`` gets the process id of the prefork server. On a busy host, a traced worker may not
    answer in time. The container then starts without it, and this function tries again.
    """
    results: list[Result] = []

    def is_ended() -> bool:
        server, child = site.server, site.ahead
        starting = threading.Thread(target=lambda: results.append(start()))
        stops = ["-e", "trace=setns", "-e", "inject=setns:signal=STOP"]
        tracing = ["strace", "-p", str(child), *stops]

        def stopped() -> bool:
            return "stopped by SIGSTOP" in log.read_text()

        try:
            with daemon(tracing, log, lambda: "attached" in log.read_text()):
                starting.start()
                wait_until(lambda: stopped() or not starting.is_alive(), "it ends or is stopped")
            if not stopped():
                wait_until(site.is_standing, "it stands for the next", shown=log.read_text)
                return False
            status = Path(f"/proc/{child}/status")  # it runs for a moment when strace detaches
            wait_until(lambda: "State:\tT" in status.read_text(), "it is stopped for good")
            end(server)
            starting.join()
            return True
        finally:
            if starting.is_alive():
                site.clear()
                starting.join()

    wait_until(is_ended, "a child is stopped in a container", shown=log.read_text)
    site.clear()
    return results[-1]


def pids_with(environ: Path, mark: bytes) -> set[int]:
    return {int(environ.parent.name)} if mark in b"\0" + environ.read_bytes() else set()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Return the ids of a process' current children."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_ahead(pid: int) -> bool:
    """Return whether a child waits for a request."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes() == NAMES[1]
    except OSError:
        return False


def asked_child(server: int) -> int:
    """Return the id of a child that has a request, or 0 if none has one."""
    return next((pid for pid in children_of(server) if not is_ahead(pid)), 0)


def parent_of(pid: int) -> int:
    """Return the id of a process' parent, or 0 if the process has exited."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def open_files(pid: int) -> list[str]:
    """Return the open files of a process, except those that it closes meanwhile."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return found


def steps(server: int) -> int:
    """Return a measure of a prefork server's progress, which grows with each child that exits.

    It is the number of page faults of the children that the server has waited for, proc(5).
    """
    return int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[8])
