"""Run programs: to their end with their output kept, or in the background until told to stop."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ran

from harness.forked import Child, Servers

TIMEOUT_S = 900.0  # for a machine that stands still for minutes, and less than scripts/test has
Process = Child | subprocess.Popen[bytes]


@dataclass(frozen=True)
class Result:
    """Result of a program."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str

    def ok(self) -> "Result":
        """Return self; AssertionError with everything printed if the exit status is not 0."""
        assert self.status == 0, str(self)
        return self

    def failed(self) -> "Result":
        """Return self; AssertionError with everything printed if the exit status is 0."""
        assert self.status != 0, str(self)
        return self

    def __str__(self) -> str:
        return (
            f"{' '.join(self.argv)}\nexit status {self.status}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def run(
    argv: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes = b"",
    timeout: float = TIMEOUT_S,
    start: bool = False,
) -> Result:
    """Run ``argv`` to its end; ``env`` is added to our environment.

    Our own command line goes to the server that has imported it, where there is one; ``start``
    has it started as anybody does.
    """
    words = tuple(str(word) for word in argv)
    ran.note(words, env)
    environ = {**os.environ, **(env or {})}
    if _servers and not start and not stdin:
        served = _servers.run(words, environ, cwd, timeout)
        if served is not None:
            return _result(words, *served)
    done = subprocess.run(
        words,
        env=environ,
        cwd=cwd,
        input=stdin,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    return _result(words, done.returncode, done.stdout, done.stderr)


def _result(words: tuple[str, ...], status: int, *said: bytes) -> Result:
    return Result(words, status, *(text.decode(errors="replace") for text in said))


_servers: Servers | None = None


@contextmanager
def served(program: Path) -> Iterator[None]:
    """Have our command line served in this process' namespaces until the end of the block."""
    global _servers  # noqa: PLW0603 - what all calls of run have in common
    _servers = Servers(program)
    try:
        yield
    finally:
        _servers.close()
        _servers = None


def path_of(program: str) -> Path:
    """Return where a program of this machine's is."""
    found = shutil.which(program)
    assert found is not None, f"{program} isn't installed"
    return Path(found)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    timeout: float = 300.0,
    interval: float = 0.02,
    shown: Callable[[], str] = str,
) -> None:
    """Return once ``condition`` holds; look less often the longer that takes, but every 0.1 s.

    AssertionError if it never does, naming ``what`` and, below it, what ``shown`` gives then.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > timeout:
            raise AssertionError(f"waited {timeout} s in vain until {what}\n{shown()}")
        time.sleep(max(interval, min(waited / 20, 0.1)))


@contextmanager
def daemon(
    argv: Sequence[str | Path],
    log: Path,
    ready: Callable[[], bool],
    env: Mapping[str, str] | None = None,
    start: bool = False,
) -> Iterator[Process]:
    """Run ``argv`` in the background from when it is ``ready`` to the end of the block.

    It is told to stop, too, when this process dies without reaching the end of the block.
    ``start`` as for ``run``.
    """
    log.write_text("")
    process = background(argv, log, env, start)

    def said() -> str:
        return log.read_text(errors="replace")

    try:
        wait_until(lambda: process.poll() is not None or ready(), f"{argv[0]} is ready", shown=said)
        assert process.poll() is None, said()
        yield process
    finally:
        stop(process)


def background(
    argv: Sequence[str | Path],
    log: Path,
    env: Mapping[str, str] | None = None,
    start: bool = False,
) -> Process:
    """Run ``argv`` until it is stopped, or this process ends; add its output to a log."""
    words = [str(word) for word in argv]
    environ = {**os.environ, **(env or {})}
    ran.note(words, env)
    with open(os.devnull, "rb") as nothing, log.open("ab") as output:
        if _servers and not start:
            served = _servers.start(words, environ, [nothing, output, output])
            if served is not None:
                return served
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *words],
            env=environ,
            stdin=nothing,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def stop(process: Process, patience: float = 20.0) -> None:
    """Ask ``process`` to end, and end it if it doesn't."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
