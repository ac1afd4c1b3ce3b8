"""node-generic-resources: one entry for each device, and what others wrote stays."""

import pytest

from gpuhook.ground.errors import EngineError
from gpuhook.tools.engines.ask import Ask
from gpuhook.tools.engines.docker import wanted_document
from gpuhook.tools.engines.swarm import KEY, Node, Resource

ONE, TWO = (Resource("nvidia", "NVIDIA-GPU", f"GPU-{name}") for name in ("1111", "2222"))
PART = Resource("nvidia", "NVIDIA-MIG", "MIG-3333")
AMD = Resource("amd", "AMD-GPU", "0xab12")


@pytest.mark.parametrize(
    ("entries", "devices", "expected"),
    [
        ([], [ONE, TWO], ["NVIDIA-GPU=GPU-1111", "NVIDIA-GPU=GPU-2222"]),
        ([], [PART, AMD], ["NVIDIA-MIG=MIG-3333", "AMD-GPU=0xab12"]),
        # What somebody else says stays, counts among it.
        (["SSD=fast", "RAM=4"], [ONE], ["SSD=fast", "RAM=4", "NVIDIA-GPU=GPU-1111"]),
        (["NVIDIA-GPU=2"], [ONE], ["NVIDIA-GPU=2", "NVIDIA-GPU=GPU-1111"]),
        # A device that has an entry keeps it and its kind, which others of its sort take over.
        (["AMD_GPU=0xab12"], [ONE, AMD], ["AMD_GPU=0xab12", "NVIDIA-GPU=GPU-1111"]),
        (["gpu=GPU-2222"], [ONE, TWO], ["gpu=GPU-2222", "gpu=GPU-1111"]),
        (["big=GPU-1111", "small=GPU-2222"], [ONE, TWO], ["big=GPU-1111", "small=GPU-2222"]),
        (["gpu=gpu-1"], [ONE, TWO], ["gpu=gpu-1", "gpu=GPU-2222"]),
        # What begins several names means none, and is none of ours to judge.
        (["gpu=GPU-"], [ONE, TWO], ["gpu=GPU-", "NVIDIA-GPU=GPU-1111", "NVIDIA-GPU=GPU-2222"]),
        # Devices that aren't here any more go, and nothing is said twice.
        (["NVIDIA-GPU=GPU-9", "NVIDIA-GPU=GPU-1111"], [ONE], ["NVIDIA-GPU=GPU-1111"]),
        (["gpu=GPU-9", "gpu=GPU-1111"], [ONE], ["gpu=GPU-1111"]),
        (["gpu=GPU-1111", "gpu=GPU-1111"], [ONE], ["gpu=GPU-1111"]),
    ],
)
def test_entries(entries: list[str], devices: list[Resource], expected: list[str]) -> None:
    assert Node(entries, devices).merged() == expected
    assert Node(expected, devices).merged() == expected


def test_variables_are_those_of_the_entries() -> None:
    node = Node(["gpu=GPU-1111", "gpu=0xab12", "NVIDIA-MIG=MIG-3333", "SSD=x"], [ONE, PART, AMD])
    assert node.variables() == {
        "DOCKER_RESOURCE_GPU": ["nvidia", "amd"],
        "DOCKER_RESOURCE_NVIDIA-MIG": ["nvidia"],
    }


def test_docker_is_told_the_default_runtime_too() -> None:
    """A service can't choose its runtime."""
    ask = Ask((("gpu-py", "/x"),), swarm=(ONE,))
    wanted = wanted_document({"labels": ["a=b"]}, ask, "/d.json")
    assert wanted[KEY] == ["NVIDIA-GPU=GPU-1111"]
    assert wanted["default-runtime"] == "gpu-py"
    assert KEY not in wanted_document({}, Ask((("gpu-py", "/x"),)), "/d.json")


@pytest.mark.parametrize("value", ["gpu=GPU-1", [1], {"gpu": "GPU-1"}])
def test_what_is_no_list_of_entries_is_refused(value: object) -> None:
    with pytest.raises(EngineError, match=f'"{KEY}" in /d.json isn.t a list'):
        wanted_document({KEY: value}, Ask((("gpu-py", "/x"),), swarm=(ONE,)), "/d.json")
