"""The process that stands ready for the next container, so that no start waits for Python.

After a container with GPUs was created a small process stays, for a minute without work unless
the configuration says otherwise. It has everything imported, and configuration and inventory
loaded, and a child that is forked ahead. The launcher (launchers/gpu-py) hands it a bundle; it
hands that on to the child, which edits config.json as the runtime would, answers, and is that
container's helper from then on. For the next question another child is forked.

The process is found by a file that has its process id for a name, in a folder that root alone
may enter. The launcher takes that name for a number and no more: it looks at what /proc says of
the process, that it is in the same namespaces and has that very folder and this very launcher
open, before and after it opens the process' pipes. Questions come through one pipe, ``DOOR``;
for answers there are many, the seats, of which a launcher claims one by a file that can be made
once. A seat has one writing end, in the process with the child that is ahead, and then in that
child: the death of either is an end of file for the launcher, which then goes the ordinary way, as
it does after any other answer than ``go`` and its own process id.

The hook of a CDI document asks in the same way, wherever the engine or gpu-py applied it. It is in
the container's namespaces already, so the child finds out itself whether those were made in ours.

Nobody waits long for one that hangs. The process kills a child that doesn't answer in time. The
process itself is killed by the kernel: it has a timer that it puts off while it goes on, and so has
each child, because somebody may stop all of them (SIGSTOP). The process is the child of another,
which does nothing but to tidy up after it. If anything is not as it was when all
was loaded, the configuration, the inventory, our own files, the child answers so, and everything
ends.
"""

import _signal  # type: ignore[import-not-found]
import fcntl
import os
import select
import sys
import time

from gpuhook import cdi_hook
from gpuhook.ground import names, preload
from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import DEFAULT_PATH, Config
from gpuhook.ground.container import kernel
from gpuhook.ground.errors import GpuhookError
from gpuhook.ground.host import lock as locking
from gpuhook.ground.oci.spec import read_spec
from gpuhook.standby import askers, helper, place
from gpuhook.start import contract
from gpuhook.start.cdi import saved
from gpuhook.start.edit import edit
from gpuhook.start.inventory import cache, freshness
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.ready_nvml import ReadyNvml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.ground.oci.spec import Spec
    from gpuhook.inject import Injection
    from gpuhook.start.contract import Known
    from gpuhook.start.resolve import Resolved

# Descriptors of the process that stands ready, as launchers/gpu-py knows them: questions come in
# at the door, and folder and launcher prove that it is what it is said to be. Seat N is SEATS + N.
DOOR, MARK, LAUNCHER = 3, 5, 6
SEATS, SEAT_COUNT = 64, 192
# Those of a child, beside MARK: the hook's pipes, and what its parent hears of it. Until it has a
# question it has the pipe that this comes through in the place of the one for the answer.
ASKED, ANSWER, REPORT = 3, 4, 7
QUESTION = ANSWER
_FREE = 16  # from here to the seats a descriptor is in nobody's way
_NO = b"no\n"
_NAME, _NAME_AHEAD = "gpuhook-standby", "gpuhook-next"  # what processes are called
_ANSWERED, _STALE, _LIMITED = b"a", b"s", b"l"

PATIENCE = 2.0  # seconds that an answer may take
_START = 60  # seconds that it may take to load all, where a driver may have to be asked
_BEAT = 1.0  # seconds after which it puts off its end again
_END = 3  # seconds after which the kernel kills what doesn't
_SELDOM, _LAST = 2.0, 5  # the same for the process that tidies up, for which nobody waits
_LOOK = 10.0  # seconds between two looks in detail whether all is as it was
_QUESTIONS = 1 << 16  # bytes: as many as a pipe holds


# The program -------------------------------------------------------------------------------


def main(launcher: str, argv: list[str]) -> "NoReturn":
    """Stand ready until it is time to end; ``argv`` is the option, the lock, and the seconds.

    The seconds are those without work; 0 stands for ever.
    """
    try:
        kernel.end_after(_START)  # protects: stopped-start
        kernel.set_name(_NAME)
        _signal.signal(_signal.SIGTERM, _end)
        _, lock, seconds = argv
        config = load()
        folder = place.open_folder(config)
        if folder is not None and config.helper and config.standby:
            name = place.lock_name(launcher)
            _arrange(folder, launcher, int(lock))
            if float(seconds):
                place.leave_cgroups()
            try:
                _remove_forgotten()
                _import_all(config)
                _stand(Server(Around(config.path, launcher), launcher, float(seconds)))
            finally:
                os.unlink(name, dir_fd=MARK)  # as it was: the launcher may be another one by now
    except (GpuhookError, OSError):
        pass  # the next container goes the ordinary way, and says what is wrong
    finally:
        os._exit(0)


