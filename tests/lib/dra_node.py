"""A node that publishes to the tests' API server, with a clock that a test moves."""

import random
import time
from collections.abc import Callable
from typing import Any

from api_server import TOKEN, ApiServer

from gpuhook.cluster.dra.access import Access
from gpuhook.cluster.dra.api_client import ApiClient
from gpuhook.cluster.dra.slice_reconciler import APART, TOGETHER, SliceReconciler

Object = dict[str, Any]

DRIVER = "gpu.example.com"


def device(name: str, taint: str = "", **more: Any) -> Object:
    """Return a device as it is in slices; ``taint`` is key=value:effect without the domain."""
    made: Object = {"name": name, "attributes": {"type": {"string": "gpu"}}, **more}
    made["capacity"] = {"memory": {"value": "80Gi"}, "cores": {"value": "132000"}}
    if taint:
        key, _, rest = taint.partition("=")
        value, _, effect = rest.partition(":")
        kept = {"key": f"{DRIVER}/{key}", "effect": effect or "NoSchedule"}
        made["taints"] = [{**kept, "value": value} if value else kept]
    return made


def slices(
    *contents: list[Object], node: str = "n1", driver: str = DRIVER, **spec: Any
) -> list[Object]:
    """Return the slices of a node, each with one list of devices."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": len(contents)}
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{number:05x}-{driver}-{node}"},
            "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": devices, **spec},
        }
        for number, devices in enumerate(contents)
    ]


def counted(name: str, gpu: str, count: int) -> Object:
    """Return a device that uses ``count`` slices of a GPU."""
    uses = {"counterSet": gpu, "counters": {"slices": {"value": str(count)}}}
    return device(name, consumesCounters=[uses])


def counters(*gpus: str, node: str = "n1") -> Object:
    """Return a ResourceSlice that has only counters: seven slices for each GPU."""
    sets = [{"name": gpu, "counters": {"slices": {"value": "7"}}} for gpu in gpus]
    [made] = slices([], node=node)
    made["spec"]["sharedCounters"] = sets
    del made["spec"]["devices"]
    return made


class Node:
    """A SliceReconciler and its loop; ``said`` are its messages, ``now`` is its time."""

    def __init__(self, api: ApiServer, name: str = "n1", token: str = TOKEN) -> None:
        self.api = api
        self.name = name
        self.said: list[str] = []
        self.now = 10_000.0
        access = Access(api.url, (api.folder / "ca.crt").read_bytes(), token=token.encode())
        self.client = ApiClient(access)
        rng = random.Random(name)  # noqa: S311 - the same each time
        self.keeper = SliceReconciler(self.client, name, self.said.append, lambda: self.now, rng)

    def want(self, *given: list[Object] | Object, drivers: tuple[str, ...] = ()) -> None:
        """Make the node publish slices, with counters in separate slices or with the devices."""
        flat = [each for one in given for each in (one if isinstance(one, list) else [one])]
        for each in flat:
            each["spec"]["pool"]["resourceSliceCount"] = len(flat)
        self.keeper.want({APART: flat, TOGETHER: flat}, drivers)

    def run(self, until: Callable[[], object], seconds: float = 0.0) -> None:
        """Run the node until a condition holds, while its clock advances by ``seconds`` in all."""
        stop, end = time.monotonic() + 60, self.now + seconds
        while True:
            self.keeper.tend()
            watch = self.keeper.watch()
            if watch is not None and watch.wait(0.0 if until() else 0.02):
                continue
            if until():
                return
            due = self.keeper.deadline()
            self.now = max(self.now, min(end, due if due is not None else end))
            assert time.monotonic() < stop, f"{self.said} {self.api.asked[-12:]}"

    def rest(self, seconds: float = 0.0) -> None:
        """Run the node for ``seconds`` of its clock, and until no work is due by then."""
        end = self.now + seconds
        while True:
            self.keeper.tend()
            watch = self.keeper.watch()
            if watch is not None and watch.wait(0.02):
                continue
            due = self.keeper.deadline()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
        self.now = end

    def writes(self) -> int:
        """Return the number of requests that write slices."""
        return sum(self.api.count(method, "resourceslices") for method in ("POST", "PUT", "DELETE"))

    def names(self) -> list[str]:
        """Return the names of the published devices, in their order."""
        found = self.api.slices(self.name)
        return [each["name"] for one in found for each in one["spec"].get("devices", [])]

    def taints(self) -> list[tuple[str, str]]:
        """Return (device, key of the taint) for each taint of the published devices."""
        found = self.api.slices(self.name)
        devices = [each for one in found for each in one["spec"].get("devices", [])]
        return [
            (each["name"], taint["key"]) for each in devices for taint in each.get("taints", [])
        ]
