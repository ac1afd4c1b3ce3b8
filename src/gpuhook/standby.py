"""The process that stands ready for the next container, so that no start waits for Python.

After a container with GPUs was created a small process stays, for a minute without work unless the
configuration says otherwise. It has everything imported, and configuration and inventory
loaded, and holds a few forked children ready. The launcher (launchers/gpu-py) hands one of
them the bundle; the child edits config.json, as the runtime would, answers, and is that
container's helper from then on.

A child is found by a file that has its process id for a name, in a folder that root alone may
enter. The launcher takes that name for a number and no more: it looks at what /proc says of
the process, that it is in the same mount namespace and has that very folder and this very
launcher open, before and after it opens the child's pipes. The child holds the only writing
end of the one that it answers by, so that its death is an end of file for the launcher, which
then goes the ordinary way, as it does after any other answer than ``go``.

A child that is asked and doesn't answer in time is killed by its parent, which sees in the
child's own pipe that it was asked. If anything is not as it was when the parent looked, the
configuration, the inventory, our own files, the child says so to both, and the parent ends.

Not on the hot path: runs in a process of its own.
"""

import _signal  # type: ignore[import-not-found]
import fcntl
import gc
import os
import select
import sys
import time

from gpuhook import cgroup, helper, kernel, launcher_files, preload, runtime_shim, store
from gpuhook.config import Config, load
from gpuhook.config.loader import DEFAULT_PATH, PATH_VARIABLE
from gpuhook.errors import GpuhookError
from gpuhook.oci import read_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.oci import Spec
    from gpuhook.resolve import Resolved

FOLDER = "ready"  # below the folder of the launcher's files for a configuration
OPTION = "--gpuhook-standby"  # as launchers/gpu-py knows it

# A child's descriptors, as launchers/gpu-py knows them: it is asked, answers, and proves by the
# folder and the launcher that it is what it is said to be. By the last one its parent hears.
ASKED, ANSWER, MARK, LAUNCHER, REPORT = 3, 4, 5, 6, 7
_FREE = 16  # from here on a descriptor is in nobody's way
_GO, _NO = b"go\n", b"no\n"
_ANSWERED, _STALE = b"a", b"s"

_READY = 2  # children that wait where containers come one by one
_MOST = 8  # where they come all at once
_PATIENCE = 2.0  # seconds that a child may take from being asked to its answer
_LOOK = 10.0  # seconds between two looks whether all is as it was, where nothing happens
_QUESTION = 8192  # bytes: a process id and a path


# Starting ------------------------------------------------------------------------------------


def take_over(config: Config, launcher: str, namespace: int) -> None:
    """Become the standing process, where there is none yet; return where there is.

    For a helper that has done its work: ``namespace`` is the host's mount namespace, to which
    it goes back.
    """
    kernel.end_after(0)
    kernel.enter_mount_namespace(namespace, "the host's mount namespace")
    lock = _find_place(config, launcher)
    if lock is not None:
        _become(config, launcher, lock, config.standby)


def start(config: Config, launcher: str) -> int | None:
    """Start a standing process that stays until this one ends, where there is none yet.

    Returns its process id.
    """
    lock = _find_place(config, launcher) if config.helper and config.standby else None
    if lock is None:
        return None
    pid = os.fork()
    if pid == 0:
        try:
            kernel.die_with_parent()
            _become(config, launcher, lock, 0.0)
        finally:
            os._exit(1)
    os.close(lock)
    return pid


def _find_place(config: Config, launcher: str) -> int | None:
    """Return the lock of whoever stands ready; None where somebody has it, or there is none."""
    folder = open_folder(config)
    return None if folder is None else take_lock(folder, launcher)


def _become(config: Config, launcher: str, lock: int, seconds: float) -> "NoReturn":
    """Become the standing process: a new interpreter, which keeps nothing of ours but the lock."""
    kernel.keep_only((lock,))
    os.set_inheritable(lock, True)
    os.setsid()
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    if config.path is not None:
        environment[PATH_VARIABLE] = config.path
    argv = [launcher, OPTION, str(lock), str(seconds)]
    os.execve(launcher, argv, environment)  # noqa: S606 - becoming it is the point