def _end(*_: object) -> "NoReturn":
    raise SystemExit


def _arrange(folder: int, launcher: str, lock: int) -> None:
    """Put the descriptors where children have them, and keep none but those and the lock."""
    program = os.open(launcher, os.O_PATH | os.O_CLOEXEC)
    free = [_moved(fd) for fd in (folder, program, lock)]
    os.dup2(free[0], MARK, inheritable=False)
    os.dup2(free[1], LAUNCHER, inheritable=False)
    kernel.keep_only((MARK, LAUNCHER, free[2]))


def _moved(fd: int) -> int:
    """Return a copy of a descriptor that is in nobody's way."""
    copy: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
    os.close(fd)
    return copy


# What all depends on -------------------------------------------------------------------------


class Around:
    """Everything that the standing process has read, and whether it is still so."""

    def __init__(self, path: str | None, launcher: str) -> None:
        """Look at it, and read configuration (of that path) and inventory after that.

        GpuhookError where the machine has no driver, OSError where a change could be missed.
        """
        files = _our_files()
        folders = {os.path.dirname(file) for file in files}
        program = os.path.realpath("/proc/self/exe")
        # protects: own-settings
        self._seen = _identities([path or DEFAULT_PATH, launcher, program, *folders])
        self._files = _identities(files)
        if not all(freshness.is_settled(each) for each in (launcher, program, *folders, *files)):
            raise OSError("our own files have just changed, maybe since they were imported")
        self.config = load(path)
        self.known = registry.known(self.config)
        self._loaded = _load_inventories(self.config, self.known)
        self.inventories = {name: each.inventory for name, each in self._loaded.items()}
        self.documents = saved.Documents(self.config)
        if not self.is_same_in_detail():
            raise OSError("something has changed while it was read")

    def is_same(self) -> bool:
        """Tell whether all is as it was: configuration, our own files, inventories, machine.

        Of files that are replaced, as packages and pip do it, their folders tell.
        """
        latest = all(each.is_latest(self.config) for each in self._loaded.values())
        return latest and _are_same(self._seen)  # protects: machine-changed

    def is_same_in_detail(self) -> bool:
        """Tell it by looking at each file too; read documents that have changed."""
        if not self.is_same() or not _are_same(self._files):  # protects: written-in-place
            return False
        for each in self._loaded.values():
            each.note_folders()
        self.documents.files()
        return True


def _load_inventories(config: Config, known: "Known") -> dict[str, cache.Loaded]:
    """Return the inventories of the vendors that this machine has, by vendor.

    GpuhookError if it has none. A vendor that it has later finds its own way (``resolve``).
    """
    found: dict[str, cache.Loaded] = {}
    failures: list[GpuhookError] = []
    for each in known.values():
        try:
            found[each.NAME] = _load_inventory(config, contract.load(each))
        except GpuhookError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    return found


def _load_inventory(config: Config, vendor: contract.Vendor) -> cache.Loaded:
    loaded = cache.load(config, vendor)
    if loaded is None:
        cache.get_inventory(config, vendor)  # which saves it
        loaded = cache.load(config, vendor)
    if loaded is None:
        raise OSError("the inventory can't be saved, so nothing would notice when it changes")
    return loaded


def _our_files() -> list[str]:
    modules = [module for name, module in sys.modules.items() if name.startswith("gpuhook")]
    files = [getattr(module, "__file__", None) for module in modules]
    return sorted(file for file in files if file)


def _identities(paths: list[str]) -> dict[str, tuple[int, ...] | None]:
    return {path: freshness.identity(path) for path in paths}


def _are_same(seen: dict[str, tuple[int, ...] | None]) -> bool:
    return all(freshness.identity(path) == identity for path, identity in seen.items())


# The process that tidies up, and the one that serves ---------------------------------------


def _stand(server: "Server") -> None:
    """Fork the process that serves, wait for its end, and remove what it leaves.

    It is our child for the rule by which the kernel resumes its own (``Server.run``), too.
    """
    pid = os.fork()
    if pid == 0:
        server.run(os.getppid())
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        while not _poll(ended, _SELDOM, _LAST):
            pass
    finally:
        os.kill(pid, _signal.SIGKILL)
        os.waitpid(pid, 0)
        _remove_forgotten()


