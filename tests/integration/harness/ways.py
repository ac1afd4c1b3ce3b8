"""Containers of one configuration that get GPUs in each way: gpu-py's modes, the hook, or CDI."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuhook.core.records import records
from harness.bundles import Bundle
from harness.cdi import give
from harness.commands import Result, wait_until
from harness.driver import Driver
from harness.installation import Installation

MODES = ("hook", "spec", "cdi")  # of gpu-py
# "alone" is the hook without gpu-py, "engine" an engine that reads CDI.
WAYS = (*MODES, "alone", "engine")
EXCLUSIVE = 'exclusive = ["nvidia.com/gpu"]\n'
_QUIET = ("sh", "-c", 'exec "$@" </dev/null >output 2>&1', "sh")


@dataclass
class Place:
    """A configuration, and containers that get GPUs with it, each in a separate bundle."""

    installation: Installation
    runtime: str
    bundle: Callable[[], Bundle]
    config: Path
    driver: Driver

    @property
    def documents(self) -> Path:
        """The folder of CDI specs, with one spec of the driver's GPUs."""
        return self.config.parent / "cdi"

    def configure(self, line: str) -> None:
        """Add a setting to [gpuhook]."""
        self.config.write_text(self.config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{line}"))

    def mode(self, way: str) -> Path:
        """Return a configuration with the same state folder and the mode that a way needs."""
        mode = way if way in MODES else "hook"
        path = self.config.with_name(f"{mode}.toml")
        documents = f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{self.documents}"]\n'
        path.write_text(f'{self.config.read_text()}mode = "{mode}"\n{documents}')
        return path

    def ask(self, device: str, way: str = "hook") -> Bundle:
        """Return a bundle that asks for GPUs in a way."""
        made = self.bundle()
        made.command("sleep", "1000")
        if way == "engine":
            give(made, self.documents / "nvidia.com-gpu.yaml", device)
        else:
            made.environ(f"NVIDIA_VISIBLE_DEVICES={device}")
        if way == "alone":
            made.prestart(self.installation.hook, self.mode(way))
        return made

    def _words(self, made: Bundle, way: str) -> list[str | Path]:
        program = self.installation.runtime if way in MODES else self.runtime
        return [*_QUIET, program, "create", "--bundle", made.path, made.name]

    def create(self, made: Bundle, way: str = "hook") -> Result:
        """Create a container, without starting it; the result's output has any errors."""
        env = {"GPUHOOK_CONFIG": str(self.mode(way))}
        status = made.call(*self._words(made, way), env=env).status
        return Result((), status, "", (made.path / "output").read_text())

    def create_all(self, several: Sequence[Bundle], way: str = "hook") -> None:
        """Create containers at the same time; fail the test unless all of them were created."""
        created = self.create_at_once(several, way)
        outputs = [(each.path / "output").read_text() for each in several]
        assert all(created), [text for text, fine in zip(outputs, created, strict=True) if not fine]

    def create_at_once(self, several: Sequence[Bundle], way: str = "hook") -> list[bool]:
        """Create containers at the same time; return which of them were created."""
        env = {**os.environ, "GPUHOOK_CONFIG": str(self.mode(way))}
        running = []
        for made in several:
            argv = made.namespace.enter(*self._words(made, way), cwd=made.path)
            running.append(subprocess.Popen(argv, cwd=made.path, env=env))
        return [process.wait(timeout=300) == 0 for process in running]

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the records of running containers by name."""
        return {each["id"]: each for each in records.read_all(str(self.config.parent / "state"))}

    def gpus(self, made: Bundle) -> list[int]:
        """Return the indices of a container's GPUs, by its record."""
        there = {gpu.uuid: gpu.index for gpu in self.driver.gpus}
        return [
            there[name] for each in self.records()[made.name]["given"] for name in each["selected"]
        ]

    def kill(self, made: Bundle) -> None:
        """Kill a container's first process; the container remains, without a record."""
        os.kill(self.records()[made.name]["pid"], signal.SIGKILL)
        wait_until(lambda: made.name not in self.records(), "it is gone")

    def end(self, made: Bundle) -> None:
        """Kill a container's first process, and delete the container."""
        self.kill(made)
        wait_until(lambda: self.delete(made).status == 0, "it is deleted")  # its cgroup may be busy

    def delete(self, made: Bundle) -> Result:
        """Delete a container."""
        return made.call(self.runtime, "delete", "--force", made.name)

    def errors(self) -> str:
        """Return the saved errors, because crun doesn't show the output of hooks."""
        return (self.config.parent / "state/errors.log").read_text()
