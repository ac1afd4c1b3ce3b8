"""The device plugin's server in a separate process, as its supervisor runs it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from gpuhook.cluster.device_plugin.state import PluginState, Resource, Unit

PATIENCE_S = 300
_CODE = """
import sys
from gpuhook.cluster.device_plugin import server, settings
from gpuhook.cluster.kubelet_endpoint import folder, server as endpoint
if sys.argv[2] == "False":
    endpoint._libc.inotify_init1 = lambda flags: -1
exec(sys.argv[4])
made = settings.Settings(
    kubelet_folder=sys.argv[1], register=sys.argv[3] == "True", state_dir=sys.argv[5],
    status_dir=sys.argv[5],
)
sys.exit(server.PluginServer(made, 0, lambda line: print(line, flush=True)).run())
"""


def units(count: int, lost: frozenset[int] = frozenset(), first: int = 0) -> tuple[Unit, ...]:
    """Return ``count`` accelerators on two NUMA nodes, some of them ``lost``."""
    return tuple(
        Unit(
            f"GPU-{number}",
            f"GPU-{number}",
            f"nvidia.com/gpu=GPU-{number}",
            f"GPU-{number}",
            numa=number % 2,
            reason="It has fallen off the bus." if number in lost else "",
        )
        for number in range(first, first + count)
    )


def gpus(
    count: int = 8,
    lost: frozenset[int] = frozenset(),
    name: str = "nvidia.com/gpu",
    replicas: int = 1,
) -> Resource:
    """Return a resource with ``count`` GPUs."""
    variable, mounts = "NVIDIA_VISIBLE_DEVICES", "/var/run/nvidia-container-devices"
    return Resource(name, "nvidia", variable, mounts, units(count, lost), replicas)


class PluginServer:
    """A server in a process, which exits at the end of the block; ``lines`` are its output.

    ``first`` is Python that the process runs before it serves.
    """

    def __init__(
        self,
        folder: Path,
        inotify: bool = True,
        register: bool = True,
        first: str = "",
        state_dir: str = "",
    ) -> None:
        words = [sys.executable, "-c", _CODE, str(folder), str(inotify), str(register)]
        words += [first, state_dir]
        self._supervisor, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                words, stdin=theirs.fileno(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        self.pid = self.process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode().rstrip("\n"))

    def report(self, *resources: Resource) -> None:
        """Send this state to the server."""
        self.send(PluginState(resources).to_line())

    def send(self, line: bytes) -> None:
        """Send a line as the supervisor does."""
        self._supervisor.sendall(line)

    def hang_up(self) -> None:
        """Close the connection, like a supervisor that exits."""
        self._supervisor.close()

    def wait_for_line(self, *words: str, times: int = 1) -> None:
        """Wait until that many lines have all the words."""
        end = time.monotonic() + PATIENCE_S
        while sum(all(word in line for word in words) for line in self.lines) < times:
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < end, self.lines
            time.sleep(0.01)

    def stop(self) -> int:
        """Ask the server to exit, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def threads(self) -> int:
        """Return the number of the server's threads."""
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def descriptors(self) -> int:
        """Return the number of the server's open files."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def processor_time(self) -> float:
        """Return the processor time of the server's current threads, in seconds."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def memory(self) -> int:
        """Return the server's private memory in KiB."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = [line.split() for line in text.splitlines() if line.startswith("Private_")]
        return sum(int(words[1]) for words in found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)
        self._supervisor.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
