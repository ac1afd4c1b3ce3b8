"""The helper: does the hook's work, begun while the low-level runtime is making the container.

The runtime forks it before it becomes the low-level runtime. The hook, a few lines of shell
(launchers/gpu-py), asks it through a pipe of its own, which is reached as /proc/PID/fd/N:
nobody but root can open that, it leaves no file behind, and it is gone when the helper is.
Then the hook does the work by itself.

The helper holds no descriptor that it was not made with, and the kernel ends it when the
low-level runtime ends or the hook doesn't ask in time. Once it has taken the task, the hook
waits for its answer; if it dies then, the container is not started.

It has what runtime_shim has imported when it is forked, and imports the rest itself.
"""

import os

from gpuhook import log, names
from gpuhook.errors import GpuhookError, StateError
from gpuhook.start import preload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.config import Config
    from gpuhook.inject import Injection
    from gpuhook.oci.spec import Spec
    from gpuhook.resolve import Resolved

# Seconds that the low-level runtime and the hooks before ours may take, after which the hook
# finds no helper and does the work; and seconds that the work may take.
DEADLINE = 60
TAKEN = "taken"
DONE = "done"

_STATE_LIMIT = 16 << 20
_STATE_FD = 6  # where the hook keeps its standard input; a shell's read moves descriptor 0


def start(spec: "Spec", config: "Config", resolved: "Resolved") -> list[str]:
    """Fork the helper for a container; return the words by which the hook finds it.

    They are its process id, the descriptors to ask by, to be answered by and to know it by,
    and what the last one is: the bundle. No words where there can be no helper.
    """
    folder = os.path.dirname(os.path.abspath(spec.path))
    if os.geteuid() != 0:
        return []
    try:
        bundle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        asked, answer = os.pipe(), os.pipe()
        parent = os.getpid()
        pid = os.fork()
    except OSError:
        return []
    if pid == 0:
        _main(parent, (bundle, *asked, answer[1]), spec, config, resolved)
    # Our own copies of the descriptors close when we become the low-level runtime.
    return [str(pid), str(asked[1]), str(answer[1]), str(bundle), folder]


def _main(
    parent: int,
    descriptors: tuple[int, int, int, int],
    spec: "Spec",
    config: "Config",
    resolved: "Resolved",
) -> "NoReturn":
    """Serve one request and end, whatever happens; never return into the caller's code."""
    try:
        _bind(parent, descriptors)
        preload.load(preload.INJECTION)
        from gpuhook.inject import Injection  # noqa: PLC0415 - imported already

        injection = Injection(spec, config, resolved)
        injection.begin()
        bundle, asked, _, answer = descriptors
        _serve(injection, config, bundle, asked, answer)
    finally:
        os._exit(0)


def _bind(parent: int, descriptors: tuple[int, ...]) -> None:
    """Keep these descriptors alone, and live no longer than the low-level runtime."""
    from gpuhook.container import kernel  # noqa: PLC0415 - in the helper, where time is not short

    kernel.keep_only(descriptors)
    kernel.die_with_parent()
    kernel.end_after(DEADLINE)
    if os.getppid() != parent:
        os._exit(0)


def _serve(injection: "Injection", config: "Config", bundle: int, asked: int, answer: int) -> None:
    from gpuhook.container import kernel  # noqa: PLC0415 - imported already

    hook = int(os.read(asked, 32))
    os.write(answer, f"{TAKEN}\n".encode())
    kernel.end_after(DEADLINE)
    outcome = _finish(injection, hook, bundle)
    if outcome != DONE:
        log.keep(names.HOOK, outcome, config)
    os.write(answer, f"{' '.join(outcome.split())}\n".encode("utf-8", "replace"))


def _finish(injection: "Injection", hook: int, bundle: int) -> str:
    """Do the hook's work; return DONE, or what to tell the user instead."""
    from gpuhook.oci.spec import parse_state  # noqa: PLC0415 - imported already

    try:
        state = parse_state(_state_text(hook))
        if not os.path.samestat(os.stat(state.bundle), os.fstat(bundle)):
            raise StateError(
                f"The state of the container names another bundle, {state.bundle}",
                "Start the container again; if that doesn't help, set helper = false",
            )
        injection.finish(state)
    except GpuhookError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - there is nobody else to show it to
        return f"The helper failed: {type(error).__name__}: {error}. Please report this."
    return DONE


def _state_text(hook: int) -> bytes:
    """Read what the low-level runtime writes to the hook: the container's state."""
    fd = os.open(f"/proc/{hook}/fd/{_STATE_FD}", os.O_RDONLY | os.O_CLOEXEC)
    chunks = []
    size = 0
    try:
        while size <= _STATE_LIMIT and (chunk := os.read(fd, 1 << 16)):
            chunks.append(chunk)
            size += len(chunk)
    finally:
        os.close(fd)
    return b"".join(chunks)
