"""NUMA nodes of devices, on hosts whose firmware divides sockets into several nodes."""

from pathlib import Path
from typing import Any

import machines
import paper
import pytest
from dra_reader import check

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.dra import slices as dra
from gpuhook.cluster.dra.slices import Choices, objects
from gpuhook.cluster.vendors.slices import PublishedDevice
from gpuhook.core import contract
from gpuhook.monitor.vendors import pci
from gpuhook.vendors import registry

NUMA = "resource.kubernetes.io/numaNode"
# Two sockets of two NUMA nodes each, and a node that has memory but no processor.
DISTANCES = ["10 12 32 32 40", "12 10 32 32 40", "32 32 10 12 40", "32 32 12 10 40", ""]
PROCESSORS = ["0-1,8", "2-3", "4", "6-7", ""]
SOCKETS = {0: 0, 2: 0, 4: 1, 6: 1}


def host(
    root: Path, distances: list[str], processors: list[str], sockets: dict[int, int] = SOCKETS
) -> None:
    for node, (near, cpus) in enumerate(zip(distances, processors, strict=True)):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "distance").write_text(f"{near}\n")
        (folder / "cpulist").write_text(f"{cpus}\n")
    for cpu, socket in sockets.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")


def device(root: Path, numa: str, bus_id: str = "0000:03:00.0") -> str:
    folder = root / "sys/bus/pci/devices" / bus_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    return bus_id


def nodes(root: Path, numa: str) -> tuple[int, ...]:
    bus_id = device(root, numa)
    with Rootfs(str(root)) as opened:
        return pci.numa_nodes(opened, bus_id)


def test_numa_nodes_of_one_socket_are_near(tmp_path: Path) -> None:
    host(tmp_path, DISTANCES, PROCESSORS)
    assert nodes(tmp_path, "0") == (0, 1)
    assert nodes(tmp_path, "3") == (3, 2)
    assert nodes(tmp_path, "-1") == ()
    assert nodes(tmp_path, "4") == (4,), "its distances are unknown"
    assert nodes(tmp_path, "9") == (9,)


def test_numa_nodes_of_different_sockets_are_not_near(tmp_path: Path) -> None:
    """The nearest other node belongs to another socket, so it doesn't count as near."""
    host(tmp_path, ["10 21", "21 10"], ["0-3", "4-7"], {0: 0, 4: 1})
    assert nodes(tmp_path, "0") == (0,)
    assert nodes(tmp_path, "1") == (1,)


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        (["10"], (0,)),
        (["10 12 12 20", "", "", ""], (0, 1, 2)),
        (["10 x 12 20", "", "", ""], (0,)),
        (["10 -1 12 20", "", "", ""], (0,)),
    ],
)
def test_incomplete_numa_distances_give_only_known_nodes(
    tmp_path: Path, distances: list[str], expected: tuple[int, ...]
) -> None:
    host(tmp_path, distances, [""] * len(distances), {})
    assert nodes(tmp_path, "0") == expected


def attributes(root: Path, *, lists: bool) -> list[Any]:
    inventory = paper.machine("amd", root, 2)
    for one, numa in zip(inventory.devices, ("3", "-1"), strict=True):
        device(root, numa, one.bus_id)
    vendor = contract.load(registry.BUILT_IN["amd"])
    made, _ = objects([(vendor, inventory)], Choices("n1", lists=lists), Config())
    if not lists:
        check(made)
    every = [each["spec"].get("devices", []) for each in made if each["kind"] == "ResourceSlice"]
    return [one["attributes"].get(NUMA) for found in every for one in found]


def test_numa_lists_are_published_only_where_accepted(tmp_path: Path) -> None:
    host(tmp_path, DISTANCES, PROCESSORS)
    assert attributes(tmp_path / "a", lists=False) == [{"int": 3}, None]
    assert attributes(tmp_path / "a", lists=True) == [{"int": 3}, None], "no other node is known"
    host(tmp_path / "a", DISTANCES, PROCESSORS)
    assert attributes(tmp_path / "a", lists=False) == [{"int": 3}, None]
    assert attributes(tmp_path / "a", lists=True) == [{"ints": [3, 2]}, None]


def test_slices_with_lists_have_fewer_devices() -> None:
    """The API server accepts 64 devices in a slice with a list, and 128 otherwise."""
    vendor = contract.load(registry.BUILT_IN["nvidia"])
    found = {f"gpu-{at}": PublishedDevice(f"gpu-{at}", "", {}) for at in range(100)}
    for value, sizes in ((3, [100]), ((3, 2), [64, 36])):
        driver = dra.SliceDriver("gpu.nvidia.com", dict(found))
        for name in found:
            driver.vendors[name] = vendor, machines.machine()
            driver.places[name] = {NUMA: value}
        made = dra.rendered({driver.name: driver}, Choices("n1", lists=True))
        assert [len(each["spec"]["devices"]) for each in made] == sizes


def test_a_numa_list_has_at_most_16_nodes(tmp_path: Path) -> None:
    """A device may have 48 values in all, and 31 of them may be other attributes."""
    host(tmp_path, [" ".join(["10", *["12"] * 63]), *[""] * 63], [""] * 64, {})
    with Rootfs(str(tmp_path)) as root:
        place = dra._place(root, device(tmp_path, "0"), lists=True)
    assert place[NUMA] == tuple(range(16))
