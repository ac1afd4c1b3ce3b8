"""The helper: does the hook's work, begun while the low-level runtime is making the container.

It is forked by the runtime before that becomes the low-level runtime, or it is a child of the
process that stands ready (``standby``). The hook, launchers/launcher.c, asks
it through a pipe of its own, which is reached as /proc/PID/fd/N: nobody but root can open
that, it leaves no file behind, and it is gone when the helper is. Then the hook does the work
by itself.

The helper holds no descriptor that it was not made with. It ends when the low-level runtime
does, or when the hook doesn't ask in time. Once it has taken the task, the hook waits for its
answer; if it dies then, the container is not started.

It has what runtime_shim has imported when it is forked, and imports the rest itself.
"""

import _signal  # type: ignore[import-not-found]
import os

from gpuhook.ground import log
from gpuhook.ground.errors import GpuhookError, StateError, printable
from gpuhook.ground.fileio import read_start
from gpuhook.ground.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from gpuhook.cdi_hook import DocumentInjection
    from gpuhook.ground.config.model import Config
    from gpuhook.inject import Injection
    from gpuhook.start.edit import Task
    from gpuhook.start.inventory.model import Inventory

# Seconds that the low-level runtime and the hooks before ours may take, after which the hook
# finds no helper and does the work; and seconds that the work may take.
DEADLINE = 60
# Seconds after which it puts off its end while it waits for the hook, and after which the kernel
# kills one that doesn't, because somebody has stopped it: the hook waits for no other.
_BEAT, _END = 1, 3
TAKEN = "taken"
DONE = "done"

# What a hook's work isn't given up for: the end of the unit that we are in (gpuhook-watch.service),
# and of the process that stood ready (Server.run).
_UNHEARD = _signal.SIGTERM, _signal.SIGHUP

_STATE_LIMIT = 16 << 20
STATE_FD = 6  # where the hook keeps its standard input


class Pipes(Record):
    """The descriptors of one helper.

    The hook asks through the pipe ``asked``, which is open for both so that it has no end
    before it asks, and is answered through ``answer``; it knows the helper by ``bundle``,
    the bundle's folder. ``runtime`` is a pidfd of what is, or becomes, the low-level runtime.
    """

    asked: int
    answer: int
    bundle: int
    runtime: int

    def words(self, pid: int, folder: str) -> list[str]:
        """Return the words by which the hook finds the helper (launchers/launcher.c)."""
        return [str(pid), str(self.asked), str(self.answer), str(self.bundle), folder]


def start(task: "Task", config: "Config", stays: str = "") -> list[str]:
    """Fork the helper for a container; return the words by which the hook finds it.

    No words where there can be no helper. Where ``stays`` is the path of gpu-py, the helper
    becomes the process that stands ready for further containers.
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
        _main(pipes, task, config, stays)
    # Our own copies of the descriptors close when we become the low-level runtime.
    return pipes.words(pid, folder)


def pipe_for_both() -> int:
    """Return one descriptor that both reads from a new pipe and writes to it."""
    reader, writer = os.pipe()
    try:
        return os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(reader)
        os.close(writer)


def _main(pipes: Pipes, task: "Task", config: "Config", stays: str) -> "NoReturn":
    """Serve one request and end, whatever happens; never return into the caller's code."""
    try:
        from gpuhook.ground.container import kernel  # noqa: PLC0415 - in the helper, where time is not short

        kernel.keep_only((pipes.asked, pipes.answer, pipes.bundle, pipes.runtime))
        injection = injection_of(task, config)
        if stays:
            from gpuhook.prefork import instance  # noqa: PLC0415 - now: in a container it's too late
        host = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        if serve(pipes, config, injection) and stays:
            instance.become_server(config, stays, host, pipes.runtime)
    finally:
        os._exit(0)


def injection_of(
    task: "Task", config: "Config", inventories: "Mapping[str, Inventory] | None" = None
) -> "Injection | DocumentInjection":
    """Return the work of a container's hook.

    ``inventories``, by vendor, are known to be the machine's.
    """
    known = task.resolved.known
    if task.kind:
        from gpuhook import cdi_hook  # noqa: PLC0415 - only for documents

        return cdi_hook.of_kind(task.kind, task.spec, config, known, inventories or {})
    task.resolved.preload_injection()
    from gpuhook.inject import Injection  # noqa: PLC0415 - preloaded

    return Injection(task.spec, config, task.resolved)


def serve(pipes: Pipes, config: "Config", injection: "Injection | DocumentInjection") -> bool:
    """Do the work of a container's hook when it asks; tell whether that went well.

    Afterwards this process is in the container's mount namespace.
    """
    from gpuhook.ground.container import kernel  # noqa: PLC0415 - imported already

    kernel.end_after(DEADLINE)
    injection.begin()
    if not _is_asked(pipes):
        return False
    hook = int(os.read(pipes.asked, 32))
    return answer(
        pipes.answer, config, injection.program, lambda: _finish(injection, hook, pipes.bundle)
    )


def answer(pipe: int, config: "Config", program: str, work: "Callable[[], None]") -> bool:
    """Tell a hook that its work is being done, do it, and tell how it went; True if well."""
    from gpuhook.ground.container import kernel  # noqa: PLC0415 - imported already

    for number in _UNHEARD:
        _signal.signal(number, _signal.SIG_IGN)  # protects: work-goes-on
    os.write(pipe, f"{TAKEN}\n".encode())
    kernel.end_after(DEADLINE)
    outcome = _outcome(work)
    if outcome != DONE:
        log.keep(program, outcome, config)
    os.write(pipe, f"{' '.join(outcome.split())}\n".encode("utf-8", "replace"))
    for number in _UNHEARD:
        _signal.signal(number, _signal.SIG_DFL)
    return outcome == DONE


def _is_asked(pipes: Pipes) -> bool:
    """Wait for the hook; False if the low-level runtime ends first, or takes too long."""
    import select  # noqa: PLC0415 - in the helper, where time is not short

    from gpuhook.ground.container import kernel  # noqa: PLC0415 - imported already

    waiting = select.poll()
    waiting.register(pipes.asked, select.POLLIN)
    waiting.register(pipes.runtime, select.POLLIN)
    for _ in range(DEADLINE // _BEAT):
        kernel.end_after(_END)
        happened = waiting.poll(_BEAT * 1000)
        if happened:
            return pipes.asked in [fd for fd, _ in happened]
    return False


def _outcome(work: "Callable[[], None]") -> str:
    """Do the hook's work; return DONE, or what to tell the user instead."""
    try:
        work()
    except GpuhookError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - there is nobody else to show it to
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
    """Read what the low-level runtime writes to a hook: the container's state."""
    fd = os.open(f"/proc/{hook}/fd/{STATE_FD}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_start(fd, _STATE_LIMIT + 1)
    finally:
        os.close(fd)
