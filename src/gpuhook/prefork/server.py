"""The prefork server: passes each request to a worker, and kills workers that hang.

The server kills a worker that doesn't respond in time. That is safe: a worker changes nothing in
the bundle, and a launcher or hook without a response starts Python. A worker that has reported its
response isn't killed. The server itself may be stopped (SIGSTOP), so it keeps renewing a timer; if
it doesn't, the kernel kills it.
"""

import _signal  # type: ignore[import-not-found]
import os
import select
import time

from gpuhook.base.container import kernel
from gpuhook.base.host import signals
from gpuhook.prefork import hook_worker, instance, slots
from gpuhook.prefork.slots import FOLDER_FD, LAUNCHER, REQUEST_PIPE, SLOT_COUNT, SLOTS
from gpuhook.prefork.worker import LONG, MEMORY_LIMITED, PATIENCE, STALE, TAKEN, Worker
from gpuhook.vendors.nvidia.nvml_session import NvmlSession

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.prefork.snapshot import LoadedState

_RENEWAL = 1.0  # seconds between two renewals of the timer
_TIMER = 3  # seconds after which the kernel kills a process that doesn't renew it
_CHECK = 10.0  # seconds between two detailed checks that the loaded state is unchanged


def poll(poller: select.poll, seconds: float, timer: int = _TIMER) -> list[int]:
    """Renew our timer, and return the descriptors with events within this time."""
    kernel.end_after(timer)
    return [fd for fd, _ in poller.poll(seconds * 1000)]


class WorkerHandle:
    """The server's view of one worker.

    The request is written to ``request``. The worker is killed at ``deadline`` unless it reports
    before; 0, before the request and after the response, means never. ``memory_limits`` is set
    if its container has memory limits that a driver sets.
    """

    def __init__(self, pid: int, request: int, report: int) -> None:
        self.pid = pid
        self.request = request
        self.report = report
        self.deadline = 0.0
        self.memory_limits = False


