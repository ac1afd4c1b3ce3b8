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

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Result:
    """How a program ended."""

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
) -> Result:
    """Run ``argv`` to its end; ``env`` is added to our environment."""
    words = tuple(str(word) for word in argv)
    ran.note(words, env)
    done = subprocess.run(
        words,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        input=stdin,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    stdout, stderr = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return Result(words, done.returncode, stdout, stderr)


def path_of(program: str) -> Path:
    """Return where a program of this machine's is."""
    found = shutil.which(program)
    assert found is not None, f"{program} isn't installed"
    return Path(found)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    timeout: float = 60.0,
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
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``argv`` in the background from when it is ``ready`` to the end of the block.

    It is told to stop, too, when this process dies without reaching the end of the block.
    """
    words = ["setpriv", "--pdeathsig", "TERM", *(str(word) for word in argv)]
    ran.note(words, env)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def said() -> str:
        return log.read_text(errors="replace")

    try:
        wait_until(lambda: process.poll() is not None or ready(), f"{argv[0]} is ready", shown=said)
        assert process.poll() is None, said()
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], patience: float = 20.0) -> None:
    """Ask ``process`` to end, and end it if it doesn't."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
