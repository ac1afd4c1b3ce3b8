"""The hook worker, which starts a hook's work while the low-level runtime creates the container.

gpu-py forks it before becoming the low-level runtime, or it is a worker of the prefork server
(``worker``). The hook (launchers/launcher.c) sends its request through a pipe of the hook
worker, which it opens as /proc/PID/fd/N. Only root can open that, no file remains, and the pipe
disappears together with the hook worker. Then the hook does the work itself.

The hook worker closes all descriptors except its ``Pipes``. It ends when the low-level runtime ends
before the hook's request, or when no request comes in time. Once it has taken the request, the hook
waits for its response; if it dies then, the container is not started.

gpu-py's inherits the modules that runtime_shim has imported, and imports the rest itself.
"""

import _signal  # type: ignore[import-not-found]
import os

from gpuhook.base import log
from gpuhook.base.errors import GpuhookError, StateError, printable
from gpuhook.base.fileio import read_start
from gpuhook.base.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from gpuhook.base.config.model import Config
    from gpuhook.cdi_hook import DocumentInjection
    from gpuhook.core.edit import HookTask
    from gpuhook.core.inventory.model import Inventory
    from gpuhook.inject import Injection

# Seconds for the low-level runtime and the hooks before ours, after which the hook worker is
# gone and the hook does the work itself; also the seconds for the work.
DEADLINE = 60
# Seconds between two renewals of the timer while waiting for the hook, and seconds until the kernel
# kills a stopped hook worker, so that the hook doesn't wait for it.
_RENEWAL, _TIMER = 1, 3
TAKEN = "taken"
DONE = "done"

# Signals ignored during a hook's work: they come when our unit (gpuhook-watch.service) is stopped,
# and when the prefork server ends (Server.run).
_IGNORED = _signal.SIGTERM, _signal.SIGHUP

_MAX_STATE = 16 << 20
STATE_FD = 6  # the hook's copy of its standard input


class Pipes(Record):
    """The descriptors of one hook worker.

    The hook sends its request through the pipe ``asked`` and reads the response from ``answer``.
    ``asked`` is open for reading and writing, so that it has no end of file before the request. The
    hook identifies the hook worker by ``bundle``, the bundle's folder. ``runtime`` is a pidfd of
    the process that is, or becomes, the low-level runtime.
    """

    asked: int
    answer: int
    bundle: int
    runtime: int

    def words(self, pid: int, folder: str) -> list[str]:
        """Return the arguments that lead the hook to the hook worker (launchers/launcher.c)."""
        return [str(pid), str(self.asked), str(self.answer), str(self.bundle), folder]


def start(task: "HookTask", config: "Config", launcher: str = "") -> list[str]:
    """Fork the hook worker of a container; return the arguments that lead the hook to it.

    The list is empty if it can't be forked. With ``launcher``, the path of gpu-py, the hook worker
    may become the supervisor of a prefork server afterwards (``instance.become_server``).
    """
    folder = os.path.dirname(os.path.abspath(task.spec.path))
    try:
        bundle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        runtime = os.pidfd_open(os.getpid())
        asked, (_, answer) = pipe_for_both(), os.pipe()
        pid = os.fork()
    except OSError:
        return []
    pipes = Pipes(asked, answer, bundle, runtime)
    if pid == 0:
        _main(pipes, task, config, launcher)
    # Our own copies of the descriptors are closed by execve(2) of the low-level runtime.
    return pipes.words(pid, folder)


def pipe_for_both() -> int:
    """Return one descriptor for both reading from and writing to a new pipe."""
    reader, writer = os.pipe()
    try:
        return os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(reader)
        os.close(writer)


def _main(pipes: Pipes, task: "HookTask", config: "Config", launcher: str) -> "NoReturn":
    """Serve one request and exit, whatever happens; never return into the caller's code."""
    try:
        from gpuhook.base.container import kernel  # noqa: PLC0415 - not time-critical here

        kernel.keep_only((pipes.asked, pipes.answer, pipes.bundle, pipes.runtime))
        injection = injection_of(task, config)
        if launcher:
            from gpuhook.prefork import instance  # noqa: PLC0415 - before entering the container
        host = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        if serve(pipes, config, injection) and launcher:
            instance.become_server(config, launcher, host, pipes.runtime)
    finally:
        os._exit(0)