def open_folder(config: Config) -> int | None:
    """Open the folder of the ready children, made where it is missing; None where it can't be."""
    folder = launcher_files.folder_of(config)
    if folder is None:
        return None
    path = f"{folder}/{FOLDER}"
    try:
        launcher_files.make_folders(folder)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() == 0 and not status.st_mode & 0o077:
        return fd
    os.close(fd)
    return None


def take_lock(folder: int, launcher: str) -> int | None:
    """Return the lock of this mount namespace's standing process; None where one has it."""
    name = _lock_name(launcher)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(name, dir_fd=folder)):
            return lock  # and not one that its owner has just removed
    except OSError:
        pass
    os.close(lock)
    return None


def _lock_name(launcher: str) -> str:
    program, namespace = os.stat(launcher), os.stat("/proc/self/ns/mnt")
    return f".lock-{namespace.st_ino}-{program.st_dev}-{program.st_ino}"


def main(launcher: str, argv: list[str]) -> "NoReturn":
    """Stand ready until it is time to end; ``argv`` is the option, the lock, and the seconds.

    The seconds are those without work; 0 stands for ever.
    """
    try:
        kernel.set_name("gpuhook-standby")
        _signal.signal(_signal.SIGTERM, _end)
        _, lock, seconds = argv
        config = load()
        folder = open_folder(config)
        if folder is not None and config.helper and config.standby:
            _arrange(folder, launcher, int(lock))
            if float(seconds):
                _be_nobodys()
            try:
                Standing(config, launcher, float(seconds)).run()
            finally:
                os.unlink(_lock_name(launcher), dir_fd=MARK)
    except (GpuhookError, OSError):
        pass  # the next container goes the ordinary way, and says what is wrong
    finally:
        os._exit(0)


def _be_nobodys() -> None:
    """Keep nothing of whoever started the first container: its cgroups, umask, OOM score.

    A cgroup that we stayed in would count us, and its scope or pod would not end before us.
    Each step is for the better, and none is needed.
    """
    os.umask(0o022)
    for path in ("/proc/self/oom_score_adj", *cgroup.outermost("/proc")):
        try:
            with open(path, "w", encoding="ascii") as file:
                file.write("0")
        except OSError:
            continue


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

    def __init__(self, config: Config, launcher: str) -> None:
        """Look at it; GpuhookError where the machine has no driver."""
        self._config = config
        self._path = config.path or DEFAULT_PATH
        self._files = [launcher, os.path.realpath("/proc/self/exe"), *_our_files()]
        self._seen = self._look()
        loaded = store.load(config)
        if loaded is None:
            store.get_inventory(config)  # which saves it
            loaded = store.load(config)
        if loaded is None:
            raise OSError("the inventory can't be saved, so nothing would tell when it changes")
        self.loaded = loaded

    def _look(self) -> list[object]:
        return [_identity(path) for path in (self._path, *self._files)]

    def is_same(self) -> bool:
        """Tell whether all is as it was: configuration, our own files, inventory, machine."""
        return self._look() == self._seen and self.loaded.is_latest(self._config)


def _our_files() -> list[str]:
    modules = [module for name, module in sys.modules.items() if name.startswith("gpuhook")]
    files = [getattr(module, "__file__", None) for module in modules]
    return sorted(file for file in files if file)


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


# The parent ----------------------------------------------------------------------------------


