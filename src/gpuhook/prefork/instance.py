"""The singleton lock of the prefork server, and the steps of becoming it.

Each configuration has a folder with one lock for each launcher and mount namespace. The supervisor
of the running prefork server holds the lock; a process that can take it may become the next one.
"""

import _signal  # type: ignore[import-not-found]
import os
import select

from gpuhook.base import names
from gpuhook.base.cgroup import access
from gpuhook.base.config.loader import PATH_VARIABLE
from gpuhook.base.config.model import Config
from gpuhook.base.container import kernel
from gpuhook.base.host import lock as _lock  # noqa: F401 - the hook may import nothing in a container
from gpuhook.base.state_directory import StateDirectory
from gpuhook.prefork import launcher_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

FOLDER = "ready"  # below the folder of the launcher's cache for a configuration
OPTION = "--gpuhook-standby"  # the launcher recognises it


# Processes that adopt orphans without waiting for their end: init, systemd's user instances, and
# containerd's shims. conmon (podman, CRI-O) waits for all of them.
_INIT = 1
_ADOPTERS = ("systemd", "containerd-shim")

# Signals that Python ignores in order to get errors instead, and those that can't be ignored.
_PYTHONS_SIGNALS = {_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGKILL, _signal.SIGSTOP}
_TIMER_SLACK = 50_000  # ns, the value of init
_RESOURCE_LIMITS = (
    kernel.RLIMIT_AS, kernel.RLIMIT_CPU, kernel.RLIMIT_DATA, kernel.RLIMIT_FSIZE,
    kernel.RLIMIT_SIGPENDING,
)  # fmt: skip


def become_server(config: Config, launcher: str, namespace: int, runtime: int) -> None:
    """Turn a hook worker that has done its work into a supervisor, unless it can't or needn't stay.

    ``namespace`` is the host's mount namespace, to which it returns. ``runtime`` is a pidfd of its
    parent, for whose end it waits.
    """
    kernel.enter_mount_namespace(namespace, "the host's mount namespace")
    exited = select.poll()
    exited.register(runtime, select.POLLIN)
    exited.poll()
    if not _may_stay(os.getppid()):
        return
    lock = _lock_instance(config, launcher)
    if lock is not None:
        _become(config, launcher, lock, config.standby)


def _may_stay(parent: int) -> bool:
    """Return whether that parent doesn't wait for the end of its adopted children."""
    try:
        with open(f"/proc/{parent}/comm", "rb", buffering=0) as file:
            name = os.fsdecode(file.read())
    except OSError:
        return False
    return parent == _INIT or name.startswith(_ADOPTERS)


def start(config: Config, launcher: str) -> int | None:
    """Start a prefork server that runs until this process ends, unless one is running.

    Return the supervisor's process id, None if none was started.
    """
    lock = _lock_instance(config, launcher) if config.helper and config.standby else None
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


def _lock_instance(config: Config, launcher: str) -> int | None:
    """Take the lock of this instance; None if another process holds it, or it can't be created."""
    folder = open_folder(config)
    if folder is None:
        return None
    with folder:
        return take_name(folder, lock_name(launcher))


def _become(config: Config, launcher: str, lock: int, seconds: float) -> "NoReturn":
    """Become the supervisor: execute a new interpreter, which inherits only the lock."""
    kernel.keep_only((lock,))
    os.set_inheritable(lock, True)
    os.setsid()
    environment = {"PATH": names.SYSTEM_PATH}
    if config.path is not None:
        environment[PATH_VARIABLE] = config.path
    argv = [launcher, OPTION, str(lock), str(seconds)]
    os.execve(launcher, argv, environment)  # noqa: S606 - becoming it is the point


def open_folder(config: Config) -> StateDirectory | None:
    """Open the folder of the prefork servers, created if missing; None if that fails."""
    folder = launcher_cache.folder_of(config)
    if folder is None or os.geteuid() != 0:
        return None
    return StateDirectory.make(f"{folder}/{FOLDER}", private=True)


def take_name(folder: StateDirectory, name: str, *, for_life: bool = False) -> int | None:
    """Return a locked file of that name, created if missing; None if another process holds it."""
    try:
        return folder.lock(name, for_life=for_life).fd
    except OSError:
        return None


def lock_name(launcher: str) -> str:
    """Return the name of the lock for this launcher in this mount namespace."""
    program, namespace = os.stat(launcher), os.stat("/proc/self/ns/mnt")
    return f".lock-{namespace.st_ino}-{program.st_dev}-{program.st_ino}"


def reset_process_attributes() -> None:
    """Reset everything inherited from the first container's caller, except its privileges.

    Otherwise a low priority, small limits, ignored signals or another personality of that caller
    would slow down or prevent the starts of other containers. A step that fails is skipped.
    """
    for number in _signal.valid_signals() - _PYTHONS_SIGNALS:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    kernel.forget_personality()
    kernel.set_timer_slack(_TIMER_SLACK)
    for number in _RESOURCE_LIMITS:
        kernel.lift_resource_limit(number)
    steps: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (os.sched_setscheduler, (0, os.SCHED_OTHER, os.sched_param(0))),
        (os.setpriority, (os.PRIO_PROCESS, 0, 0)),
        # The affinity of init, which excludes reserved CPUs.
        (os.sched_setaffinity, (0, os.sched_getaffinity(_INIT))),
        (os.setgroups, ([],)),
        (os.setresgid, (0, 0, 0)),
    ]
    for step, arguments in steps:
        try:
            step(*arguments)
        except OSError:
            continue


def leave_caller_cgroups() -> None:
    """Leave the cgroups of the first container's caller, and reset its OOM score.

    Such a cgroup would account for us, and its scope or pod would not end before us. A step that
    fails is skipped.
    """
    # protects: outermost-cgroups
    for path in ("/proc/self/oom_score_adj", *access.outermost("/proc")):
        try:
            with open(path, "w", encoding="ascii") as file:
                file.write("0")
        except OSError:
            continue
