"""``gpuhook dra`` with claims from a folder instead of an API server, as a program of the tests.

Its argument is a JSON object: config, claims (the folder), node, options, and ``limit``, the
seconds for a claim's work. With ``killable``, the folder of claims may have a file KILL. That
file names a kind of work (prepare, unprepare, sweep) and the number of a file change in it,
counted from 1. Before that change, the child kills itself and the whole service.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gpuhook.base.config.loader import load
from gpuhook.base.errors import PluginError
from gpuhook.cluster.dra import service, work
from gpuhook.cluster.dra.claim_preparer import ClaimGoneError
from gpuhook.cluster.dra.devices import DeviceRegistry
from gpuhook.cluster.dra.options import DraOptions
from gpuhook.cluster.dra.slices import Choices
from gpuhook.cluster.kubelet_endpoint.supervisor import tell

KILL = "kill"
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod", "os.truncate")


class FolderClaims:
    """Claims from files NAMESPACE_NAME.json in a folder.

    ``hang`` in a claim is the number of seconds that its reading takes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claim(self, namespace: str, name: str, uid: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(
                (self._folder / f"{namespace}_{name}.json").read_text()
            )
        except FileNotFoundError:
            raise ClaimGoneError(f"The claim {namespace}/{name} isn't there", "Make it") from None
        time.sleep(found.get("hang", 0))
        if found.get("away"):
            raise PluginError("The API server can't be asked", "Ask again")
        if (found["metadata"]["uid"]) != uid and not found.get("trusting"):
            raise ClaimGoneError(f"The claim {namespace}/{name} is another one", "Ask again")
        with contextlib.suppress(FileNotFoundError):
            said = json.loads((self._folder / f"{namespace}_{name}.status").read_text())
            if said["uid"] == uid:
                found["status"] = {**found.get("status", {}), "devices": said["devices"]}
        return found

    def report(self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]]) -> None:
        path = self._folder / f"{namespace}_{name}.status"
        path.with_suffix(".new").write_text(json.dumps({"uid": uid, "devices": devices}))
        path.with_suffix(".new").rename(path)


def _end_where_told(told: Path) -> None:
    """Make a claim's child end the service before the change that a file names, if it exists."""
    service_pid = os.getpid()
    seen = [0]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if os.getppid() != service_pid:
            return
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_CREAT | 3)
        if not (writes or event in _CHANGES) or "/dev/" in str(args[0]):
            return
        try:
            do, number = told.read_text().split()
        except FileNotFoundError:
            return
        if not f"gpuhook-{do}".startswith(Path("/proc/self/comm").read_text().strip()):
            return
        seen[0] += 1
        if seen[0] == int(number):
            os.kill(service_pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def main() -> None:
    words = json.loads(sys.argv[1])
    sys.argv[0] = words["program"]  # gpuhook looks for its other programs beside this one
    config = load(words["config"])
    choices = Choices(words["node"], drivers=words.get("drivers", {}))
    if words.get("killable"):
        _end_where_told(Path(words["claims"]) / KILL)
    for module in (service, work):
        vars(module)["TIMEOUT"] = words.get("limit", work.TIMEOUT)
    devices = DeviceRegistry(config, choices, tell, recovery=words.get("recovery", 300.0),
                      interval=words.get("interval", 0.2))  # fmt: skip
    claims = FolderClaims(Path(words["claims"]))
    sys.exit(service.run(devices, DraOptions(**words["options"]), claims, None))


if __name__ == "__main__":
    main()