class Child:
    """One forked child, as its parent knows it.

    ``asked`` is its pipe, -1 once it isn't watched any more; ``since`` when it was asked, 0
    before that and after its answer.
    """

    def __init__(self, pid: int, asked: int, report: int) -> None:
        self.pid = pid
        self.asked = asked
        self.report = report
        self.since = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether nobody has asked it yet."""
        return self.asked >= 0


class Standing:
    """The standing process: keeps children ready, and ends those that hang."""

    def __init__(self, config: Config, launcher: str, seconds: float) -> None:
        self._config = config
        self._launcher = launcher
        self._seconds = seconds
        preload.load((*preload.RUNTIME, *preload.INJECTION))
        _import_the_rest()
        self._around = Around(config, launcher)
        self._children: dict[int, Child] = {}  # by the descriptor that they report by
        self._poll = select.poll()
        self._wanted = _READY
        self._worked = time.monotonic()

    def run(self) -> None:
        """Serve until there was no work for long enough, or something has changed."""
        gc.freeze()  # what is shared with children is not written to
        _remove_forgotten()
        try:
            while not 0 < self._seconds <= time.monotonic() - self._worked:
                while sum(child.is_ready for child in self._children.values()) < self._wanted:
                    self._fork()
                self._wait()
        finally:
            self._end_ready()

    def _fork(self) -> None:
        asked = helper.pipe_for_both()
        report, reporting = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            Ready(self._config, self._launcher, self._around).run(parent, asked, reporting)
        os.close(reporting)
        self._children[report] = Child(pid, asked, report)
        self._poll.register(asked, select.POLLIN)
        self._poll.register(report, select.POLLIN)

    def _wait(self) -> None:
        """Wait for something to happen, and deal with it."""
        now = time.monotonic()
        ends = [child.since + _PATIENCE for child in self._children.values() if child.since]
        if self._seconds:
            ends.append(self._worked + self._seconds)
        happened = self._poll.poll(max(0.0, min([now + _LOOK, *ends]) - now) * 1000)
        for fd, _ in happened:
            if fd in self._children:
                self._hear(self._children[fd])
            else:
                self._note_asked(fd)
        self._kill_late()
        if not happened:
            self._tidy()

    def _tidy(self) -> None:
        """Use a pause to see whether all is as it was, and to end what isn't needed."""
        if not self._around.is_same() or not os.fstat(MARK).st_nlink:
            raise SystemExit
        self._wanted = _READY
        ready = [child for child in self._children.values() if child.is_ready]
        for child in ready:
            # A launcher that has claimed it and ended before it asked won't come back.
            if _is_claimed_since(child.pid, time.time() - _PATIENCE):
                os.kill(child.pid, _signal.SIGKILL)
        for child in ready[self._wanted :]:
            if _claim(child.pid):
                os.kill(child.pid, _signal.SIGKILL)

    def _note_asked(self, fd: int) -> None:
        for child in self._children.values():
            if child.asked == fd:
                child.since = self._worked = time.monotonic()
                self._forget_pipe(child)
                if not any(other.is_ready for other in self._children.values()):
                    self._wanted = min(2 * self._wanted, _MOST)

    def _forget_pipe(self, child: Child) -> None:
        """Watch a child's pipe no more: from its answer on it is the hook's."""
        if child.is_ready:
            self._poll.unregister(child.asked)
            os.close(child.asked)
            child.asked = -1

    def _hear(self, child: Child) -> None:
        """Read what a child reports, or that it has ended."""
        said = os.read(child.report, 16)
        if said:
            child.since = 0.0
            if _STALE in said:
                raise SystemExit
            return
        self._forget_pipe(child)
        self._poll.unregister(child.report)
        os.close(child.report)
        del self._children[child.report]
        os.waitpid(child.pid, 0)
        _remove_names(child.pid)

    def _kill_late(self) -> None:
        late = time.monotonic() - _PATIENCE
        for child in self._children.values():
            if 0 < child.since <= late:
                os.kill(child.pid, _signal.SIGKILL)

    def _end_ready(self) -> None:
        """End the children that nobody has asked; the others are containers' helpers."""
        for child in self._children.values():
            if child.is_ready or child.since:
                os.kill(child.pid, _signal.SIGKILL)
                os.waitpid(child.pid, 0)
                _remove_names(child.pid)


def _import_the_rest() -> None:
    """Import what some containers need, so that no child imports anything any more."""
    from gpuhook import (  # noqa: F401, PLC0415 - to have them
        application_profile,
        bpf,
        cgroup_v2,
        dev_char,
        device_program,
        file_operations,
        ldconfig_fallback,
        spec_edits,
    )


# Names in the folder -------------------------------------------------------------------------


