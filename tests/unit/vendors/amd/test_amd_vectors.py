"""Shared cases about AMD: behaviour of AMD's toolkit, and gpuhook's differences from it."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import amd_machine
import pytest
from steps import resolve

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import CdiError, DriverError, GpuhookError, HeldError
from gpuhook.base.names import CREATING_VERBS
from gpuhook.base.oci.runtime_argv import Arguments
from gpuhook.core.cdi.apply import merge
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.core.inventory.selection import select
from gpuhook.core.plan import image
from gpuhook.core.plan.operations import AllowDevice, BindDevice
from gpuhook.core.planner import make_plan
from gpuhook.core.records import leases
from gpuhook.core.resolve import Allocation
from gpuhook.tools.cdi.write import write
from gpuhook.vendors.amd import names
from gpuhook.vendors.amd.discover import (
    RenderDevice,
    bus_id,
    kfd_devices,
    parse_properties,
    partition_type,
)
from gpuhook.vendors.amd.vendor import VENDOR

REFUSED = None
# Name of the case -> what gpuhook allocates instead. Reasons: docs/engineering/differences.md.
DIFFERENCES: dict[str, list[int] | None] = {
    # A request is refused if any part of it doesn't exist.
    "unknown id gives nothing": REFUSED,
    "index beyond the last is dropped": REFUSED,
    "backwards range": REFUSED,
    "range that starts inside and ends outside": REFUSED,
    "three-part range": REFUSED,
    "value with = keeps its rest": REFUSED,
    # Words and lists have the same syntax for every vendor.
    "other spellings of all are names": [0, 1],
    "blank before a number": [0, 1],
    "same index twice": [0],
    # A number is taken as an id only if a device has that id.
    "nine digits are an id, not an index": [1],
    # The variable of a Docker swarm decides, whatever the order of the variables.
    "last matching variable decides, other order": [1],
}
VERSION, ACCESS = "0.7.0", "rw"  # version of CDI specs with groups; permissions that suffice

Case = dict[str, Any]


def machine(root: Path, count: int, unique_ids: dict[str, list[int]] | None = None) -> Inventory:
    """Return the inventory of a machine whose devices have these unique ids."""
    ids = {at: int(text, 16) for text, places in (unique_ids or {}).items() for at in places}
    gpus, nodes = {}, {}
    for at in range(count):
        gpus[f"0000:{5 + at:02x}:00.0"] = [f"card{at}", f"renderD{128 + at}"]
        place = {"location_id": (5 + at) << 8, "domain": 0, "unique_id": ids.get(at, 0)}
        nodes[str(2 + at)] = {"drm_render_minor": 128 + at, **place}
    amd_machine.fabricate(root, gpus, {}, nodes)
    return amd_machine.looked_at(root)


def fabricated(root: Path, given: Case) -> Inventory:
    gpus, partitions = given.get("pci:amdgpu", {}), given.get("platform", {})
    amd_machine.fabricate(root, gpus, partitions, given.get("kfd_nodes", {}))
    return amd_machine.looked_at(root)


def resolved(
    found: Inventory | None, *env: str, swarm: str = "", root: str = ""
) -> Allocation | None:
    config = loads(f'swarm-resource = "{swarm}"\n[gpuhook]\nstate-dir = "{root}/state"\n')
    config.driver_roots = (f"amd={root}",)
    spec = {"process": {"env": list(env)}, "linux": {"namespaces": [{"type": "mount"}]}}
    return resolve(spec, config, save=False, inventories={"amd": found} if found else {})


def labels(answer: Allocation | None) -> list[int]:
    grants = answer.grants if answer else []
    return sorted(int(device.label) for grant in grants for device in grant.devices)


@pytest.mark.vectors("vendor_amd", "amd.request", "amd.request_docs")
def test_requests_select_the_expected_devices(case: Case, tmp_path: Path) -> None:
    """AMD's program only warns about unknown names. The order of the devices has no effect."""
    given = case["input"]
    found = machine(tmp_path, given["gpus"], given.get("unique_ids"))
    swarm = ", ".join(
        f"amd={entry.partition('=')[0]}" for entry in given["env"] if "DOCKER_RESOURCE" in entry
    )
    expected = DIFFERENCES.get(case["name"], case["expected"]["devices"])
    if expected is REFUSED:
        with pytest.raises(GpuhookError, match=r"has no AMD GPU|, and this host has 2\."):
            resolved(found, *given["env"], swarm=swarm)
    else:
        assert labels(resolved(found, *given["env"], swarm=swarm)) == expected


@pytest.mark.vectors("vendor_amd", "amd.request.no_driver")
def test_requests_without_a_driver_match_the_vectors(case: Case, tmp_path: Path) -> None:
    if case["expected"].get("error"):
        with pytest.raises(DriverError, match="amdgpu isn't loaded"):
            resolved(None, *case["input"]["env"], root=str(tmp_path))
    else:
        answer = resolved(None, *case["input"]["env"], root=str(tmp_path))
        assert labels(answer) == case["expected"]["devices"]


