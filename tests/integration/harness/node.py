"""A node of a cluster: a simulated driver, the device plugin's supervisor, and a kubelet."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kubelet import Kubelet
from plugin_settings import settings_of

from gpuhook.cluster.device_plugin.settings import Settings
from harness.commands import Process, background, run, stop, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

GPUS = "nvidia.com/gpu"
_CODE = """
import sys
from gpuhook.base.config.loader import load
from gpuhook.cluster.device_plugin import service
from gpuhook.cluster.device_plugin.settings import Settings, Sharing
from gpuhook.cluster.vendors.nvidia.plugin import PluginSettings
sys.exit(service.run(eval(sys.argv[2]), load(sys.argv[1])))
"""


def children(pid: int) -> dict[str, int]:
    """Return the ids of a process' children by the children's names."""
    found = {}
    for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # the child has exited
            found[Path(f"/proc/{each}/comm").read_text().strip()] = int(each)
    return found


def listens(pid: int) -> bool:
    """Return whether a process has a child that waits for the driver's events.

    While it waits, the simulated NVML watches the folder of its state (inotify(7)).
    """
    try:
        fds = Path(f"/proc/{children(pid)['gpuhook-events']}/fd")
        return any(os.readlink(each) == "anon_inode:inotify" for each in fds.iterdir())
    except (KeyError, OSError):
        return False  # this child doesn't run yet


class Node:
    """A simulated machine with a driver, the plugin and a kubelet."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "driver"
        self.log = folder / "log"
        self.config = write_config(folder / "config", self.root, ["runc"])
        self.kubelet = Kubelet(folder / "kubelet")
        self._installation = installation
        self._settings = Settings()
        self.process: Process | None = None

    def simulate(self, *options: str) -> Driver:
        return simulate(self._installation, self.root, *options)

    def start(self, **options: object) -> None:
        """Start kubelet and plugin."""
        self.kubelet.start()
        self.run(**options)

    def run(self, **options: object) -> None:
        """Start the plugin."""
        chosen = {"interval": 0.5, "recovery": 2.0, **options}
        settings = settings_of(kubelet_folder=str(self.kubelet.folder), **chosen)
        argv = [sys.executable, "-c", _CODE, str(self.config), repr(settings)]
        path = f"{self._installation.bin}:{os.environ['PATH']}"
        self.process = background(argv, self.log, {"PATH": path})

    def stop(self) -> int:
        """Stop the plugin; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def child(self, name: str) -> int:
        assert self.process is not None
        wait_until(lambda: name in children(self.pid), f"there is a {name}")
        return children(self.pid)[name]

    def hears(self) -> None:
        """Wait until the plugin waits for the driver's events."""
        wait_until(lambda: listens(self.pid), "somebody listens to the driver")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    def healthy(self, count: int, of: int, resource: str = GPUS) -> None:
        """Wait until ``count`` of the ``of`` devices of a resource are healthy."""
        kubelet = self.kubelet
        self.until(
            lambda: (
                resource in kubelet.resources()
                and (kubelet.allocatable(resource), kubelet.capacity(resource)) == (count, of)
            ),
            f"{count} of {of} {resource} are healthy",
        )

    def unhealthy(self, resource: str = GPUS) -> set[str]:
        devices = self.kubelet.devices(resource)
        return {name for name, device in devices.items() if not device.healthy}

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            stop(self.process)
        self.kubelet.stop()


@contextmanager
def plugin_node(installation: Installation, workspace: Path) -> Iterator[Node]:
    """Yield a node on which nothing runs yet; stop and remove all of it after the block."""
    with tempfile.TemporaryDirectory(prefix="node-", dir=workspace) as folder:
        made = Node(installation, Path(folder))
        try:
            yield made
        finally:
            made.end()
            run(["rm", "-rf", made.root]).ok()


def spent(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