def _poll(several: select.poll, seconds: float, end: int = _END) -> list[int]:
    """Return the descriptors on which something happens in this time; put off our end."""
    kernel.end_after(end)
    return [fd for fd, _ in several.poll(seconds * 1000)]


class Child:
    """One forked child, as its parent knows it.

    It is asked through ``question``. ``since`` is when it was, 0 before and after its answer.
    ``limits`` says that its container has limits that a driver sets.
    """

    def __init__(self, pid: int, question: int, report: int) -> None:
        self.pid = pid
        self.question = question
        self.report = report
        self.since = 0.0
        self.limits = False


class Server:
    """The process that stands ready: has a child for each question, and ends those that hang."""

    def __init__(self, around: Around, launcher: str, seconds: float) -> None:
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
            os.dup2(_moved(helper.pipe_for_both()), DOOR, inheritable=False)
            for seat in range(SEAT_COUNT):
                _set_seat(seat)
            kernel.keep_only((DOOR, MARK, LAUNCHER, *range(SEATS, SEATS + SEAT_COUNT)))
            self._poll.register(DOOR, select.POLLIN)
            self._fork_ahead()
            name = place.take_name(MARK, str(os.getpid()), locking.hold)
            if name is None:  # there is one of that number, in another pid namespace
                raise SystemExit
            while not 0 < self._seconds <= time.monotonic() - self._worked:
                self._wait()
        finally:
            os._exit(0)

    def _wait(self) -> None:
        """Wait for something to happen, and deal with it."""
        now = time.monotonic()
        ends = [child.since + PATIENCE for child in self._children.values() if child.since]
        if self._seconds:
            ends.append(self._worked + self._seconds)
        happened = _poll(self._poll, max(0.0, min([now + _BEAT, *ends]) - now))
        for fd in happened:
            if fd == DOOR:
                self._open_door()
            elif self._nvml.hear(fd):
                self._renew()
            else:
                self._hear(self._children[fd])
        self._kill_late()
        if now >= self._looked + _LOOK:
            self._looked = now
            self._tidy()

    def _open_door(self) -> None:
        """Hand each question on: SEAT PID BUNDLE, or SEAT PID KIND of a CDI hook."""
        for line in os.read(DOOR, _QUESTIONS).split(b"\n")[:-1]:
            kernel.end_after(_END)
            if self._ahead is None:
                self._fork_ahead()
            self._ask(line)
            seat = int(line.partition(b" ")[0])
            _set_seat(seat)
            _remove(_claim_name(os.getpid(), seat))
            self._fork_ahead()  # now: it has to know the new seat
        self._worked = time.monotonic()

    def _ask(self, line: bytes) -> None:
        """Hand a question to the child that is ahead.

        Where there is none, for want of memory, or where it has just been killed, the new seat is
        an end of file for who has the old one.
        """
        child, self._ahead = self._ahead, None
        if child is None:
            return
        try:
            os.write(child.question, line + b"\n")
            child.since = time.monotonic()
        except BrokenPipeError:
            pass
        os.close(child.question)

    def _fork_ahead(self) -> None:
        """Fork the child that gets the next question; without memory for it, there is none."""
        asked, question = (_moved(fd) for fd in os.pipe())
        report, reporting = (_moved(fd) for fd in os.pipe())
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
            os.close(report)
            os.close(question)
        if pid == 0:
            Answering(self._launcher, self._around, self._nvml).run(parent, asked, reporting)
        os.close(asked)
        os.close(reporting)
        if pid > 0:
            self._ahead = self._children[report] = Child(pid, question, report)
            self._poll.register(report, 0)  # its end alone: nobody waits for what it says before

    def _renew(self) -> None:
        """Have another child ahead, which knows of NVML and seats what this process knows now."""
        child, self._ahead = self._ahead, None
        if child is not None:
            os.close(child.question)
            os.kill(child.pid, _signal.SIGKILL)  # also one that is stopped: it holds the seats
        self._fork_ahead()

    def _hear(self, child: Child) -> None:
        """Read what a child reports, or that it has ended."""
        said = os.read(child.report, 16)
        if said:
            child.since = 0.0
            child.limits |= _LIMITED in said
            if _STALE in said:
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
        """Kill children that don't answer in time; those that are stopped can't do it themselves.

        One that has answered may be a container's helper by now. So one that seems not to is
        stopped first, and lives if there is a report to read then.
        """
        late = time.monotonic() - PATIENCE
        for child in list(self._children.values()):
            if not 0 < child.since <= late:  # protects: late-child
                continue
            reports = select.poll()
            reports.register(child.report, select.POLLIN)
            if not reports.poll(0):
                os.kill(child.pid, _signal.SIGSTOP)
                if not reports.poll(0):
                    os.kill(child.pid, _signal.SIGKILL)
                    child.since = 0.0
                    continue
                os.kill(child.pid, _signal.SIGCONT)
            self._hear(child)

    def _tidy(self) -> None:
        """See whether all is as it was, and free seats that nobody sits on."""
        if not self._around.is_same_in_detail() or not os.fstat(MARK).st_nlink:
            raise SystemExit
        self._nvml.end_in_time()
        claimed = set(os.listdir(MARK))
        names = {seat: _claim_name(os.getpid(), seat) for seat in range(SEAT_COUNT)}
        # Of launchers that have ended, or are so late that they find the end of a file.
        late = [s for s, name in names.items() if name in claimed and _is_older(name, PATIENCE)]
        for seat in late:
            _set_seat(seat)
            _remove(names[seat])
        if late:
            self._renew()  # protects: freed-seats