@pytest.mark.vectors("vendor_amd", "amd.inject")
def test_a_container_gets_the_nodes_of_its_amd_gpus(case: Case, tmp_path: Path) -> None:
    given, expected = case["input"], case["expected"]
    count = len(given["inventory"])
    found = machine(tmp_path, count)
    assert [list(device.nodes) for device in found.devices] == given["inventory"]
    asked = ",".join(map(str, given["devices"]))
    answer = resolved(found, f"AMD_VISIBLE_DEVICES={asked}")
    assert answer is not None
    plan = make_plan(answer.grants, image.unknown(), answer.groups)
    nodes = [op.destination for op in plan.operations if isinstance(op, BindDevice)]
    assert sorted(nodes) == sorted(expected["nodes"])
    assert {op.kind for op in plan.operations} == {"allow-device", "device", "group"}
    assert answer.settings == expected.get("environment", [])
    assert AllowDevice.access == ACCESS
    assert set(ACCESS) < set(expected.get("access", "rwm"))


@pytest.mark.vectors("vendor_amd", "amd.discovery")
def test_discovery_matches_the_vectors(case: Case, tmp_path: Path) -> None:
    given, expected = case["input"], case["expected"]
    if given.get("module_loaded") is False:
        with pytest.raises(DriverError):
            VENDOR.discover(_config_for(tmp_path))
    elif "partitions_found" in expected:
        # AMD's program searches only for the other spelling; in gpuhook, KFD's data decide.
        assert len(fabricated(tmp_path, given).devices) == expected["partitions_found"]
        amd_machine.kfd_node(tmp_path, 1, {"drm_render_minor": 129, "location_id": 1281})
        assert len(amd_machine.looked_at(tmp_path).devices) == len(given["platform"])
    else:
        found = fabricated(tmp_path, given)
        assert [list(device.nodes) for device in found.devices] == expected["devices"]
        with Rootfs(str(tmp_path)) as root:
            folders = [
                f"/sys/module/amdgpu/drivers/pci:amdgpu/{bdf}" for bdf in given["pci:amdgpu"]
            ]
            types = [partition_type(root, folder) for folder in folders]
        assert types == expected.get("partition_types", types)


def _config_for(root: Path) -> Config:
    config = Config()
    config.driver_roots = (f"amd={root}",)
    return config


def by_id(found: Inventory, text: str) -> list[int]:
    return [int(device.label) for device in select([text], found, names, ("id",))]


@pytest.mark.vectors("vendor_amd", "amd.unique_ids")
def test_unique_ids_select_the_expected_devices(case: Case, tmp_path: Path) -> None:
    nodes = case["input"]["kfd_nodes"]
    gpus = {
        f"0000:{at + 1:02x}:00.0": [f"renderD{node['drm_render_minor']}"]
        for at, node in enumerate(nodes.values())
    }
    found = fabricated(tmp_path, {"pci:amdgpu": gpus, "kfd_nodes": nodes})
    indexes = case["expected"]["indexes"]
    assert {text: by_id(found, text) for text in indexes} == indexes


def _with_colons(address: str) -> str:
    """Return an address as AMD's program writes it."""
    return address.replace(".", ":")


@pytest.mark.vectors("vendor_amd", "amd.bus_ids")
def test_bus_ids_of_kfd_nodes_match_the_vectors(case: Case, tmp_path: Path) -> None:
    for number, node in case["input"]["kfd_nodes"].items():
        amd_machine.kfd_node(tmp_path, number, node)
    with Rootfs(str(tmp_path)) as root:
        found = kfd_devices(root)
    places = {str(minor): _with_colons(bus_id(node)) for minor, node in found.items()}
    assert places == case["expected"]["by_render_minor"]


@pytest.mark.vectors("vendor_amd", "amd.bus_id_mi308")
def test_bus_ids_and_partition_numbers_match_the_vectors(case: Case) -> None:
    expected = case["expected"]
    assert _with_colons(bus_id(case["input"])) == expected["bus_id"]
    found = RenderDevice("", "", 128, (), case["input"])
    assert found.partition == expected["partition_number"]


@pytest.mark.vectors("vendor_amd", "amd.topology_property")
def test_topology_properties_match_the_vectors(case: Case) -> None:
    value = parse_properties(case["input"]["text"])[case["input"]["name"]]
    expected = case["expected"]
    assert value == expected.get("value", value)
    assert str(value) == expected.get("text_value", str(value))


@pytest.mark.vectors("vendor_amd", "amd.kfd_node")
def test_kfd_nodes_match_the_vectors(case: Case, tmp_path: Path) -> None:
    given, expected = case["input"], case["expected"]
    for number, text in enumerate(given.get("texts") or [given["text"]]):
        folder = f"sys/class/kfd/kfd/topology/nodes/{number}"
        amd_machine.write(tmp_path / folder / "properties", text)
    with Rootfs(str(tmp_path)) as root:
        found = kfd_devices(root)
    if "gpu" in expected:
        assert bool(found) == expected["gpu"]
    else:
        ids = [node["unique_id"] for node in found.values()]
        assert ids.count(ids[0]) == expected["devices_of_that_id"]


