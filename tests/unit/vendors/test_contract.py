"""Requirements on every vendor whose devices are found by files, on simulated machines."""

import json
import time
from pathlib import Path
from types import ModuleType

import machines
import pytest
from asking import answered, labels, places, planned, resolved
from node_files import Machine, machine
from sample import Change, Order
from samples import SAMPLES, having, rows

from gpuhook.base.config.loader import loads
from gpuhook.base.errors import (
    DriverError,
    LostDeviceError,
    NoDriverError,
    SimulateError,
    UnknownDeviceError,
)
from gpuhook.core import contract, spec_devices
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.inventory import fingerprint
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.vendors import registry

VENDORS = [*SAMPLES]


def ask(vendor: str, words: str) -> str:
    """Return a variable that requests devices of a vendor."""
    return f"{next(iter(registry.BUILT_IN[vendor].VARIABLES))}={words}"


@pytest.mark.parametrize("names", registry.BUILT_IN.values(), ids=registry.BUILT_IN)
def test_the_variable_voided_by_cdi_specs_is_the_vendors_own(names: ModuleType) -> None:
    assert names.VOID in {"", *names.VARIABLES}


# What is found -------------------------------------------------------------------------------


@pytest.mark.parametrize("names", registry.BUILT_IN.values(), ids=registry.BUILT_IN)
@pytest.mark.parametrize("folder", [".", "missing"])
def test_an_empty_driver_root_has_no_driver(names: ModuleType, folder: str, tmp_path: Path) -> None:
    root = tmp_path / folder
    text = (
        f'[nvidia-container-cli]\nroot = "{root}"\nload-kmods = false\n'
        f'[gpuhook]\nstate-dir = "{tmp_path}/state"\ndriver-roots = ["{names.NAME}={root}"]\n'
    )
    with pytest.raises(NoDriverError) as caught:
        contract.load(names).discover(loads(text))
    if names.NAME != "nvidia":
        said = "isn't loaded" if folder == "." else f"driver root {root} can't be read"
        assert said in caught.value.cause


