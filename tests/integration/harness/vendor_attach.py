"""Checks of a vendor's devices that gpuhook attaches to and detaches from a running container."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import vendors
from harness.bundles import Bundle
from harness.commands import Result
from harness.vendors import Devices


@dataclass(frozen=True)
class Running:
    """A running container of a bundle, and the gpuhook commands that act on it."""

    bundle: Bundle
    config: Path
    devices: Devices

    def call(self, *command: str) -> Result:
        """Run a command in the container."""
        return self.bundle.call(self.bundle.runtime, "exec", self.bundle.name, *command)

    def json(self, verb: str, *words: str) -> Any:
        """Return the JSON that a gpuhook command prints."""
        command = (self.devices.installation.command, verb, "--config", self.config)
        return json.loads(self.bundle.call(*command, "--format=json", *words).ok().stdout)

    def opens(self, paths: Sequence[str], allowed: set[str]) -> None:
        """Check that the container's cgroup allows only the nodes with allowed numbers."""
        done = self.call(*vendors.make_and_open(self.devices, paths))
        self.call("busybox", "rm", *(f"/by-hand-{number}" for number in range(len(paths)))).ok()
        assert vendors.opened(done, paths) == {
            path: "ENXIO" if self.devices.numbers(path) in allowed else "EPERM" for path in paths
        }

    def holders(self) -> dict[str, list[str]]:
        """Return the containers that have each of the vendor's devices, by device id."""
        every = self.json("list")["devices"]
        own = [each for each in every if each["vendor"] == self.devices.vendor]
        return {each["id"]: each["containers"] for each in own}

    def mounts(self) -> set[str]:
        """Return the container's mount points."""
        lines = self.call("busybox", "cat", "/proc/self/mountinfo").ok().stdout.splitlines()
        return {line.split()[4] for line in lines}


@contextmanager
def attached(
    bundle: Bundle, config: Path, devices: Devices, asked: Sequence[str]
) -> Iterator[Running]:
    """Attach devices, by CDI names, to a running container of a bundle, and detach them again.

    Checks the records. Checks also that the container has all files that it would get if it
    were started with the devices.
    """
    running = Running(bundle, config, devices)
    kinds = [word for name in asked for word in ("--device", name)]
    plan = running.json("explain", "--rootfs", str(bundle.root), *kinds)["operations"]
    files = {each["destination"] for each in plan if each["kind"] == "bind"}
    done = running.json("attach", bundle.name, *asked)
    ids = {each["id"] for each in done["devices"]}
    assert {each["vendor"] for each in done["devices"]} == {devices.vendor}
    assert {name for name, there in running.holders().items() if bundle.name in there} == ids
    explained = running.json("explain", bundle.name)["container"]
    assert ({*explained["attached"]}, explained["missing_nodes"]) == (ids, [])
    assert {*done["nodes"], *files} <= running.mounts()
    yield running
    gone = running.json("detach", bundle.name, *asked)
    assert {*gone["nodes"]} == {*done["nodes"]}
    assert not {*gone["nodes"]} & running.mounts()
    assert not any(running.holders().values())
    assert bundle.name not in [each["id"] for each in running.json("list")["containers"]]
