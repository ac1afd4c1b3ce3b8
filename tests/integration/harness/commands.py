"""Programs that run until they exit, with their output kept, or in the background until stopped."""

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

TIMEOUT_S = 900.0  # for a host that hangs for minutes; the time limit of scripts/test is longer
Process = Child | subprocess.Popen[bytes]


@dataclass(frozen=True)
class Result:
    """Result of a program."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str

    def ok(self) -> "Result":
        """Return self; raise AssertionError with everything printed if the exit status isn't 0."""
        assert self.status == 0, str(self)
        return self

    def failed(self) -> "Result":
        """Return self; raise AssertionError with everything printed if the exit status is 0."""
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
    """Run ``argv`` until it exits; ``env`` is added to our environment.

    If a server has imported our command line, the command line runs in a child of that server.
    With ``start``, it is started as users start it.
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
    """Serve our command line from a process that has imported it, until the end of the block.

    It runs in this process' namespaces.
    """
    global _servers  # noqa: PLW0603 - what all calls of run have in common
    _servers = Servers(program)
    try:
        yield
    finally:
        _servers.close()
        _servers = None


def path_of(program: str) -> Path:
    """Return the path of a program that is installed on this host."""
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
    """Return once ``condition`` holds.

    The longer this takes, the longer is the interval between two checks, up to 0.1 s. After
    the timeout, raise AssertionError with ``what`` and, below it, the result of ``shown``.
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
    """Run ``argv`` in the background until the end of the block.

    The block begins once the program is ``ready``. The program is also stopped if this process
    dies before the end of the block. ``start`` is as for ``run``.
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
    """Start ``argv`` in the background, and add its output to a log.

    It runs until it is stopped or this process exits.
    """
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
    """Send SIGTERM to ``process``, and SIGKILL if it doesn't exit."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
