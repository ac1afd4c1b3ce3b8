"""MPS control daemon: its program, commands and responses.

Source: NVIDIA's MPS guide of release 615, for both versions of the interface. The guide documents
no responses except numbers, so an unexpected response is an error.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence

from gpuhook.base import names
from gpuhook.base.errors import MpsError, printable
from gpuhook.base.host import files, lock, proc, signals
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import records
from gpuhook.monitor.host import driver_program
from gpuhook.vendors.nvidia import mps

SERVER = "gpuhook"  # name of gpuhook's server, in version 3
_PATIENCE = 20.0  # seconds for a response: the first one may start the server
_PROBE = 5.0
_END = 10.0  # seconds for the daemon to exit
_PAUSE = 0.05
_PID = "nvidia-cuda-mps-control.pid"  # in the pipe folder
_COMM = 15  # bytes of a process name in the kernel
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SHORT = 200  # characters of a response that are shown
# The daemon and its server use gpuhook's shared memory at /dev/shm (version 2).
_WITH_SHM = 'mount --bind "$1" /dev/shm && shift && exec "$@"'


class Control:
    """The control daemon of a folder; ``program`` is its path on this host.

    ``libraries`` is the folder of the driver's libraries, "" if the loader finds them.
    """

    def __init__(self, program: str, base: str, version: int, libraries: str = "") -> None:
        self._program = program
        self._base = base
        self._pid_file = f"{base}/{mps.PIPE}/{_PID}"
        self._lock = f"{base}/{mps.LOG}"  # only root can open it, and so lock it
        self.version = version
        self._environment = {
            "PATH": names.SYSTEM_PATH,
            "LC_ALL": "C.UTF-8",
            mps.PIPE_VARIABLE: f"{base}/{mps.PIPE}",
            "CUDA_MPS_LOG_DIRECTORY": f"{base}/{mps.LOG}",
        }
        if libraries:
            self._environment["LD_LIBRARY_PATH"] = libraries

    def start(self, devices: Sequence[str]) -> str:
        """Start it for the devices with these UUIDs; return its process id as in records."""
        words = [self._program, "-d"]
        if self.version >= 3:
            words += ["-p", str(self.version)]
        else:
            shm = f"{self._base}/{mps.SHM}"
            inside = ["unshare", "--mount", "--propagation", "private", "--"]
            words = [*inside, "sh", "-c", _WITH_SHM, "sh", shm, *words]
        fd = os.open(self._lock, _FOLDER)
        try:
            lock.take(fd)  # the daemon inherits it
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
            self._run(words, "", visible, _PATIENCE, fd)
        finally:
            os.close(fd)
        return self._started()

    def settle(self) -> None:
        """Wait until a start by a killed process has produced the daemon, or has failed."""
        try:
            fd = os.open(self._lock, _FOLDER)
        except OSError:
            return
        try:
            end = time.monotonic() + _PATIENCE
            while not (lock.take(fd) or self.process()) and time.monotonic() < end:
                time.sleep(_PAUSE)
        finally:
            os.close(fd)

    def _started(self) -> str:
        """Wait for the daemon's process, and return its id as in records."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            found = self.process()
            if found:
                return found
            time.sleep(_PAUSE)
        raise MpsError(
            f"MPS' control daemon was started, and {self._pid_file} doesn't name its process",
            f"See the log in {self._base}/{mps.LOG}",
        )

    def process(self) -> str:
        """Return the id of the running daemon's process as in records; "" for none.

        A daemon that is in no record was started by a process that was killed before writing it.
        """
        try:
            pid = int(files.read(self._pid_file, 64))
            fd = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                name = os.path.basename(self._program).encode()[:_COMM]
                is_it = proc.read("comm", fd).rstrip(b"\n") == name
                found = records.name_of_process(fd)
            finally:
                os.close(fd)
        except (OSError, ValueError):
            return ""
        return found if is_it and not records.is_gone(found) else ""

    def tell(self, *lines: str) -> None:
        """Send commands; MpsError if one isn't accepted."""
        for line in lines:
            answer = self.ask(line)
            if "error" in answer.lower() or "fail" in answer.lower():
                raise _unexpected(line, answer)

    def start_first_server(self) -> None:
        """Start a server (version 2); MpsError if a client has already caused one to start.

        Such a server lacks the defaults that were set since.
        """
        if _numbers(self.ask("get_server_list")):  # protects: mps-first-server
            raise MpsError(
                "A program became a client of MPS before the limits were set",
                "End the containers of these GPUs, and run gpuhook mps start again",
            )
        self.tell("start_server -uid 0")

    def ask(self, line: str, patience: float = _PATIENCE) -> str:
        """Return the response to a command, without the last newline."""
        return self._run([self._program], f"{line}\n", {}, patience).removesuffix("\n")

    def check(self, threads: int) -> None:
        """Raise MpsError unless it responds and has the thread limit that was set."""
        if self.version >= 3:
            line = "server list --format=csv,noheader"
            answer = self.ask(line, _PROBE)
            if SERVER not in answer:
                raise _unexpected(line, answer)
            return
        line = "get_default_active_thread_percentage"
        answer = self.ask(line, _PROBE)
        try:
            has = float(answer)
        except ValueError:
            raise _unexpected(line, answer) from None
        if threads and has != threads:
            raise _unexpected(line, answer)

    def clients(self) -> list[int]:
        """Return the process ids of all clients."""
        if self.version >= 3:
            return _numbers(self.ask("client list --format=csv,noheader", _PROBE))
        servers = _numbers(self.ask("get_server_list", _PROBE))
        found = [_numbers(self.ask(f"get_client_list {each}", _PROBE)) for each in servers]
        return [pid for each in found for pid in each]

    def end(self, process: str) -> None:
        """Stop it with its own command, else kill it. ``process`` is its id as in records."""
        if records.is_gone(process):
            return
        try:
            self.ask("quit", _PROBE)
        except MpsError:
            pass
        if not _ended(process):
            pid = int(process.partition("-")[0])
            fd = os.pidfd_open(pid)
            try:
                if _called(pid) == process:  # not another process with the same number
                    signals.send(fd, signal.SIGKILL)
            finally:
                os.close(fd)
            _ended(process)

    def _run(
        self, words: list[str], text: str, more: dict[str, str], patience: float, *passed: int
    ) -> str:
        environment = {**self._environment, **more}
        try:
            done = subprocess.run(
                words, input=text.encode(), capture_output=True, timeout=patience,
                env=environment, cwd="/", pass_fds=passed, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise MpsError(
                f"MPS' control daemon didn't answer within {patience:g} seconds",
                f"See the log in {self._base}/{mps.LOG}",
            ) from None
        except OSError as error:
            raise MpsError(
                f"{words[0]} can't be run: {error.strerror}", "Install the driver's MPS programs"
            ) from None
        said = printable((done.stdout + done.stderr).decode(errors="replace").strip())[:_SHORT]
        if done.returncode:
            raise MpsError(
                f"MPS' control daemon failed: {said or f'status {done.returncode}'}",
                f"See the log in {self._base}/{mps.LOG}, and run gpuhook mps start again",
            )
        return done.stdout.decode(errors="replace")


def _numbers(text: str) -> list[int]:
    """Return the number at the start of each line; other lines are skipped."""
    first = [line.partition(",")[0].strip() for line in text.split("\n")]
    return [int(each) for each in first if each.isascii() and each.isdecimal() and len(each) < 10]


def _called(pid: int) -> str:
    """Return a process' id as in records; "" if it is gone."""
    try:
        fd = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return records.name_of_process(fd)
    except OSError:
        return ""
    finally:
        os.close(fd)


def _ended(process: str) -> bool:
    end = time.monotonic() + _END
    while time.monotonic() < end:
        if records.is_gone(process):
            return True
        time.sleep(_PAUSE)
    return False


def _unexpected(line: str, answer: str) -> MpsError:
    said = printable(answer)[:_SHORT] or "nothing"
    return MpsError(
        f"MPS' control daemon answered {line.partition(' --')[0]!r} with {said!r}",
        "Run gpuhook mps start again; if that doesn't help, report it: this daemon differs from "
        "NVIDIA's guide",
    )


def program_of(inventory: Inventory) -> str:
    """Return the path of a driver's control daemon; MpsError if there is none."""
    name = "nvidia-cuda-mps-control"
    found = driver_program.find(inventory, name)
    if found is None:
        raise MpsError(
            f"The driver below {inventory.root} has no {name}",
            "Install the driver's package that has it (nvidia-cuda-mps on Debian)",
        )
    return found
