"""The supervisor of a service for the kubelet: its loop, signals and start.

It monitors the host by a ``device_monitor``, and sends the server (``server``), its child, a state
as a line of JSON whenever it changes. It has one thread and one loop. Work that may hang or crash
is done in children: drivers, gRPC, preparing devices. The supervisor doesn't load gRPC, and so may
fork.

The runtime and the hook import nothing from here. The package needs ``gpuhook[kubernetes]``.
"""

import os
import select
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import FrameType
from typing import Any, Self

from gpuhook.base.container import clib
from gpuhook.base.errors import PluginError, printable
from gpuhook.base.host import proc
from gpuhook.cluster.kubelet_endpoint.device_monitor import DeviceMonitor
from gpuhook.cluster.kubelet_endpoint.folder import check_there
from gpuhook.monitor import INSTALL
from gpuhook.monitor.followed import FollowedConfig, report_ready
from gpuhook.monitor.host.state_worker import Serve, StateWorker
from gpuhook.monitor.service_metrics import Calls, ServiceMetrics


def check_packages() -> None:
    """Raise PluginError if packages for talking to the kubelet are missing; imports none."""
    for name in ("grpc", "google", "google.protobuf"):
        if find_spec(name) is None:
            raise PluginError(
                "Talking to the kubelet needs the Python packages grpcio and protobuf, and the "
                f"module {name} is missing",
                INSTALL,
            )


def tell(sentence: str) -> None:
    """Print a line on standard error, and ignore that its reader may have exited."""
    try:
        sys.stderr.write(f"gpuhook: {printable(sentence)}\n")
        sys.stderr.flush()
    except OSError:
        pass


class ShutdownSignal(BaseException):
    """SIGTERM or SIGINT was received: interrupts any waiting."""


class Signals:
    """Signal handlers: SIGTERM and SIGINT end the loop, SIGHUP and SIGCHLD wake it.

    Children reset them.
    """

    def __init__(self) -> None:
        self.hangup = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._note)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler wakes the loop
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        return self

    def __exit__(self, *details: object) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)
        self._pid = 0

    def _forget(self) -> None:
        """Reset a child's signal handlers; it doesn't use these descriptors."""
        if self._pid == 0:
            return
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        raise ShutdownSignal

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.hangup = True

    def ignore(self) -> None:
        """Ignore signals during the shutdown."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def fileno(self) -> int:
        """Return the descriptor that is readable after a signal."""
        return self._reader

    def read(self) -> None:
        """Discard the wake-up bytes."""
        try:
            while os.read(self._reader, 512):
                pass
        except BlockingIOError:
            pass


class EndpointSupervisor(ABC):
    """A supervisor's loop.

    ``serve`` is the work of the process that talks to the kubelet, and ``folders`` are the
    kubelet's. ``calls`` are its metrics, served at an address. ``followed`` is the configuration,
    of which a change raises ConfigChanged. A supervisor that ``needs_devices`` ends if there are
    none at the start.
    """

    needs_devices = False

    def __init__(
        self,
        signals: Signals,
        observed: DeviceMonitor,
        serve: Serve,
        calls: Calls,
        metrics_listen: str,
        folders: Sequence[str],
        followed: FollowedConfig | None,
    ) -> None:
        self._signals = signals
        self._observed = observed
        self._clock = time.monotonic
        self._server = StateWorker(serve, "The server", "gpuhook-server", tell, self._clock)
        self._metrics = ServiceMetrics(calls, metrics_listen, "--metrics-listen", tell, self._clock)
        self._folders = folders
        self._followed = followed

    @abstractmethod
    def _look(self) -> None:
        """Search for devices, at the start."""

    @abstractmethod
    def _work(self) -> list[float | None]:
        """Do all work that is due; return when more will be, None for never."""

    def _workers(self) -> Sequence[Any]:
        """Return further children, whose ``read`` processes their lines."""
        return ()

    def _called(self, call: Mapping[str, Any]) -> None:
        """Process a call of the server; overridden by services whose server makes calls."""
        raise NotImplementedError

    def run(self) -> int:
        """Run the loop; returns only 1, if there are no devices and it needs some."""
        self._look()
        problem = self._observed.machine.why_nothing()
        if problem is not None:
            tell(str(problem))
            if self.needs_devices:
                return 1
            tell("Waiting until there is a device")
        while True:
            times = self._tend()
            report_ready()
            self._wait(times)

    def end(self) -> None:
        """Stop all children."""
        self._observed.end()
        self._server.end()
        self._metrics.end()

    def _tend(self) -> list[float | None]:
        if self._signals.hangup:
            self._signals.hangup = False
            self._observed.hang_up()
        if self._observed.is_due():
            if self._followed is not None:
                self._followed.check(tell)
            for each in self._folders:
                check_there(each)
        times = self._work()
        self._metrics.tend()
        return times

    def _wait(self, times: list[float | None]) -> None:
        """Wait for messages or the next deadline, and process the messages."""
        times += [*self._observed.deadlines(), self._server.deadline(), self._metrics.deadline()]
        children = [each for each in (self._server, *self._workers()) if each.fileno() >= 0]
        reading = [self._signals, *self._observed.readers(), *children]
        writing = [fd for fd in (self._server.wants(), *self._metrics.writers()) if fd >= 0]
        end = min(at for at in times if at is not None)
        ready, free, _ = select.select(reading, writing, [], max(0.0, end - self._clock()))
        if self._signals in ready:
            self._signals.read()
        self._observed.read(ready)
        if self._server in ready:
            for line in self._server.lines():
                if "labels" in line:
                    labels = tuple(map(str, line["labels"]))
                    self._metrics.note(labels, line["seconds"], failed=line["failed"])
                else:
                    self._called(line)
        for worker in self._workers():
            if worker in ready:
                worker.read()
        if free:
            self._server.write()


def run(make: Callable[[Signals], EndpointSupervisor]) -> int:
    """Run a supervisor until SIGTERM or SIGINT; return the exit status.

    Raises ConfigChanged if its configuration has changed since the start. PluginError if the
    packages for talking to the kubelet are missing, or its folder was deleted.
    """
    check_packages()
    with Signals() as signals:
        supervisor = make(signals)
        try:
            return supervisor.run()
        except ShutdownSignal:
            return 0
        finally:
            signals.ignore()
            supervisor.end()


_MAPS = "/proc/self/maps"
_PAGEOUT = 21  # MADV_PAGEOUT: linux/mman.h, since Linux 5.4; an older one refuses it


def give_back() -> None:
    """Release pages of programs and libraries that no other process has mapped.

    Pages that are used again are read again, and no written data is lost. When gRPC's library is
    loaded, 10 MiB of it are mapped for hundreds of constructors that run once. OSError without
    /proc. Sources: madvise(2), proc_pid_maps(5).
    """
    libc = clib.CLibrary()
    for line in proc.lines(proc.read(_MAPS)):
        place, mode, _, _, inode, *_ = line.split(b" ", 5)
        if inode != b"0" and b"w" not in mode:
            start, end = (int(each, 16) for each in place.split(b"-"))
            libc.madvise(clib.c_long(start), clib.c_long(end - start), _PAGEOUT)