def _set_seat(seat: int) -> None:
    """Give a seat a new pipe, of which we have the writing end alone."""
    reader, writer = os.pipe()
    os.dup2(writer, SEATS + seat, inheritable=False)
    os.close(writer)
    os.close(reader)


def _import_all(config: Config) -> None:
    """Import what any container may need, so that no child imports anything any more."""
    known = registry.known(config).values()
    vendors = [
        name for each in known for name in (*preload.vendor(each), *preload.vendor_edits(each))
    ]
    documents = (*preload.DOCUMENTS, *preload.DOCUMENT_HOOK)
    modules = (*preload.RUNTIME, *preload.INJECTION, *documents, *vendors)
    preload.load(modules)
    for name in modules:  # those that weren't compiled
        __import__(f"gpuhook.{name}")
    for each in known:
        for name in contract.load(each).optional_modules(config):
            __import__(name)
    import json.decoder  # noqa: F401, PLC0415

    from gpuhook.ground.cgroup import bpf, device_program, v2  # noqa: F401, PLC0415 - to have them
    from gpuhook.ground.loader import ldconfig_fallback  # noqa: F401, PLC0415
    from gpuhook.ground.oci import process  # noqa: F401, PLC0415
    from gpuhook.start import dev_char, limiter, limits  # noqa: F401, PLC0415
    from gpuhook.start.plan import spec_edits  # noqa: F401, PLC0415
    from gpuhook.start.records import claims  # noqa: F401, PLC0415


# Names in the folder -------------------------------------------------------------------------


def _claim_name(pid: int, seat: int) -> str:
    return f".{pid}.{seat}"


def _is_older(name: str, seconds: float) -> bool:
    """Tell whether a file was made longer ago; one of times to come was, before a clock's jump."""
    try:
        return abs(time.time() - os.stat(name, dir_fd=MARK).st_mtime) > seconds
    except FileNotFoundError:
        return False


def _remove(name: str) -> None:
    try:
        os.unlink(name, dir_fd=MARK)
    except FileNotFoundError:
        pass


def _remove_names(pid: int) -> None:
    for name in os.listdir(MARK):
        if name == str(pid) or name.startswith(f".{pid}."):
            _remove(name)


def _remove_forgotten() -> None:
    """Remove the names of processes that have ended, of whatever pid namespace they were."""
    for name in os.listdir(MARK):
        # protects: others-names
        file = place.take_name(MARK, name, locking.hold) if name.isdecimal() else None
        if file is not None:
            _remove_names(int(name))
            os.close(file)


# A child -------------------------------------------------------------------------------------