class Server:
    """The prefork server: one worker for each request, and one spare worker."""

    def __init__(self, state: "LoadedState", launcher: str, seconds: float) -> None:
        self._state = state
        self._launcher = launcher
        self._seconds = seconds
        self._workers: dict[int, WorkerHandle] = {}  # by the descriptor of their reports
        self._spare: WorkerHandle | None = None  # waits for a request
        self._poll = select.poll()
        self._worked = self._checked = time.monotonic()
        self._nvml = NvmlSession(self._poll)

    def run(self, parent: int) -> "NoReturn":
        """Serve until there was no request for long enough, or the loaded state has changed."""
        try:
            _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
            kernel.end_after(_TIMER)
            kernel.die_with_parent()
            if os.getppid() != parent:
                os._exit(0)
            # When we end, the kernel resumes stopped workers, even those without a timer yet: it
            # sends SIGHUP and SIGCONT to an orphaned process group (setpgid(2)).
            os.setpgid(0, 0)  # protects: stopped-child
            os.dup2(slots.moved(hook_worker.pipe_for_both()), REQUEST_PIPE, inheritable=False)
            for slot in range(SLOT_COUNT):
                slots.renew(slot)
            kernel.keep_only((REQUEST_PIPE, FOLDER_FD, LAUNCHER, *range(SLOTS, SLOTS + SLOT_COUNT)))
            self._poll.register(REQUEST_PIPE, select.POLLIN)
            self._fork_spare()
            name = instance.take_name(slots.FOLDER, str(os.getpid()), for_life=True)
            if name is None:  # a server in another pid namespace has the same process id
                raise SystemExit
            while not 0 < self._seconds <= time.monotonic() - self._worked:
                self._wait()
        finally:
            os._exit(0)

    def _wait(self) -> None:
        """Wait for events or the next deadline, and handle them."""
        now = time.monotonic()
        deadlines = [worker.deadline for worker in self._workers.values() if worker.deadline]
        if self._seconds:
            deadlines.append(self._worked + self._seconds)
        for fd in poll(self._poll, max(0.0, min([now + _RENEWAL, *deadlines]) - now)):
            if fd == REQUEST_PIPE:
                self._read_requests()
            elif self._nvml.hear(fd):
                self._replace_spare()
            else:
                self._read_report(self._workers[fd])
        self._kill_late()
        if now >= self._checked + _CHECK:
            self._checked = now
            self._check()

    def _read_requests(self) -> None:
        """Pass each request on: SLOT PID BUNDLE ID, or SLOT PID KIND of a CDI hook."""
        for line in os.read(REQUEST_PIPE, slots.REQUESTS_MOST).split(b"\n")[:-1]:
            kernel.end_after(_TIMER)
            if self._spare is None:
                self._fork_spare()
            self._pass_on(line)
            slots.free(int(line.partition(b" ")[0]))
            self._fork_spare()  # only now, so that it inherits the new slot
        self._worked = time.monotonic()

    def _pass_on(self, line: bytes) -> None:
        """Pass a request to the spare worker.

        If there is none, because memory is short or it was just killed, the requester reads an end
        of file as soon as its slot gets a new pipe.
        """
        worker, self._spare = self._spare, None
        if worker is None:
            return
        try:
            os.write(worker.request, line + b"\n")
            worker.deadline = time.monotonic() + PATIENCE
        except BrokenPipeError:
            pass
        os.close(worker.request)

    def _fork_spare(self) -> None:
        """Fork the worker for the next request; there is none if memory is short."""
        reader, request = (slots.moved(fd) for fd in os.pipe())
        report, reporting = (slots.moved(fd) for fd in os.pipe())
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
            os.close(report)
            os.close(request)
        if pid == 0:
            Worker(self._launcher, self._state, self._nvml).run(parent, reader, reporting)
        os.close(reader)
        os.close(reporting)
        if pid > 0:
            self._spare = self._workers[report] = WorkerHandle(pid, request, report)
            self._poll.register(report, 0)  # only its end; earlier reports aren't urgent

    def _replace_spare(self) -> None:
        """Fork another spare worker, which inherits the current state of NVML and the slots."""
        worker, self._spare = self._spare, None
        if worker is not None:
            os.close(worker.request)
            # SIGKILL also ends a stopped worker, which holds the slots.
            signals.send_to_child(worker.pid, _signal.SIGKILL)
        self._fork_spare()

    def _read_report(self, worker: WorkerHandle) -> None:
        """Read a worker's report, or reap it if it has ended."""
        report = os.read(worker.report, 16)
        if report:
            worker.deadline = time.monotonic() + LONG if report == TAKEN else 0.0
            worker.memory_limits |= MEMORY_LIMITED in report
            if STALE in report:
                raise SystemExit
            return
        self._poll.unregister(worker.report)
        os.close(worker.report)
        del self._workers[worker.report]
        os.waitpid(worker.pid, 0)
        if worker is self._spare:  # another process has killed it
            os.close(worker.request)
            self._spare = None
        if worker.memory_limits:
            inventory = self._state.inventories.get("nvidia")
            self._nvml.keep(inventory, self._state.config)

    def _kill_late(self) -> None:
        """Kill workers that don't report in time; before its response, a worker has no timer.

        Reports are read only here, as nothing waits for them earlier.
        """
        for worker in list(self._workers.values()):
            if not 0 < worker.deadline <= time.monotonic():  # protects: late-child
                continue
            reports = select.poll()
            reports.register(worker.report, select.POLLIN)
            if reports.poll(0):
                self._read_report(worker)
            else:
                signals.send_to_child(worker.pid, _signal.SIGKILL)
                worker.deadline = 0.0

    def _check(self) -> None:
        """End the server if the loaded state has changed, and free abandoned slots."""
        if not self._state.is_same_in_detail() or not os.fstat(FOLDER_FD).st_nlink:
            raise SystemExit
        self._nvml.end_in_time()
        if slots.free_late(PATIENCE):
            self._replace_spare()  # protects: freed-slots