@pytest.mark.protects(
    "driver-files-hang",
    "a hung driver file in /sys blocks container starts and commands only until a timeout",
)
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_hanging_driver_file_is_an_error_after_the_timeout(
    vendor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a container's start nor a command may wait for such a file forever."""
    Machine(vendor, tmp_path)
    loaded = contract.load(registry.BUILT_IN[vendor])
    monkeypatch.setattr(loaded, "_discover", lambda _: time.sleep(20))
    config = loads(f'[gpuhook]\ndriver-roots = ["{vendor}={tmp_path}"]\n')
    config.nvml_timeout = 0.05
    with pytest.raises(DriverError, match=r"a file of it didn't respond within 0\.05 seconds"):
        loaded.discover(config)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_driver_without_devices_gives_an_empty_inventory(vendor: str, tmp_path: Path) -> None:
    assert machine(vendor, tmp_path, 0).devices == ()


@pytest.mark.parametrize(("vendor", "order"), rows("orders"))
def test_ten_and_more_devices_are_sorted_by_number(
    vendor: str, order: Order, tmp_path: Path
) -> None:
    found = machine(vendor, tmp_path, order.count, **order.settings)
    assert tuple(device.label for device in found.devices) == order.labels
    assert found.devices[-1].nodes == order.last


@pytest.mark.parametrize("vendor", VENDORS)
def test_an_inventory_is_saved_without_loss(vendor: str, tmp_path: Path) -> None:
    found = machine(vendor, tmp_path, 3, **SAMPLES[vendor].saved)
    assert all(found.node(path) for device in found.devices for path in device.nodes)
    assert type(found).from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_device_whose_node_has_wrong_numbers_is_unusable(vendor: str, tmp_path: Path) -> None:
    path, said = SAMPLES[vendor].node, SAMPLES[vendor].other_numbers
    made = Machine(vendor, tmp_path, 2)
    made.nodes[path] = DeviceNode(path, 9, 9)
    found = made.look()
    fine, wrong = found.devices
    assert fine.state == ""
    assert f"{path} {said}" in wrong.state or f"{path.rpartition('/')[2]} {said}" in wrong.state
    assert labels(resolved(found, ask(vendor, "all"))) == ["0"]
    with pytest.raises(LostDeviceError, match=r"9:9|another device"):
        resolved(found, ask(vendor, "1"))


@pytest.mark.parametrize(("vendor", "change"), rows("changes"))
def test_a_change_of_the_driver_or_devices_is_detected(
    vendor: str, change: Change, tmp_path: Path
) -> None:
    made = Machine(vendor, tmp_path, 2)
    config = loads(f'gpuhook.driver-roots = ["{vendor}={tmp_path}"]\n')
    loaded = contract.load(registry.BUILT_IN[vendor])
    before = fingerprint.of(config, loaded)
    assert fingerprint.of(config, loaded) == before
    change(made)
    assert fingerprint.of(config, loaded) != before


# What containers get -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inventory]:
    return {
        vendor: machine(vendor, tmp_path_factory.mktemp(vendor), sample.count, **sample.settings)
        for vendor, sample in SAMPLES.items()
    }


def env_of(vendor: str, asked: str) -> list[str]:
    return asked.split() if "VISIBLE" in asked else [ask(vendor, asked)]


@pytest.mark.parametrize(("vendor", "named"), rows("named"))
def test_requests_select_the_expected_devices(
    found: dict[str, Inventory], vendor: str, named: tuple[str, str]
) -> None:
    asked, expected = named
    answer = resolved(found[vendor], *env_of(vendor, asked))
    assert " ".join(labels(answer)) == expected


NPU_GROUP = 106


def test_the_group_of_the_device_nodes_is_added(found: dict[str, Inventory]) -> None:
    assert set(resolved(found["intel_npu"], "INTEL_VISIBLE_NPUS=0").groups) == {NPU_GROUP}


@pytest.mark.parametrize(("vendor", "asked"), rows("unknown"))
def test_unknown_devices_are_refused_with_a_list_of_existing_ones(
    found: dict[str, Inventory], vendor: str, asked: str
) -> None:
    with pytest.raises(UnknownDeviceError, match=SAMPLES[vendor].it_has):
        resolved(found[vendor], *env_of(vendor, asked))


@pytest.mark.parametrize(("vendor", "asked"), rows("nothing"))
def test_variables_that_request_nothing_give_no_devices(
    found: dict[str, Inventory], vendor: str, asked: str
) -> None:
    assert answered(found[vendor], *env_of(vendor, asked)) is None


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_vendor_shares_a_plan_with_nvidia(found: dict[str, Inventory], vendor: str) -> None:
    nvidia = machines.machine(machines.gpu(0, 3))
    env = (ask(vendor, "0"), "NVIDIA_VISIBLE_DEVICES=0")
    plan = planned(found[vendor], *env, beside=[nvidia])
    nodes = map(found[vendor].node, found[vendor].devices[0].nodes)
    inside = {node.inside or node.path for node in nodes if node is not None}
    assert {*inside, "/dev/nvidia3"} < {*places(plan)}
    kinds = [op.kind for op in plan.operations]
    assert kinds.count("ldcache") == 1
    assert kinds[-1] == "ldcache"


@pytest.mark.parametrize("vendor", having("without_node"))
def test_a_device_with_a_missing_node_is_refused(vendor: str, tmp_path: Path) -> None:
    settings, paths = SAMPLES[vendor].without_node or ({}, "")
    there = machine(vendor, tmp_path, 2, **settings)
    assert labels(resolved(there, ask(vendor, "0"))) == ["0"]
    with pytest.raises(DriverError, match=f"'s driver has no node {paths}"):
        resolved(there, ask(vendor, "1"))


# Documents and simulators --------------------------------------------------------------------


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_cdi_spec_names_each_device_and_disables_the_variable(
    found: dict[str, Inventory], vendor: str
) -> None:
    """A container with a CDI device requests nothing by the variable.

    The CDI spec lists split devices by part.
    """
    loaded = contract.load(registry.BUILT_IN[vendor])
    source = SpecSource(loaded, found[vendor], loads(""), "/hook")
    document = generate(source, ("index",)).document
    assert document["kind"] == registry.BUILT_IN[vendor].KIND
    devices = found[vendor].devices
    split = {device.parent for device in devices}
    usable = {each.label for each in devices if not each.state and each.id not in split}
    assert {each["name"] for each in document["devices"]} == {*usable, "all"}
    assert ask(vendor, "void") in document["containerEdits"].get("env", [])
    assert ("hooks" in document["containerEdits"]) == SAMPLES[vendor].has_hooks


@pytest.mark.parametrize("vendor", VENDORS)
def test_an_unknown_simulator_setting_is_refused(vendor: str, tmp_path: Path) -> None:
    with pytest.raises(SimulateError, match="has no setting 'colour'"):
        Machine(vendor, tmp_path, 1, colour="red")


@pytest.mark.parametrize("vendor", having("refused"))
def test_invalid_simulator_settings_are_refused(vendor: str, tmp_path: Path) -> None:
    settings, message = SAMPLES[vendor].refused or ({}, "")
    with pytest.raises(SimulateError, match=message):
        Machine(vendor, tmp_path, 1, **settings)


# Whose a node is -----------------------------------------------------------------------------


def two_of(vendor: str, root: Path) -> Inventory:
    if vendor == "nvidia":
        return machines.machine(machines.gpu(0, 1), machines.gpu(1, 0))
    found: Inventory = machine(vendor, root, 2)
    return found


@pytest.mark.parametrize("vendor", registry.BUILT_IN)
def test_a_node_given_with_only_one_device_belongs_to_it(vendor: str, tmp_path: Path) -> None:
    """Exclusive devices and limits depend on this, however a container gets such a node."""
    found = two_of(vendor, tmp_path)
    capabilities = ("NVIDIA_DRIVER_CAPABILITIES=all",) if vendor == "nvidia" else ()
    given = {
        device.label: {*places(planned(found, ask(vendor, device.label), *capabilities))}
        for device in found.devices
    }
    numbers = {node.inside or node.path: node.numbers for node in found.nodes}
    first, second = given
    for label, other in ((first, second), (second, first)):
        alone = given[label] - given[other]
        assert alone
        for path in alone:
            held = spec_devices.devices_of({numbers[path]}, found)
            assert [device.label for device in held] == [label], path
    assert (
        spec_devices.devices_of({numbers[path] for path in given[first] & given[second]}, found)
        == []
    )
