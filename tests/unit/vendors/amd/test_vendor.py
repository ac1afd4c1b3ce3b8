"""The AMD vendor, its simulator, and the doctor's findings on its driver."""

import shutil
from pathlib import Path
from typing import Any

import amd_machine
import machines
import pytest
from asking import resolved
from paper import NodesOnPaper, spec_with
from steps import resolve

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import SimulateError
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.inventory.selection import select
from gpuhook.core.plan import image
from gpuhook.core.planner import make_plan
from gpuhook.core.request.reader import Request, SpecReader
from gpuhook.tools.doctor import Case, Finding
from gpuhook.tools.doctor.finding import Status
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.vendors.amd import doctor
from gpuhook.vendors.amd import discover, names
from gpuhook.vendors.amd.vendor import GPUS, TOPOLOGY, VENDOR
from gpuhook_simulate.majors import machines_devices
from gpuhook_simulate.vendors import amd as simulate

VIDEO, RENDER = 44, 105


@pytest.fixture
def gpus(tmp_path: Path) -> Inventory:
    """Three GPUs; the second has four partitions, which share one unique id."""
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


def test_ids_of_decimal_digits_are_distinguished_from_indexes(tmp_path: Path) -> None:
    """A number with few digits is an index; one with many is an id if a device has it."""
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
def test_the_swarm_resource_variable_selects_devices(
    setting: str, value: str, devices: tuple[str, ...] | None
) -> None:
    request = read(f"S={value}", "AMD_VISIBLE_DEVICES=7", swarm_resource=setting)
    assert request.devices == devices


def test_one_swarm_variable_selects_devices_of_two_vendors(gpus: Inventory) -> None:
    """Each vendor takes the names in its own form from the one variable."""
    nvidia = machines.machine(machines.gpu(0, 3), machines.gpu(1, 0))
    spec = spec_with(f"DOCKER_RESOURCE_GPU={nvidia.gpus[1].uuid},0x84cafeae17e7620")
    config = loads('swarm-resource = "DOCKER_RESOURCE_GPU"\n')
    answer = resolve(spec, config, inventories={"nvidia": nvidia, "amd": gpus})
    assert answer is not None
    assert answer.ids == (nvidia.gpus[1].uuid, "0x84cafeae17e7620")


# What it gives -------------------------------------------------------------------------------


def test_a_device_brings_its_nodes_cgroup_rules_and_groups(gpus: Inventory) -> None:
    answer = resolved(gpus, "AMD_VISIBLE_DEVICES=2")
    plan = make_plan(answer.grants, image.unknown(), answer.groups)
    wanted = ["/dev/kfd", "/dev/dri/card9", "/dev/dri/renderD137"]
    nodes = {node.path: node.numbers for node in gpus.nodes}
    assert plan.devices == [nodes[path] for path in wanted]
    assert answer.groups.keys() == {RENDER, VIDEO}
    assert {op.kind for op in plan.operations} == {"allow-device", "device", "group"}
    assert answer.settings == []


def test_a_container_without_devices_gets_the_control_node(gpus: Inventory) -> None:
    answer = resolved(gpus, "AMD_VISIBLE_DEVICES=none")
    [grant] = answer.grants
    assert [node.path for node, _ in grant.nodes] == ["/dev/kfd"]


def test_groups_can_be_disabled_by_configuration(gpus: Inventory) -> None:
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
    shutil.copytree(root / TOPOLOGY[1:] / "nodes/2", root / TOPOLOGY[1:] / "nodes/9")


def _change_generation(root: Path) -> None:
    file = root / TOPOLOGY[1:] / "generation_id"
    file.unlink()
    file.write_text("3\n")


def _make_nodes(root: Path) -> None:
    (root / "dev/dri").mkdir(parents=True)


def _unload(root: Path) -> None:
    (root / GPUS[1:]).unlink()


def _add_partitions(root: Path) -> None:
    (root / "sys/devices/platform/amdgpu_xcp.0").mkdir()


CHANGES = [_unplug, _repartition, _change_generation, _make_nodes, _unload, _add_partitions]


@pytest.mark.parametrize("change", CHANGES)
def test_amd_driver_changes_make_a_saved_inventory_stale(tmp_path: Path, change: Any) -> None:
    root = tmp_path / "amd"
    amd_machine.simulated(root, 2)
    config = _below(root)
    cache.get_inventory(config, VENDOR)
    assert cache.saved(config, VENDOR) is not None
    (root / "sys/devices/platform/other").mkdir()
    assert cache.saved(config, VENDOR) is not None, "another driver's device is no matter"
    change(root)
    assert cache.saved(config, VENDOR) is None


# The simulator --------------------------------------------------------------------------------


REFUSED = [
    (1, {"colour": "red"}, "no setting 'colour'.*Use some of split, partitions"),
    (1, {"split": "x"}, "split='x' can't be simulated.*GPUs that are partitioned"),
    (1, {"partitions": "5"}, "partitions='5' can't be simulated.*1, 2, 3, 4, 6 or 8"),
    (1, {"partitions": ""}, "partitions=''"),
    (1, {"spelling": ""}, "spelling=''"),
    (1, {"ids": "mine"}, "ids='mine'"),
    (1, {"groups": ""}, "groups=''"),
    (65, {}, "65 AMD GPUs can't be simulated.*Give 64 or fewer"),
    (9, {"split": "0"}, "Give 8 or fewer"),
]


