"""Python code in forked children of a process that has already imported it.

The import takes most of a command's time, and tests start our command line and services
hundreds of times. Engines, units, shells and wrappers start our programs, too, and do it in
the usual way.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

_SERVER = Path(__file__).with_name("fork_server.py")
# Variables that an interpreter, its loader or C library, or the launcher reads when it starts.
_AT_START = ("LANG", "LC_", "LD_", "GLIBC_", "PYTHON", "NVIDIA_CTK_", "_GPUHOOK_")
_COMMAND = "from gpuhook.tools.cli import main; main()"
# The same for the tests' Python, which has gRPC and protobuf. The next word is the installed
# program, in whose folder the code looks for other programs.
PROGRAM = f"import sys; del sys.argv[0]; {_COMMAND}"
_MODULES = ("gpuhook.tools.cli",)
_OF_TESTS = (
    "gpuhook.cluster.dra",
    "gpuhook.cluster.device_plugin",
    "gpuhook.metrics",
    "dra_program",
)
_OURS = ("gpuhook.tools", "dra_program")  # code with one of these is ours
_ENTERING = 6  # number of words that Namespace.enter adds


class Child:
    """A forked child with the methods of subprocess.Popen that tests use for daemons."""

    def __init__(self, pid: int, answer: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answer = answer

    def poll(self) -> int | None:
        """Return the exit status, or None while the child runs."""
        return self._hear(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the child; return its exit status, or raise TimeoutExpired."""
        status = self._hear(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to the child, unless it has exited."""
        if self.poll() is None:
            # The server may have waited for it already, and its status may not be here yet.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the child."""
        self.send_signal(signal.SIGKILL)

    def _hear(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._answer.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(int(self._answer.recv(64)))
            except (TimeoutError, BlockingIOError):
                return None
            self._answer.close()
        return self.returncode


class _Request:
    """Code to run, with sys.argv, a folder, and a process in the mount namespace of the folder."""

    def __init__(self, words: Sequence[str], cwd: Path | None) -> None:
        self.folder, self.process = str(cwd or Path.cwd()), "self"
        if words[0] == "nsenter" and [*words[3::2]][:2] == ["-m", "--"]:
            self.folder, self.process = words[4].removeprefix("--wdns="), words[2]
            words = words[_ENTERING:]
        self.interpreter = words[0]
        self.code, self.argv = _COMMAND, list(words)
        if words[0] == sys.executable:
            self.code, self.argv = "".join(words[2:3]), ["-c", *words[3:]]


class _Server:
    """A process that has imported modules, and forks children that use them."""

    def __init__(self, *words: str | Path) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started = dict(os.environ)
        self._namespaces = _namespaces()
        path = os.pathsep.join(path for path in sys.path if path)  # for the tests' interpreter
        env = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen([*words], stdin=theirs.fileno(), env=env)
        theirs.close()

    def can_run(self, env: Mapping[str, str]) -> bool:
        """Return whether a forked child behaves like a program that is started."""
        changed = env.items() ^ self._started.items()
        at_start = any(name.startswith(_AT_START) for name, _ in changed)
        return not at_start and _namespaces() == self._namespaces

    def fork(
        self, request: _Request, env: Mapping[str, str], files: Sequence[IO[bytes]], daemon: bool
    ) -> Child:
        """Run code in a forked child, with three files as its standard ones."""
        about = [request.code, request.argv, dict(env), request.folder, request.process, daemon]
        answer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = [*(file.fileno() for file in files), theirs.fileno()]
            socket.send_fds(self._ours, [json.dumps(about).encode()], fds)
        return Child(int(answer.recv(64)), answer)

    def close(self) -> None:
        """Stop the server."""
        self._ours.shutdown(socket.SHUT_RDWR)
        self._ours.close()
        self._process.wait()


class Servers:
    """Two servers: one has imported our installed command line, one the tests' modules.

    The second has gRPC, which the installation lacks. It runs the code of ``python3 -c``.
    """

    def __init__(self, program: Path) -> None:
        python = program.with_name("python3")
        self._servers = {
            str(program): _Server(python, "-I", _SERVER, *_MODULES),
            sys.executable: _Server(sys.executable, _SERVER, *_MODULES, *_OF_TESTS),
        }

    def run(
        self, words: tuple[str, ...], env: Mapping[str, str], cwd: Path | None, timeout: float
    ) -> tuple[int, bytes, bytes] | None:
        """Return a program's exit status and output, or None if it can't run in a forked child."""
        with ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull, "rb"))
            said = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            child = self.start(words, env, [nothing, *said], cwd=cwd, daemon=False)
            if child is None:
                return None
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout) from None
            for file in said:
                file.seek(0)
            return status, said[0].read(), said[1].read()

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        files: Sequence[IO[bytes]],
        cwd: Path | None = None,
        *,
        daemon: bool = True,
    ) -> Child | None:
        """Start a program; return None if it can't run in a forked child."""
        request = _Request(words, cwd)
        server = self._server(request, env)
        return None if server is None else server.fork(request, env, files, daemon)

    def can_run(self, words: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a program can run in a forked child."""
        return self._server(_Request(words, None), env) is not None

    def _server(self, request: _Request, env: Mapping[str, str]) -> _Server | None:
        server = self._servers.get(request.interpreter)
        is_ours = any(name in request.code for name in _OURS)
        return server if server is not None and is_ours and server.can_run(env) else None

    def close(self) -> None:
        """Stop the servers."""
        for server in self._servers.values():
            server.close()


def _namespaces() -> tuple[str, ...]:
    return tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid_for_children"))
