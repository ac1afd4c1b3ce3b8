"""A simulated machine that shares GPUs by MPS, and containers that are clients of MPS."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.bundles import Bundle
from harness.commands import Result, run, wait_until
from harness.driver import Driver
from harness.images import CUDA_PROBE
from harness.installation import Installation
from harness.prefork import is_running

PLACE = "/run/nvidia-mps"
PROBE = f"sleep 1000 | {CUDA_PROBE} --context"
SETTINGS = """
[gpuhook.mps]
devices = "0,1"
active-thread-percentage = 40
device-memory = "8GiB"
clients = 2
"""
LIMITS = {
    "575.51": "percentage=40.0 memory=0=8192M,1=8192M",
    "615.10": "percentage=40 memory=8192M",
}


@dataclass
class Site:
    """A simulated machine that shares two of its three GPUs by MPS."""

    installation: Installation
    driver: Driver
    config: Path
    state: Path
    runtime: str
    bundle: Callable[[], Bundle]

    def mps(self, verb: str) -> Result:
        env = {"GPUHOOK_CONFIG": str(self.config)}
        return run([self.installation.command, "mps", *verb.split(" ")], env=env)

    def status(self) -> Any:
        return json.loads(self.mps("status --format json").stdout)

    def modes(self) -> list[int]:
        """Return the compute modes of the GPUs, as the driver has them."""
        text = (self.driver.root / "simulate/compute").read_text()
        found = dict(line.split(" ") for line in text.splitlines())
        return [int(found.get(str(gpu.index), 0)) for gpu in self.driver.gpus]

    def kept(self) -> Any:
        return json.loads((self.state / "mps.json").read_text().partition("\n")[2])

    def daemon(self) -> int:
        """Return the daemon's process id, or 0 while none runs."""
        return int(self.kept()["daemon"].partition("-")[0] or 0)

    def kill(self) -> None:
        """Kill the daemon, and wait until it has exited, which takes a moment on a busy host."""
        pid = self.daemon()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "it has ended")

    def daemons(self) -> list[str]:
        return daemons(self.driver)

    def change(self, old: str, new: str) -> None:
        text = self.config.read_text()
        assert old in text
        self.config.write_text(text.replace(old, new))

    def ask(self, devices: str, *env: str, command: str = PROBE) -> Bundle:
        """Return a bundle whose container is a client of MPS if this is permitted."""
        made = self.bundle()
        made.command("sh", "-c", command)
        made.environ(f"NVIDIA_VISIBLE_DEVICES={devices}", *env)
        return made

    def start(self, made: Bundle) -> Result:
        """Create and start a container.

        The result has the container's output, or the error message if it wasn't started.
        """
        output = made.path / "output"
        quiet = ("sh", "-c", 'exec "$@" </dev/null >output 2>&1', "sh")
        words = (self.installation.runtime, "run", "--detach", "--bundle", made.path, made.name)
        done = made.call(*quiet, *words, env={"GPUHOOK_CONFIG": str(self.config)})
        return Result((), done.status, "", output.read_text())

    def client(self, devices: str, *env: str) -> Bundle:
        """Start a container, and wait until its program is a client of MPS."""
        made = self.ask(devices, *env)
        assert self.start(made).status == 0, (made.path / "output").read_text()
        wait_until(lambda: "CUDA context" in self.said(made), "it has a context")
        return made

    def said(self, made: Bundle) -> str:
        return (made.path / "output").read_text()

    def refusal(self, devices: str, *env: str) -> str:
        """Return the error messages of a container that isn't started."""
        done = self.start(self.ask(devices, *env))
        assert done.status != 0
        return (self.state / "errors.log").read_text() + done.stderr


def daemons(driver: Driver, name: str = "nvidia-cuda-mps-control") -> list[str]:
    """Return the ids of the control daemons that run from a driver's folder."""
    program = str(driver.root / "usr/bin" / name)
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(each / "exe") == program:
                found.append(each.name)
    return found
