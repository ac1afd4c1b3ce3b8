"""Run programs: to their end with their output kept, or in the background until told to stop."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ran

TIMEOUT_S = 120.0
_SERVER = Path(__file__).with_name("command_server.py")
# What an interpreter, its loader or C library, or the launcher reads at their start.
_AT_START = ("LANG", "LC_", "LD_", "GLIBC_", "PYTHON", "NVIDIA_CTK_", "_GPUHOOK_")


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
    start: bool = False,
) -> Result:
    """Run ``argv`` to its end; ``env`` is added to our environment.

    Our own command line goes to the server that has imported it, where there is one; ``start``
    has it started as anybody does.
    """
    words = tuple(str(word) for word in argv)
    ran.note(words, env)
    if _server and not start and not stdin and _server.can_run(words, env):
        return _server.run(words, env, cwd, timeout)
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


class Server:
    """A process that has imported our command line, which takes most of a command's time.

    It runs commands in this process' namespaces, and in a mount namespace that ``nsenter`` would
    enter for them. Commands are started by others, too: by engines, units, shells and wrappers.
    """

    def __init__(self, program: Path) -> None:
        self._program = str(program)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started = dict(os.environ)
        self._namespaces = _namespaces()
        argv = [str(word) for word in (program.with_name("python3"), "-I", _SERVER, program)]
        self._process = subprocess.Popen(argv, stdin=theirs.fileno())
        theirs.close()

    def can_run(self, words: tuple[str, ...], env: Mapping[str, str] | None) -> bool:
        """Tell whether a command would be the same if it were started."""
        now = {**os.environ, **(env or {})}.items() ^ self._started.items()
        return (
            words[_entering(words)] == self._program
            and not any(name.startswith(_AT_START) for name, _ in now)
            and _namespaces() == self._namespaces
        )

    def run(
        self,
        words: tuple[str, ...],
        env: Mapping[str, str] | None,
        cwd: Path | None,
        timeout: float,
    ) -> Result:
        """Have a command carried out, as ``run`` does; its standard input is empty."""
        at = _entering(words)
        folder, process = str(cwd or Path.cwd()), "self"
        if at:
            folder, process = words[4].removeprefix("--wdns="), words[2]
        about = [words[at + 1 :], {**os.environ, **(env or {})}, folder, process]
        answer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answer.settimeout(timeout)
        with answer, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            with theirs, open(os.devnull, "rb") as nothing:
                fds = [nothing.fileno(), output.fileno(), errors.fileno(), theirs.fileno()]
                socket.send_fds(self._ours, [json.dumps(about).encode()], fds)
            pid = int(answer.recv(64))
            try:
                status = int(answer.recv(64))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout) from None
            said = []
            for file in (output, errors):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        return Result(words, os.waitstatus_to_exitcode(status), *said)

    def close(self) -> None:
        """End the server."""
        self._ours.shutdown(socket.SHUT_RDWR)
        self._ours.close()
        self._process.wait()


_server: Server | None = None


@contextmanager
def served(program: Path) -> Iterator[None]:
    """Have our command line served in this process' namespaces until the end of the block."""
    global _server  # noqa: PLW0603 - what all calls of run have in common
    _server = Server(program)
    try:
        yield
    finally:
        _server.close()
        _server = None


def _entering(words: tuple[str, ...]) -> int:
    """Return how many words are those with which ``Namespace.enter`` begins a command line."""
    return 6 if words[0] == "nsenter" and words[3::2][:2] == ("-m", "--") else 0


def _namespaces() -> tuple[str, ...]:
    return tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid_for_children"))


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
