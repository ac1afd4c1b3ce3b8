"""Which pods' containers are which: device ids of plugins, and devices that are shared."""

from dataclasses import replace
from typing import Any

import pytest

from gpuhook.start.inventory.model import Device, Inventory
from gpuhook.tools.metrics import pods
from gpuhook.tools.metrics.model import Container
from gpuhook.tools.metrics.pods import Pod

GPU_0, GPU_1, PART_0, PART_1 = "GPU-aa-0", "GPU-aa-1", "MIG-bb-0", "MIG-bb-1"
NVIDIA = Inventory(
    "nvidia", "/", "1",
    (
        Device(GPU_0, "0", {"index": ("0",), "uuid": (GPU_0,)}, ("/dev/nvidia3",)),
        Device(GPU_1, "1", {"index": ("1",), "uuid": (GPU_1,)}, ("/dev/nvidia4",)),
        Device(PART_0, "1:0", {"mig": ("1:0",), "uuid": (PART_0,)}, parent=GPU_1),
        Device(PART_1, "1:1", {"mig": ("1:1",), "uuid": (PART_1,)}, parent=GPU_1),
    ), (),
)  # fmt: skip
AMD = Inventory("amd", "/", "1", (Device("0000:03:00.0", "0", {"index": ("0",)}),), ())
FACTS: dict[str, dict[str, Any]] = {
    GPU_0: {"minor": 3}, GPU_1: {"minor": 4},
    PART_0: {"minor": 4, "gpu_instance": 7}, PART_1: {"minor": 4, "gpu_instance": 9},
}  # fmt: skip
FOUND = [("nvidia.com/gpu", NVIDIA, FACTS), ("amd.com/gpu", AMD, {})]
POD = Container("c1", "kubernetes", pod_uid="uid", devices=(GPU_0,))


@pytest.mark.parametrize(
    ("resource", "device", "expected"),
    [
        ("nvidia.com/gpu", GPU_0, {GPU_0}),
        ("nvidia.com/gpu.shared", f"{GPU_0}::3", {GPU_0}),
        ("nvidia.com/gpu", "1", {GPU_1}),
        ("amd.com/gpu", "0", {"0000:03:00.0"}),
        ("amd.com/gpu", "0000:03:00.0", {"0000:03:00.0"}),
        ("nvidia.com/mig-1g.10gb", PART_0, {PART_0}),
        ("nvidia.com/mig-1g.10gb", "1:1", {PART_1}),
        ("nvidia.com/mig-1g.10gb", f"MIG-{GPU_1}/9/0", {PART_1}),
        ("nvidia.com/gpu", "nvidia3", {GPU_0}),
        ("nvidia.com/gpu", "nvidia4/gi7", {PART_0}),
        ("nvidia.com/gpu", "nvidia3/vgpu1", {GPU_0}),
        ("nvidia.com/gpu", "GPU-other", set()),
        ("other.example/gpu", GPU_0, set()),
        ("notnvidia.com/gpu", GPU_0, set()),
    ],
)
def test_what_an_id_means(resource: str, device: str, expected: set[str]) -> None:
    found = pods.read([["space", "pod", "web", [[resource, device]]]], FOUND)
    assert {name for each in found for name in each.devices} == expected


def pod(name: str, *devices: str) -> Pod:
    return Pod("space", name, "web", frozenset(devices))


def test_the_only_one_with_its_devices() -> None:
    other = Container("c2", "docker", devices=(GPU_0,))
    found = pods.name([POD, other], [pod("a", GPU_0)])
    named = replace(POD, pod="a", namespace="space", container="web")
    assert {each.id: each for each in found} == {"c1": named, "c2": other}


def test_one_that_our_records_know() -> None:
    known = replace(POD, pod="a", namespace="space", container="web")
    assert pods.name([known], [pod("a", GPU_0)]) == [known]


def test_devices_that_are_shared() -> None:
    two = [POD, replace(POD, id="c2")]
    found = pods.name(two, [pod("a", GPU_0), pod("b", GPU_0)])
    assert {(each.id, each.pod, each.devices) for each in found} == {
        ("c1", "", ()), ("c2", "", ()), ("", "a", (GPU_0,)), ("", "b", (GPU_0,)),
    }  # fmt: skip


def test_one_that_nobody_found() -> None:
    [found] = pods.name([], [pod("a", GPU_1, GPU_0)])
    expected = Container("", "kubernetes", "", "a", "space", "web", devices=(GPU_0, GPU_1))
    assert found == expected
