"""AMD by the contract: requests, what they give, what makes a saved inventory stale."""

import shutil
from pathlib import Path
from typing import Any

import amd_machine
import machines
import pytest
from asking import resolved
from paper import spec_with
from steps import resolve

from gpuhook.ground.config.loader import loads
from gpuhook.ground.config.model import Config
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.model import Inventory
from gpuhook.start.inventory.selection import select
from gpuhook.start.plan import image
from gpuhook.start.planner import make_plan
from gpuhook.start.request.reader import Request, SpecReader
from gpuhook.vendors.amd import names, paths
from gpuhook.vendors.amd.vendor import VENDOR

VIDEO, RENDER = 44, 105


@pytest.fixture
def gpus(tmp_path: Path) -> Inventory:
    """A whole GPU, one in four partitions with one unique id, another whole one."""
    settings = {"split": "1", "partitions": "4", "ids": "shared"}
    return amd_machine.simulated(tmp_path / "amd", 3, **settings)


def selected(found: Inventory, *words: str) -> list[str]:
    [spaces] = names.VARIABLES.values()
    return [device.label for device in select(words, found, names, spaces)]


def _with_ids(root: Path, *ids: int) -> Inventory:
    gpus = {f"0000:{5 + at:02x}:00.0": [f"renderD{128 + at}"] for at in range(len(ids))}
    nodes = {
        str(at): {"drm_render_minor": 128 + at, "unique_id": number}
        for at, number in enumerate(ids)
    }
    amd_machine.fabricate(root, gpus, {}, nodes)
    return amd_machine.looked_at(root)


def test_ids_of_decimal_digits(tmp_path: Path) -> None:
    """A number of a few digits is an index, one of many an id where there is such an id."""
    found = _with_ids(tmp_path, 0x100000000, 0x1)
    assert selected(found, "1") == ["1"]
    assert selected(found, "0x1") == ["1"]
    assert selected(found, "100000000") == ["0"]
    assert selected(found, "000000001") == ["1"]


def read(*env: str, **settings: Any) -> Request:
    config = Config()
    for name, value in settings.items():
        setattr(config, name, value)
    return SpecReader(spec_with(*env), config).read(names, VENDOR)


@pytest.mark.parametrize(
    ("setting", "value", "devices"),
    [
        ("S", "0xAB,0xcd", ("0xAB", "0xcd")),
        ("S", "GPU-1,0xcd", ("0xcd",)),
        ("S", "1", ("7",)),
        ("S", "", ("7",)),
        ("amd=S", "1", ("1",)),
        ("amd=S", "", None),
        ("nvidia=S", "0xcd", ("7",)),
    ],
)
def test_a_swarms_variable(setting: str, value: str, devices: tuple[str, ...] | None) -> None:
    request = read(f"S={value}", "AMD_VISIBLE_DEVICES=7", swarm_resource=setting)
    assert request.devices == devices


def test_a_swarm_with_two_vendors(gpus: Inventory) -> None:
    """One name for the GPUs of both: each vendor takes the names of its form."""
    nvidia = machines.machine(machines.gpu(0, 3), machines.gpu(1, 0))
    spec = spec_with(f"DOCKER_RESOURCE_GPU={nvidia.gpus[1].uuid},0x84cafeae17e7620")
    config = loads('swarm-resource = "DOCKER_RESOURCE_GPU"\n')
    answer = resolve(spec, config, inventories={"nvidia": nvidia, "amd": gpus})
    assert answer is not None
    assert answer.ids == (nvidia.gpus[1].uuid, "0x84cafeae17e7620")


# What it gives -------------------------------------------------------------------------------


def test_nodes_rules_and_groups(gpus: Inventory) -> None:
    answer = resolved(gpus, "AMD_VISIBLE_DEVICES=2")
    plan = make_plan(answer.grants, image.unknown(), answer.groups)
    wanted = ["/dev/kfd", "/dev/dri/card9", "/dev/dri/renderD137"]
    nodes = {node.path: node.numbers for node in gpus.nodes}
    assert plan.devices == [nodes[path] for path in wanted]
    assert answer.groups.keys() == {RENDER, VIDEO}
    assert {op.kind for op in plan.operations} == {"allow-device", "device", "group"}
    assert answer.settings == []


def test_a_container_without_a_device_has_the_control_node(gpus: Inventory) -> None:
    answer = resolved(gpus, "AMD_VISIBLE_DEVICES=none")
    [grant] = answer.grants
    assert [node.path for node, _ in grant.nodes] == ["/dev/kfd"]


def test_groups_may_be_switched_off(gpus: Inventory) -> None:
    config = loads("[features]\nno-additional-gids-for-device-nodes = true\n")
    assert resolved(gpus, "AMD_VISIBLE_DEVICES=0", config=config).groups == {}


# What is saved -------------------------------------------------------------------------------


def _below(root: Path) -> Config:
    config = Config()
    config.driver_roots = (f"amd={root}",)
    config.state_dir = f"{root}-state"
    return config


def _unplug(root: Path) -> None:
    (root / "sys/bus/pci/drivers/amdgpu/0000:08:00.0").unlink()


def _repartition(root: Path) -> None:
    shutil.copytree(root / paths.TOPOLOGY[1:] / "nodes/2", root / paths.TOPOLOGY[1:] / "nodes/9")


def _change_generation(root: Path) -> None:
    file = root / paths.TOPOLOGY[1:] / "generation_id"
    file.unlink()
    file.write_text("3\n")


def _make_nodes(root: Path) -> None:
    (root / "dev/dri").mkdir(parents=True)


def _unload(root: Path) -> None:
    (root / paths.GPUS[1:]).unlink()


def _add_partitions(root: Path) -> None:
    (root / "sys/devices/platform/amdgpu_xcp.0").mkdir()


CHANGES = [_unplug, _repartition, _change_generation, _make_nodes, _unload, _add_partitions]


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_a_saved_inventory_stale(tmp_path: Path, change: Any) -> None:
    root = tmp_path / "amd"
    amd_machine.simulated(root, 2)
    config = _below(root)
    cache.get_inventory(config, VENDOR)
    assert cache.saved(config, VENDOR) is not None
    (root / "sys/devices/platform/other").mkdir()
    assert cache.saved(config, VENDOR) is not None, "another driver's device is no matter"
    change(root)
    assert cache.saved(config, VENDOR) is None