@pytest.mark.parametrize(("count", "settings", "sentence"), REFUSED)
def test_invalid_amd_simulator_settings_are_refused(
    tmp_path: Path, count: int, settings: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SimulateError, match=sentence):
        simulate.simulate(NodesOnPaper(str(tmp_path)), count, settings)
    assert not [*tmp_path.iterdir()]


def test_the_amd_simulator_lists_gpus_and_their_nodes(tmp_path: Path) -> None:
    made = NodesOnPaper(str(tmp_path))
    lines = simulate.simulate(made, 2, {"split": "1", "partitions": "2", "bmc": "yes"})
    assert lines == [
        "GPU 0 at 0000:05:00.0: card1, renderD128",
        "GPU 1 at 0000:08:00.0: card9, renderD136, card10, renderD137",
    ]
    assert len(made.nodes) == 2 + 2 * 16  # kfd, the controller, and all DRM devices of both GPUs


def test_simulated_nodes_avoid_major_numbers_of_real_drivers(tmp_path: Path) -> None:
    """A simulated card must not open a real device."""
    made = NodesOnPaper(str(tmp_path))
    simulate.simulate(made, 1, {})
    used = {line.split()[0] for line in machines_devices().splitlines() if line[:1] == " "}
    assert not {str(node.major) for node in made.nodes.values()} & used


def test_the_maximum_number_of_amd_gpus_is_simulated(tmp_path: Path) -> None:
    assert len(amd_machine.simulated(tmp_path / "whole", 64).devices) == 64
    every = ",".join(map(str, range(8)))
    assert len(amd_machine.simulated(tmp_path / "split", 8, split=every).devices) == 64


def test_simulated_nodes_get_the_given_group(tmp_path: Path) -> None:
    found = amd_machine.simulated(tmp_path, 1, groups="7")
    assert {node.gid for node in found.nodes} == {7}


# The doctor -----------------------------------------------------------------------------------


def examined(root: Path, config: Config | None = None) -> list[Finding]:
    return list(doctor.amd_devices(Case(Machine(str(root)), config or Config(), "/bin")))


def by_check(findings: list[Finding], status: Status) -> dict[str, str]:
    return {each.check: each.message for each in findings if each.status is status}


@pytest.fixture
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presence of all device nodes, which only root could create."""

    def looked_at(_: object, case: Case) -> Inventory:
        return amd_machine.looked_at(Path(case.machine.root))

    monkeypatch.setattr(doctor, "discovered", looked_at)


@pytest.mark.usefixtures("_nodes")
def test_a_machine_in_order_has_only_ok_findings(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 2)
    assert by_check(examined(tmp_path), Status.OK) == {
        "amd-driver": "AMD's driver 6.12.12 is loaded",
        "amd-devices": "Containers can have 2 AMD GPUs and partitions",
    }
    assert len(examined(tmp_path)) == 2


def test_a_machine_without_amd_gpus_has_no_findings(tmp_path: Path) -> None:
    assert examined(tmp_path) == []
    for name, vendor, sort in (("0000:01:00.0", "0x10de", "0x030200"), ("x", "0x1002", "0x060400")):
        amd_machine.write(tmp_path / f"sys/bus/pci/devices/{name}/vendor", vendor)
        amd_machine.write(tmp_path / f"sys/bus/pci/devices/{name}/class", sort)
    assert examined(tmp_path) == []


@pytest.mark.parametrize("sort", ["0x030000", "0x038000", "0x120000"])
def test_a_gpu_without_a_driver_is_a_failure(tmp_path: Path, sort: str) -> None:
    amd_machine.write(tmp_path / "sys/bus/pci/devices/0000:05:00.0/vendor", "0x1002")
    amd_machine.write(tmp_path / "sys/bus/pci/devices/0000:05:00.0/class", sort)
    [found] = examined(tmp_path)
    assert (found.check, found.status) == ("amd-driver", Status.FAILURE)
    assert "amdgpu isn't loaded" in found.message


def test_missing_nodes_are_a_failure(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 1)
    found = by_check(examined(tmp_path), Status.FAILURE)
    assert "no node /dev/kfd, /dev/dri/card0, /dev/dri/renderD128" in found["amd-nodes"]


@pytest.mark.usefixtures("_nodes")
def test_gpus_unknown_to_kfd_cause_a_warning(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 3, unknown="0,2")
    found = by_check(examined(tmp_path), Status.WARNING)
    assert "doesn't know the GPU at 0000:05:00.0, 0000:0b:00.0" in found["amd-devices"]


@pytest.mark.usefixtures("_nodes")
def test_node_groups_not_added_to_containers_cause_a_warning(tmp_path: Path) -> None:
    amd_machine.simulated(tmp_path, 1)
    config = loads("[features]\nno-additional-gids-for-device-nodes = true\n")
    found = by_check(examined(tmp_path, config), Status.WARNING)
    assert "belong to the groups 105, and no container's process" in found["amd-groups"]


def test_an_unusable_device_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd_machine.simulated(tmp_path, 1)
    seen = discover.discover(str(tmp_path))
    seen.devices[0].state = "its node is another's"
    facts = (seen.vendor, seen.root, seen.version, seen.devices)
    monkeypatch.setattr(doctor, "discovered", lambda *_: Inventory(*facts, ()))
    found = by_check(examined(tmp_path), Status.WARNING)
    assert found["amd-devices"].endswith("(0x84cafeae17e7600) can't be used: its node is another's")