@pytest.mark.vectors("vendor_amd", "amd.node")
def test_device_nodes_match_the_vectors(case: Case, tmp_path: Path) -> None:
    given, expected = case["input"], case["expected"]
    if given.get("exists") is False:
        # gpuhook makes no node with the numbers 0:0, but refuses the container.
        assert DeviceNode.of(given["path"], None) is None
        found = machine(tmp_path, 1)
        known = (found.vendor, found.root, found.version, found.devices)
        without = Inventory(*known, found.nodes[:1], found.control)
        with pytest.raises(DriverError, match="has no node /dev/dri/card0"):
            resolved(without, "AMD_VISIBLE_DEVICES=0")
        return
    node = DeviceNode.of(given["path"], _status(given))
    assert node is not None
    facts = {name: getattr(node, name) for name in ("major", "minor", "mode", "uid", "gid")}
    assert facts == {name: expected[name] for name in facts}


def _status(given: Case) -> os.stat_result:
    """Return the result of stat for such a node."""
    device = os.makedev(int(given["major_hex"], 16), int(given["minor_hex"], 16))
    mode = stat.S_IFCHR | int(given["mode_octal"], 8)
    return os.stat_result((mode, 0, 0, 1, 0, given["gid"], 0, 0, 0, 0), {"st_rdev": device})


@pytest.mark.vectors("vendor_amd", "amd.argv")
def test_command_lines_match_the_vectors(case: Case) -> None:
    arguments = Arguments(case["input"]["argv"][1:])
    expected = case["expected"]
    assert (arguments.verb in CREATING_VERBS) == expected["create"]
    spec = f"{arguments.bundle}/config.json"
    assert spec == expected.get("spec", spec)


def lease(found: Inventory, words: str, container: str) -> Case:
    """Return the record of a container that has these devices."""
    answer = resolved(found, f"AMD_VISIBLE_DEVICES={words}")
    ids = answer.ids if answer else ()
    given = {"kind": names.KIND, "selected": [*ids], "nodes": {each: [] for each in ids}}
    facts = {"pid": 0, "engine": "", "pod": "", "namespace": "", "container": ""}
    return {"id": container, **facts, "given": [given]}


@pytest.mark.vectors("vendor_amd", "amd.lease")
def test_exclusive_devices_in_use_are_refused(case: Case, tmp_path: Path) -> None:
    """In gpuhook, all devices of a kind are exclusive or none; AMD decides it for each GPU."""
    given, expected = case["input"], case["expected"]
    state = given["state"]
    gpus = state["gpus"]
    found = machine(tmp_path, len(gpus), state.get("unique_ids"))
    ended = {given.get("release")}
    held = [
        lease(found, number, container)
        for number, gpu in gpus.items()
        for container in gpu["containers"]
        if container not in ended
    ]
    wanted = lease(found, given.get("reserve", ",".join(gpus)), given.get("container", "new"))
    numbers = [int(device.label) for device in found.devices if device.id in _ids_of(wanted)]
    asked = {gpus[str(number)]["access"] for number in numbers}
    exclusive = state["enabled"] and "exclusive" in asked and "shared" not in given
    kinds = (names.KIND,) if exclusive else ()
    if given.get("release"):  # a release frees no device that another container holds
        wanted = lease(found, "1", "new")
    if expected.get("error"):
        with pytest.raises(HeldError, match="is in use by the container container_1"):
            leases.refuse(wanted, held, kinds)
    else:
        leases.refuse(wanted, held, kinds)
        assert numbers == expected.get("devices", numbers)


def _ids_of(record: Case) -> list[str]:
    [given] = record["given"]
    selected: list[str] = given["selected"]
    return selected


def _document(found: Inventory, strategies: Sequence[str] = ("index",)) -> dict[str, Any]:
    source = SpecSource(VENDOR, found, Config(), "/hook")
    return generate(source, strategies).document


@pytest.mark.vectors("vendor_amd", "amd.cdi")
def test_cdi_specs_match_the_vectors(case: Case, tmp_path: Path) -> None:
    given, expected = case["input"], case["expected"]
    if "path" in given:
        (tmp_path / "blocker").touch()
        with pytest.raises(CdiError):
            write(f"{tmp_path}/{given['path']}", "")
        return
    document = _document(machine(tmp_path, given["gpus"]))
    edits = {device["name"]: device["containerEdits"] for device in document["devices"]}
    assert sorted(edits) == sorted(expected.get("devices") or expected["kfd_in"])
    if "kind" in expected:
        assert (document["kind"], document["cdiVersion"]) == (expected["kind"], VERSION)
        assert expected["version"] < VERSION
    for name in expected.get("kfd_in", ()):
        whole = merge([document["containerEdits"], edits[name]])
        paths = [node["path"] for node in whole["deviceNodes"]]
        assert paths.count("/dev/kfd") == expected["kfd_count_in_all"]