def injection_of(
    task: "HookTask", config: "Config", inventories: "Mapping[str, Inventory] | None" = None
) -> "Injection | DocumentInjection":
    """Return the work of a container's hook.

    ``inventories``, by vendor, are known to match the host.
    """
    if task.kind:
        from gpuhook import cdi_hook  # noqa: PLC0415 - only for CDI specs

        return cdi_hook.of_kind(
            task.kind, task.spec, config, task.resolved.vendors, inventories or {}
        )
    from gpuhook.inject import Injection  # noqa: PLC0415 - only for requests of a GPU

    task.resolved.import_hook_modules()

    return Injection(task.spec, config, task.resolved)


def serve(pipes: Pipes, config: "Config", injection: "Injection | DocumentInjection") -> bool:
    """Do the work of a container's hook on its request; return whether it succeeded.

    Afterwards this process is in the container's mount namespace.
    """
    from gpuhook.base.container import kernel  # noqa: PLC0415 - imported already

    kernel.end_after(DEADLINE)
    injection.begin()
    if not _is_asked(pipes):
        return False
    hook = int(os.read(pipes.asked, 32))
    return answer(
        pipes.answer, config, injection.program, lambda: _finish(injection, hook, pipes.bundle)
    )


def answer(pipe: int, config: "Config", program: str, work: "Callable[[], None]") -> bool:
    """Report to a hook that its work is taken, do it, report the result; return True on success."""
    from gpuhook.base.container import kernel  # noqa: PLC0415 - imported already

    for number in _IGNORED:
        _signal.signal(number, _signal.SIG_IGN)  # protects: work-goes-on
    os.write(pipe, f"{TAKEN}\n".encode())
    kernel.end_after(DEADLINE)
    outcome = _outcome(work)
    if outcome != DONE:
        log.keep(program, outcome, config)
    os.write(pipe, f"{' '.join(outcome.split())}\n".encode("utf-8", "replace"))
    for number in _IGNORED:
        _signal.signal(number, _signal.SIG_DFL)
    return outcome == DONE


def _is_asked(pipes: Pipes) -> bool:
    """Wait for the hook's request; False if the low-level runtime ends first, or takes too long."""
    import select  # noqa: PLC0415 - not time-critical here

    from gpuhook.base.container import kernel  # noqa: PLC0415 - imported already

    waiting = select.poll()
    waiting.register(pipes.asked, select.POLLIN)
    waiting.register(pipes.runtime, select.POLLIN)
    for _ in range(DEADLINE // _RENEWAL):
        kernel.end_after(_TIMER)
        happened = waiting.poll(_RENEWAL * 1000)
        if happened:
            return pipes.asked in [fd for fd, _ in happened]
    return False


def _outcome(work: "Callable[[], None]") -> str:
    """Do the hook's work; return DONE, or an error message for the user."""
    try:
        work()
    except GpuhookError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - there is no caller to report it
        return printable(f"The helper failed: {type(error).__name__}: {error}. Please report this.")
    return DONE


def _finish(injection: "Injection | DocumentInjection", hook: int, bundle: int) -> None:
    state = injection.read_state(state_text(hook), hook)
    # protects: another-bundle
    if not os.path.samestat(os.stat(state.bundle), os.fstat(bundle)):
        raise StateError(
            f"The state of the container names another bundle, {state.bundle}",
            "Start the container again; if that doesn't help, set helper = false",
        )
    injection.finish(state)


def state_text(hook: int) -> bytes:
    """Read the container's state, which the low-level runtime writes to its hook."""
    fd = os.open(f"/proc/{hook}/fd/{STATE_FD}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_start(fd, _MAX_STATE + 1)
    finally:
        os.close(fd)
