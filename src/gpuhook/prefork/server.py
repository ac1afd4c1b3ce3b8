"""The process that serves: has a child for each question, and ends those that hang.

The process kills a child that doesn't report in time, and may do so at any moment: the launcher
puts the new config.json into the bundle, or starts Python where it got none. The process itself is
killed by the kernel: it has a timer that it puts off while it goes on, because somebody may stop it
(SIGSTOP).
"""

import _signal  # type: ignore[import-not-found]
import os
import select
import time

from gpuhook.ground.container import kernel
from gpuhook.ground.host import lock as locking
from gpuhook.ground.host import signals
from gpuhook.prefork import hook_worker, instance, slots
from gpuhook.prefork.slots import FOLDER_FD, LAUNCHER, REQUEST_PIPE, SLOT_COUNT, SLOTS
from gpuhook.prefork.worker import LIMITED, LONG, PATIENCE, STALE, TAKEN, Worker
from gpuhook.vendors.nvidia.ready_nvml import ReadyNvml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.prefork.snapshot import LoadedState

_BEAT = 1.0  # seconds after which it puts off its end again
_END = 3  # seconds after which the kernel kills what doesn't
_LOOK = 10.0  # seconds between two looks in detail whether all is as it was


def poll(several: select.poll, seconds: float, end: int = _END) -> list[int]:
    """Return the descriptors on which something happens in this time; put off our end."""
    kernel.end_after(end)
    return [fd for fd, _ in several.poll(seconds * 1000)]


class Child:
    """One forked child, as its parent knows it.

    It is asked through ``question``. ``late`` is when it is killed unless it reports something,
    0 before its question and after its answer. ``limits`` says that its container has limits that
    a driver sets.
    """

    def __init__(self, pid: int, question: int, report: int) -> None:
        self.pid = pid
        self.question = question
        self.report = report
        self.late = 0.0
        self.limits = False


class Server:
    """The process that stands ready: has a child for each question, and ends those that hang."""

    def __init__(self, around: "LoadedState", launcher: str, seconds: float) -> None:
        self._around = around
        self._launcher = launcher
        self._seconds = seconds
        self._children: dict[int, Child] = {}  # by the descriptor that they report by
        self._ahead: Child | None = None  # the one that waits for a question
        self._poll = select.poll()
        self._worked = self._looked = time.monotonic()
        self._nvml = ReadyNvml(self._poll)

    def run(self, parent: int) -> "NoReturn":
        """Serve until there was no work for long enough, or something has changed."""
        try:
            _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
            kernel.end_after(_END)
            kernel.die_with_parent()
            if os.getppid() != parent:
                os._exit(0)
            # When we end, the kernel resumes children that are stopped (setpgid(2): SIGHUP and
            # SIGCONT to a group that nobody is left to control), those too that had no end yet.
            os.setpgid(0, 0)  # protects: stopped-child
            os.dup2(slots.moved(hook_worker.pipe_for_both()), REQUEST_PIPE, inheritable=False)
            for slot in range(SLOT_COUNT):
                slots.renew(slot)
            kernel.keep_only((REQUEST_PIPE, FOLDER_FD, LAUNCHER, *range(SLOTS, SLOTS + SLOT_COUNT)))
            self._poll.register(REQUEST_PIPE, select.POLLIN)
            self._fork_spare()
            name = instance.take_name(FOLDER_FD, str(os.getpid()), locking.hold)
            if name is None:  # there is one of that number, in another pid namespace
                raise SystemExit
            while not 0 < self._seconds <= time.monotonic() - self._worked:
                self._wait()
        finally:
            os._exit(0)

    def _wait(self) -> None:
        """Wait for something to happen, and deal with it."""
        now = time.monotonic()
        ends = [child.late for child in self._children.values() if child.late]
        if self._seconds:
            ends.append(self._worked + self._seconds)
        happened = poll(self._poll, max(0.0, min([now + _BEAT, *ends]) - now))
        for fd in happened:
            if fd == REQUEST_PIPE:
                self._read_requests()
            elif self._nvml.hear(fd):
                self._renew()
            else:
                self._hear(self._children[fd])
        self._kill_late()
        if now >= self._looked + _LOOK:
            self._looked = now
            self._tidy()

    def _read_requests(self) -> None:
        """Hand each question on: SEAT PID BUNDLE ID, or SEAT PID KIND of a CDI hook."""
        for line in os.read(REQUEST_PIPE, slots.QUESTIONS).split(b"\n")[:-1]:
            kernel.end_after(_END)
            if self._ahead is None:
                self._fork_spare()
            self._ask(line)
            slots.free(int(line.partition(b" ")[0]))
            self._fork_spare()  # now: it has to know the new slot
        self._worked = time.monotonic()

    def _ask(self, line: bytes) -> None:
        """Hand a question to the child that is ahead.

        Where there is none, for want of memory, or where it has just been killed, the new slot is
        an end of file for who has the old one.
        """
        child, self._ahead = self._ahead, None
        if child is None:
            return
        try:
            os.write(child.question, line + b"\n")
            child.late = time.monotonic() + PATIENCE
        except BrokenPipeError:
            pass
        os.close(child.question)

    def _fork_spare(self) -> None:
        """Fork the child that gets the next question; without memory for it, there is none."""
        asked, question = (slots.moved(fd) for fd in os.pipe())
        report, reporting = (slots.moved(fd) for fd in os.pipe())
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
            os.close(report)
            os.close(question)
        if pid == 0:
            Worker(self._launcher, self._around, self._nvml).run(parent, asked, reporting)
        os.close(asked)
        os.close(reporting)
        if pid > 0:
            self._ahead = self._children[report] = Child(pid, question, report)
            self._poll.register(report, 0)  # its end alone: nobody waits for what it says before

    def _renew(self) -> None:
        """Have another child ahead, which knows of NVML and slots what this process knows now."""
        child, self._ahead = self._ahead, None
        if child is not None:
            os.close(child.question)
            # Also one that is stopped: it holds the slots.
            signals.send_to_child(child.pid, _signal.SIGKILL)
        self._fork_spare()

    def _hear(self, child: Child) -> None:
        """Read what a child reports, or that it has ended."""
        said = os.read(child.report, 16)
        if said:
            child.late = time.monotonic() + LONG if said == TAKEN else 0.0
            child.limits |= LIMITED in said
            if STALE in said:
                raise SystemExit
            return
        self._poll.unregister(child.report)
        os.close(child.report)
        del self._children[child.report]
        os.waitpid(child.pid, 0)
        if child is self._ahead:  # somebody has killed it
            os.close(child.question)
            self._ahead = None
        if child.limits:
            inventory = self._around.inventories.get("nvidia")
            self._nvml.keep(inventory, self._around.config)

    def _kill_late(self) -> None:
        """Kill children that don't report in time; those that are stopped can't do it themselves.

        What a child reports is read here: nobody waits for it before.
        """
        for child in list(self._children.values()):
            if not 0 < child.late <= time.monotonic():  # protects: late-child
                continue
            reports = select.poll()
            reports.register(child.report, select.POLLIN)
            if reports.poll(0):
                self._hear(child)
            else:
                signals.send_to_child(child.pid, _signal.SIGKILL)
                child.late = 0.0

    def _tidy(self) -> None:
        """See whether all is as it was, and free slots that nobody sits on."""
        if not self._around.is_same_in_detail() or not os.fstat(FOLDER_FD).st_nlink:
            raise SystemExit
        self._nvml.end_in_time()
        if slots.free_late(PATIENCE):
            self._renew()  # protects: freed-slots
