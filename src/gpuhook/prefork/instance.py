"""The place of the process that stands ready (``standby``): one for each mount namespace.

It is a folder of the configuration's, with a lock that whoever stands ready holds. Who finds
the lock free may become that process.
"""

import _signal  # type: ignore[import-not-found]
import os
import select

from gpuhook.ground import names
from gpuhook.ground.cgroup import access
from gpuhook.ground.config.loader import PATH_VARIABLE
from gpuhook.ground.config.model import Config
from gpuhook.ground.container import kernel
from gpuhook.ground.host import lock as locking
from gpuhook.prefork import launcher_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

FOLDER = "ready"  # below the folder of the launcher's files for a configuration
OPTION = "--gpuhook-standby"  # as the launcher knows it


# Who takes in processes whose parent has ended and waits for none of them: init, systemd's
# instances for users, and containerd's shims. podman's and CRI-O's conmon waits for all.
_INIT = 1
_TAKES_IN = ("systemd", "containerd-shim")

# What Python ignores, so that it reads of errors, and what nobody can.
_PYTHONS_SIGNALS = {_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGKILL, _signal.SIGSTOP}
_TIMER_SLACK = 50_000  # ns, as init's
_LIMITS = (
    kernel.RLIMIT_AS, kernel.RLIMIT_CPU, kernel.RLIMIT_DATA, kernel.RLIMIT_FSIZE,
    kernel.RLIMIT_SIGPENDING,
)  # fmt: skip


def become_server(config: Config, launcher: str, namespace: int, runtime: int) -> None:
    """Become the standing process, where there is none yet; return where there is.

    For a helper that has done its work: ``namespace`` is the host's mount namespace, to which
    it goes back, ``runtime`` a pidfd of its parent, for whose end it waits.
    """
    kernel.enter_mount_namespace(namespace, "the host's mount namespace")
    ended = select.poll()
    ended.register(runtime, select.POLLIN)
    ended.poll()
    if not _is_free(os.getppid()):
        return
    lock = _find_place(config, launcher)
    if lock is not None:
        _become(config, launcher, lock, config.standby)


def _is_free(parent: int) -> bool:
    """Tell whether nobody waits for the end of a process with that parent."""
    try:
        with open(f"/proc/{parent}/comm", "rb", buffering=0) as file:
            name = os.fsdecode(file.read())
    except OSError:
        return False
    return parent == _INIT or name.startswith(_TAKES_IN)


def start(config: Config, launcher: str) -> int | None:
    """Start a standing process that stays until this one ends, where there is none yet.

    Returns its process id.
    """
    lock = _find_place(config, launcher) if config.helper and config.standby else None
    if lock is None:
        return None
    try:
        pid = os.fork()
        if pid == 0:
            try:
                kernel.die_with_parent()
                _become(config, launcher, lock, 0.0)
            finally:
                os._exit(1)
        return pid
    finally:
        os.close(lock)


def _find_place(config: Config, launcher: str) -> int | None:
    """Return the lock of whoever stands ready; None where somebody has it, or there is none."""
    folder = open_folder(config)
    if folder is None:
        return None
    try:
        return take_name(folder, lock_name(launcher), locking.take)
    finally:
        os.close(folder)


def _become(config: Config, launcher: str, lock: int, seconds: float) -> "NoReturn":
    """Become the standing process: a new interpreter, which keeps nothing of ours but the lock."""
    kernel.keep_only((lock,))
    os.set_inheritable(lock, True)
    os.setsid()
    environment = {"PATH": names.SYSTEM_PATH}
    if config.path is not None:
        environment[PATH_VARIABLE] = config.path
    argv = [launcher, OPTION, str(lock), str(seconds)]
    os.execve(launcher, argv, environment)  # noqa: S606 - becoming it is the point


def open_folder(config: Config) -> int | None:
    """Open the folder of those that stand ready, made if missing; None where it can't be."""
    folder = launcher_cache.folder_of(config)
    if folder is None:
        return None
    path = f"{folder}/{FOLDER}"
    try:
        launcher_cache.make_folders(folder)
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


def take_name(folder: int, name: str, lock: "Callable[[int], bool]") -> int | None:
    """Return a locked file of that name, made if missing; None where another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        if lock(file) and os.path.samestat(os.fstat(file), os.stat(name, dir_fd=folder)):
            return file  # and not one that its owner has just removed
    except OSError:
        pass
    os.close(file)
    return None


def lock_name(launcher: str) -> str:
    """Return what the lock of this mount namespace's standing process is called."""
    program, namespace = os.stat(launcher), os.stat("/proc/self/ns/mnt")
    return f".lock-{namespace.st_ino}-{program.st_dev}-{program.st_ino}"


def reset_process_attributes() -> None:
    """Keep nothing that the caller of the first container lends its children but its rights.

    Others' containers don't start more slowly, or not at all, because that one was started with a
    low priority, small limits, signals that are ignored, or another personality. Each step is for
    the better, and none is needed.
    """
    for number in _signal.valid_signals() - _PYTHONS_SIGNALS:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    kernel.forget_personality()
    kernel.set_timer_slack(_TIMER_SLACK)
    for number in _LIMITS:
        kernel.lift_limit(number)
    steps: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (os.sched_setscheduler, (0, os.SCHED_OTHER, os.sched_param(0))),
        (os.setpriority, (os.PRIO_PROCESS, 0, 0)),
        # As init's, which keeps off CPUs that are for others.
        (os.sched_setaffinity, (0, os.sched_getaffinity(_INIT))),
        (os.setgroups, ([],)),
        (os.setresgid, (0, 0, 0)),
    ]
    for step, words in steps:
        try:
            step(*words)
        except OSError:
            continue


def leave_caller_cgroups() -> None:
    """Keep nothing of whoever started the first container: its cgroups, OOM score.

    A cgroup that we stayed in would count us, and its scope or pod would not end before us.
    Each step is for the better, and none is needed.
    """
    # protects: outermost-cgroups
    for path in ("/proc/self/oom_score_adj", *access.outermost("/proc")):
        try:
            with open(path, "w", encoding="ascii") as file:
                file.write("0")
        except OSError:
            continue