def _claim(pid: int) -> bool:
    """Claim a child as a launcher does, so that none can any more; False if one has."""
    try:
        os.close(os.open(f".{pid}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=MARK))
    except FileExistsError:
        return False
    return True


def _is_claimed_since(pid: int, moment: float) -> bool:
    try:
        return os.stat(f".{pid}", dir_fd=MARK).st_mtime < moment
    except FileNotFoundError:
        return False


def _remove_names(pid: int) -> None:
    for name in (str(pid), f".{pid}"):
        try:
            os.unlink(name, dir_fd=MARK)
        except FileNotFoundError:
            pass


def _remove_forgotten() -> None:
    """Remove the names of children whose parent had no time to."""
    ours = os.fstat(MARK)
    for name in os.listdir(MARK):
        pid = name.removeprefix(".")
        if not pid.isdecimal():
            continue
        try:
            lives = os.path.samestat(os.stat(f"/proc/{pid}/fd/{MARK}"), ours)
        except OSError:
            lives = False
        if not lives:
            _remove_names(int(pid))


# A child -------------------------------------------------------------------------------------


class Ready:
    """A child: edits one config.json when it is asked, and then is that container's helper."""

    def __init__(self, config: Config, launcher: str, around: Around) -> None:
        self._config = config
        self._folder = os.path.dirname(os.path.abspath(launcher))
        self._around = around
        self._wanted: tuple[Spec, Resolved] | None = None
        self._bundle = ""

    def run(self, parent: int, asked: int, report: int) -> "NoReturn":
        """Wait, serve and end, whatever happens; never return into the parent's code."""
        try:
            self._prepare(parent, asked, report)
            runtime, self._bundle = _question()
            os.unlink(str(os.getpid()), dir_fd=MARK)  # that it is claimed stays to be seen
            kernel.end_after(int(_PATIENCE))
            self._serve(runtime)
        except (GpuhookError, OSError, ValueError):
            os.write(ANSWER, _NO)  # the launcher goes the ordinary way, which says what is wrong
        finally:
            os._exit(0)

    def _prepare(self, parent: int, asked: int, report: int) -> None:
        """Hold our own descriptors alone, die with the parent, and be found."""
        _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
        kernel.die_with_parent()
        _, answer = os.pipe()
        for fd, place in (
            (_moved(report), REPORT),
            (_moved(answer), ANSWER),
            (_moved(asked), ASKED),
        ):
            os.dup2(fd, place, inheritable=False)
        kernel.keep_only((ASKED, ANSWER, MARK, LAUNCHER, REPORT))
        if os.getppid() != parent:
            os._exit(0)
        name = str(os.getpid())
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=MARK))

    def _serve(self, runtime: int) -> None:
        if not self._around.is_same():
            os.write(REPORT, _STALE)
            os.write(ANSWER, _NO)
            return
        spec = read_spec(f"{self._bundle}/config.json")
        inventory = self._around.loaded.inventory
        written = runtime_shim.edit(spec, self._config, self._folder, self._as_helper, inventory)
        if written is not None:
            written.write()
        kernel.die_with_parent(yes=False)
        kernel.end_after(0)
        os.write(ANSWER, _GO)
        os.write(REPORT, _ANSWERED)
        if self._wanted is not None:
            edited, resolved = self._wanted
            pipes = helper.Pipes(ASKED, ANSWER, MARK, runtime)
            helper.serve(pipes, edited, self._config, resolved)

    def _as_helper(self, spec: "Spec", resolved: "Resolved") -> list[str]:
        """Be the container's helper; return the words by which the hook finds it."""
        self._wanted = spec, resolved
        bundle = os.open(self._bundle, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.dup2(bundle, MARK, inheritable=False)
        os.close(bundle)
        pipes = helper.Pipes(ASKED, ANSWER, MARK, -1)
        return pipes.words(os.getpid(), self._bundle)


def _question() -> tuple[int, str]:
    """Wait to be asked; return a pidfd of the launcher and the bundle's path.

    ValueError for a launcher in another mount namespace.
    """
    text = b""
    while not text.endswith(b"\n") and len(text) < _QUESTION:
        text += os.read(ASKED, _QUESTION)
    pid, _, bundle = os.fsdecode(text).rstrip("\n").partition(" ")
    runtime = os.pidfd_open(int(pid))
    theirs, ours = os.stat(f"/proc/{pid}/ns/mnt"), os.stat("/proc/self/ns/mnt")
    if (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
        raise ValueError("the launcher is in another mount namespace")
    return runtime, bundle
