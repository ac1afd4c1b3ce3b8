"""Many nodes that publish to one API server: the number of requests, with a simulated clock.

The test has 20 nodes. The numbers in docs/engineering/measurements.md come from `NODES=1000
./scripts/test integration -n0 -s tests/integration/test_dra_scale.py`.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer, serving
from dra_node import Node, device, slices
from dra_reader import check

COUNT = int(os.environ.get("NODES", "20"))
GPUS = 8
HOURS = 2


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 6 * COUNT + 1024), hard))
    with serving(tmp_path) as made:
        yield made
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wanted(node: Node, taint: str = "") -> None:
    devices = [device(f"gpu-{number}", taint if not number else "") for number in range(GPUS)]
    node.want(slices(devices, node=node.name))


def go_on(api: ApiServer, nodes: list[Node], minutes: int) -> None:
    """Advance the nodes' clocks and the server's by minutes.

    After each minute the server sends an event to every watch, or ends it. On a busy host, a
    node that hasn't received it yet would assume after a few minutes that the server is
    silent.
    """
    for _ in range(minutes):
        api.pass_time(60)
        for node in nodes:
            node.now += 60
            watch = node.keeper.watch()
            assert watch is None or watch.wait(60)
            node.keeper.tend()


def settle(nodes: list[Node]) -> None:
    for node in nodes:
        node.rest(0)


def requests(api: ApiServer) -> tuple[float, float]:
    """Return the numbers of requests and writes for each node, and reset the counts."""
    writes = sum(api.count(method) for method in ("POST", "PUT", "DELETE"))
    made = len(api.asked) / COUNT, writes / COUNT
    api.asked.clear()
    return made


def test_many_nodes_make_few_requests_to_the_api_server(api: ApiServer) -> None:
    nodes = [Node(api, f"n{number}") for number in range(COUNT)]
    for node in nodes:
        api.add("nodes", node.name, {})
    began = time.monotonic()
    for node in nodes:
        wanted(node)
        node.keeper.tend()
    settle(nodes)
    start = requests(api)
    assert start == (6, 1)  # requests: versions twice, the node, a list, a watch, and the slice
    took = time.monotonic() - began
    go_on(api, nodes, 60 * HOURS)
    settle(nodes)
    rest = requests(api)
    assert rest[1] == 0
    assert rest[0] <= 2 * HOURS
    for node in nodes:
        wanted(node, "xid=79")
        node.keeper.tend()
    assert all(node.taints() for node in nodes)  # at once, whatever the other nodes do
    go_on(api, nodes, 5)
    for node in nodes:
        wanted(node)
        node.keeper.tend()
    settle(nodes)
    assert not any(node.taints() for node in nodes)
    xid = requests(api)
    assert xid[1] == 2
    assert xid[0] <= 3
    assert not any(node.said for node in nodes)
    found = api.slices()
    assert len(found) == COUNT
    for each in found[:: max(1, COUNT // 10)]:
        del each["metadata"]["resourceVersion"]
        check([each])
    for node in nodes:
        node.keeper.close()
    sys.stdout.write(
        f"{COUNT} nodes: start {start[0]} requests a node in {took:.0f} s together;\n"
        f"an hour at rest {rest[0] / HOURS:.2f} requests, {rest[1] / HOURS:.0f} writes;\n"
        f"an XID that comes and goes {xid[0]:.2f} requests, {xid[1]:.0f} writes\n"
    )