def _read_line(pipe: int) -> bytes:
    """Wait for a question, and return it; end where none comes any more."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(pipe, _QUESTIONS)
        if not more:
            os._exit(0)
        line += more
    return line[:-1]


class Answering:
    """A child: edits one config.json, answers, and then is that container's helper."""

    def __init__(self, launcher: str, around: Around, nvml: ReadyNvml) -> None:
        self._config = around.config
        self._nvml = nvml
        self._folder = os.path.dirname(os.path.abspath(launcher))
        self._around = around
        self._wanted: tuple[Spec, Config, Resolved, str] | None = None
        self._bundle = ""

    def run(self, parent: int, question: int, report: int) -> "NoReturn":
        """Do all of it and end, whatever happens; never return into the parent's code."""
        try:
            self._prepare(parent, question, report)
            seat, asker, about = os.fsdecode(_read_line(QUESTION)).split(" ", 2)
            kernel.end_after(int(PATIENCE))
            kernel.set_name(_NAME)
            os.dup2(SEATS + int(seat), ANSWER, inheritable=False)
            kernel.keep_only((ASKED, ANSWER, MARK, REPORT, *self._nvml.descriptors()))
            self._answer(int(asker), about)
        finally:
            os._exit(0)

    def _prepare(self, parent: int, question: int, report: int) -> None:
        """Hold nothing but what a child needs, and the seats; end with the parent.

        There is no end for want of a question: the parent has one, and is ours.
        """
        kernel.die_with_parent()
        kernel.set_name(_NAME_AHEAD)
        os.dup2(question, QUESTION, inheritable=False)
        os.dup2(report, REPORT, inheritable=False)
        asked = helper.pipe_for_both()
        os.dup2(asked, ASKED, inheritable=False)
        seats = range(SEATS, SEATS + SEAT_COUNT)
        kernel.keep_only((ASKED, QUESTION, MARK, REPORT, *self._nvml.descriptors(), *seats))
        if os.getppid() != parent:
            os._exit(0)

    def _answer(self, asker: int, about: str) -> None:
        """Answer the launcher or hook of that process id.

        ``about`` is a bundle's path where the launcher asks that becomes the low-level runtime,
        and the kind of a CDI document where its hook asks.
        """
        try:
            if about.startswith("/"):
                self._bundle = about
                self._serve(asker)
            else:
                self._serve_hook(asker, about)
        except (GpuhookError, OSError, ValueError, KeyError):
            os.write(ANSWER, _NO)  # the launcher goes the ordinary way, which says what is wrong

    def _serve(self, launcher: int) -> None:
        runtime = askers.open_launcher(launcher)
        if not self._is_same():
            return
        spec = read_spec(f"{self._bundle}/config.json")
        around = self._around
        written = edit(
            spec, self._config, around.known, self._folder,
            self._as_helper, around.inventories, around.documents,
        )  # fmt: skip
        if written is not None:
            written.write()
        kernel.die_with_parent(yes=False)  # our end stays until the helper has its own
        os.write(ANSWER, b"go %d\n" % launcher)
        os.write(REPORT, _ANSWERED)
        if self._wanted is not None:
            kernel.end_after(helper.DEADLINE)
            injection = helper.injection_of(*self._wanted, around.inventories)
            self._report_limits(injection)
            helper.serve(helper.Pipes(ASKED, ANSWER, MARK, runtime), self._config, injection)

    def _report_limits(self, injection: "Injection | cdi_hook.DocumentInjection") -> None:
        """Say that the container has limits that NVML sets; keep no way to ask it for others."""
        if injection.limits is not None and injection.limits.are_slow:
            os.write(REPORT, _LIMITED)
        else:
            self._nvml.forget()

    def _is_same(self) -> bool:
        """Tell whether all is as it was; where it isn't, everything ends."""
        if self._around.is_same():
            return True
        os.write(REPORT, _STALE)
        os.write(ANSWER, _NO)
        return False

    def _serve_hook(self, hook: int, kind: str) -> None:
        """Do the work of a CDI document's hook, whoever has applied the document."""
        vendor_names = {each.KIND: each for each in self._around.known.values()}[kind]
        inventory = self._around.inventories[vendor_names.NAME]
        askers.check_hook(hook, ANSWER)
        if not self._is_same():
            return
        kernel.die_with_parent(yes=False)
        os.write(REPORT, _ANSWERED)

        def work() -> None:
            vendor = contract.load(vendor_names)
            text = helper.state_text(hook)
            cdi_hook.serve(text, hook, self._config, vendor, inventory, self._report_limits)

        helper.answer(ANSWER, self._config, names.CDI_HOOK, work)

    def _as_helper(self, spec: "Spec", resolved: "Resolved", kind: str) -> list[str]:
        """Be the container's helper; return the words by which the hook finds it."""
        self._wanted = spec, self._config, resolved, kind
        bundle = os.open(self._bundle, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.dup2(bundle, MARK, inheritable=False)
        os.close(bundle)
        pipes = helper.Pipes(ASKED, ANSWER, MARK, -1)
        return pipes.words(os.getpid(), self._bundle)
