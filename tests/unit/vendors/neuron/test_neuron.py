"""AWS Neuron: discovery, requests for devices, neighbours, and cores."""

import json
import os
from pathlib import Path
from typing import Any

import paper
import pytest
from asking import places, planned, resolved
from paper import spec_with
from steps import edit, resolve

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, LostDeviceError, RequestError
from gpuhook.base.oci.spec import Spec
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.inventory.model import Inventory as AnyInventory
from gpuhook.vendors.neuron import discover
from gpuhook.vendors.neuron.vendor import (
    VENDOR,
    NeuronInventory,
    between,
    core_list,
    core_sizes,
    cores,
    ranges,
)

ASK = "AWS_NEURON_VISIBLE_DEVICES"
RT = "NEURON_RT_VISIBLE_CORES"


@pytest.fixture
def trn1(tmp_path: Path) -> AnyInventory:
    """A machine with 16 devices of two cores each."""
    return paper.machine("neuron", tmp_path / "trn1", 16)


# Which devices -------------------------------------------------------------------------------


@pytest.mark.vectors("vendor_neuron", "neuron.request")
def test_requests_match_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    given, count = case["input"], case["input"]["devices_of_machine"]
    if "env" not in given:  # the engine handles --device, so gpuhook does nothing
        made = [{"path": path, "type": "c"} for path in given["device_options"]]
        spec = spec_with("PATH=/bin", linux={"devices": made})
        assert resolve(spec, Config(), inventories={}) is None
        assert [each["path"] for each in made] == case["expected"]["nodes"]
        return
    found = paper.machine("neuron", tmp_path, count)
    assert places(planned(found, *given["env"])) == case["expected"]["nodes"]


@pytest.mark.vectors("vendor_neuron", "neuron.kubernetes")
def test_neuron_device_plugin_variables_are_not_a_request(case: dict[str, Any]) -> None:
    env = [f"{name}={value}" for name, value in case["expected"]["env"].items()]
    assert resolve(spec_with(*env), Config(), inventories={}) is None


def test_an_uninitialized_device_is_left_out_and_refused_by_name(tmp_path: Path) -> None:
    found = paper.machine("neuron", tmp_path, 4, half_made="3")
    assert places(planned(found, f"{ASK}=all")) == ["/dev/neuron0", "/dev/neuron1", "/dev/neuron2"]
    with pytest.raises(LostDeviceError, match="Neuron device 3 can't be used: the driver hasn't"):
        resolved(found, f"{ASK}=3")


# Neighbours ----------------------------------------------------------------------------------


@pytest.mark.vectors("vendor_neuron", "neuron.contiguous")
def test_devices_that_are_not_neighbours_are_refused(
    case: dict[str, Any], trn1: AnyInventory
) -> None:
    devices = case["input"]["devices"]
    asked = f"{ASK}={','.join(map(str, devices))}"
    if case["expected"]["contiguous"]:
        assert resolved(trn1, asked).ids
        return
    with pytest.raises(RequestError, match="aren't neighbours: Neuron's runtime opens all from"):
        resolved(trn1, asked)


@pytest.mark.parametrize("words", ["3,2", "5,3,4", "9,10,11", "15,0-14"])
def test_neighbours_in_any_order_are_accepted(trn1: AnyInventory, words: str) -> None:
    assert resolved(trn1, f"{ASK}={words}").ids


def test_a_refused_neuron_request_suggests_a_contiguous_range(
    trn1: AnyInventory, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as caught:
        resolved(trn1, f"{ASK}=0,9,3")
    assert "The Neuron devices 0, 3, 9 are" in caught.value.cause
    assert caught.value.cause.endswith("fails without 1-2, 4-8")
    assert caught.value.remedy.startswith("Request 0-9, or")
    gap = paper.machine("neuron", tmp_path / "gap", 5, gap="1")
    with pytest.raises(RequestError) as caught:
        resolved(gap, f"{ASK}=all")
    assert caught.value.remedy.startswith("Request one run of 0, 2-4, or")
    assert resolved(gap, f"{ASK}=2-4").ids


def test_between_gives_the_numbers_between_the_devices() -> None:
    assert between([]) == between([7]) == between([8, 7]) == []
    assert between([10, 2]) == [*range(3, 10)]


# Cores ---------------------------------------------------------------------------------------


@pytest.mark.vectors("vendor_neuron", "neuron.cores", "neuron.core_owner")
def test_cores_of_devices_match_the_vectors(case: dict[str, Any]) -> None:
    given, expected = case["input"], case["expected"]
    each = given["cores_per_device"]
    if "core" in given:
        assert given["core"] in cores([expected["device"]], each)
    else:
        assert cores(given["devices"], each) == expected["cores"]


@pytest.mark.vectors("vendor_neuron", "neuron.core_list")
def test_core_lists_match_the_vectors(case: dict[str, Any]) -> None:
    found = core_list(case["input"].get(RT, ""))
    assert (list(found) or "all") == case["expected"]["cores"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,2-3", (0, 2, 3)),
        (" 1 , 1", (1,)),
        ("4-3", ()),
        ("", ()),
        ("x", ()),
        ("1,x", ()),
        ("1-", ()),
        ("-1", ()),
        ("0-99999999999999", ()),
        ("9" * 5000, ()),
        ("٣", ()),
    ],
)
def test_malformed_core_lists_are_empty(text: str, expected: tuple[int, ...]) -> None:
    assert core_list(text) == expected


@pytest.mark.parametrize(
    ("devices", "asked", "said"),
    [
        ("12", "0-1", "these have 24-25"),
        ("12,13", "24-28", "these have 24-27"),
        ("12,13", "24-27", ""),
        ("12", "25", ""),
        ("12", "nonsense", ""),
        ("none", "0", ""),
    ],
)
def test_visible_cores_of_other_devices_cause_a_warning(
    trn1: AnyInventory, devices: str, asked: str, said: str
) -> None:
    warnings = resolved(trn1, f"{ASK}={devices}", f"{RT}={asked}").warnings()
    assert [text.partition(", and ")[2] for text in warnings] == ([said] if said else [])


def test_trainium2_cores_are_accepted_in_pairs_or_singly(tmp_path: Path) -> None:
    """Programs use Trainium2's cores in pairs or singly, and gpuhook accepts both."""
    found = paper.machine("neuron", tmp_path, 16, family="Trn2")
    for asked in ("4-7", "8-15"):
        assert resolved(found, f"{ASK}=1", f"{RT}={asked}").warnings() == []
    [text] = resolved(found, f"{ASK}=1", f"{RT}=0-3").warnings()
    assert text.endswith("these have 8-15 or 4-7")
    assert core_sizes(8) == (8, 4)
    assert core_sizes(4) == (4,)


def test_the_applications_core_variable_is_never_set(trn1: AnyInventory) -> None:
    answer = resolved(trn1, f"{ASK}=12", f"{RT}=0")
    assert answer.settings == []
    assert answer.groups == {}


def test_unknown_core_counts_cause_no_warning(tmp_path: Path) -> None:
    found = paper.machine("neuron", tmp_path, cores="0")
    assert resolved(found, f"{ASK}=1", f"{RT}=99").warnings() == []


def test_ranges_joins_consecutive_numbers() -> None:
    assert ranges([]) == ""
    assert ranges([3, 1, 2, 9, 9]) == "1-3, 9"


# The rest ------------------------------------------------------------------------------------


def test_the_neuron_table_lists_cores_and_serials(trn1: AnyInventory) -> None:
    header, rows = trn1.table()
    assert header == ("INDEX", "NAME", "CORES", "SERIAL", "STATE")
    assert rows[10] == ("10", "Trainium1", 2, "00a1b2c3d4e5000a", "-")


def test_a_cdi_spec_has_no_device_all_unless_all_are_neighbours(tmp_path: Path) -> None:
    gap = paper.machine("neuron", tmp_path / "gap", 4, gap="1")
    found = generate(SpecSource(VENDOR, gap, Config(), "/hook"), ("index",))
    assert [each["name"] for each in found.document["devices"]] == ["0", "2", "3"]
    assert (
        "There is no device all: The Neuron devices 0, 2-3 aren't neighbours" in found.warnings[0]
    )


# What is found --------------------------------------------------------------------------------


CLASS = "sys/class/neuron_device"


def found(root: Path) -> NeuronInventory:
    return discover.discover(str(root))


@pytest.mark.vectors("vendor_neuron", "neuron.class")
def test_devices_in_the_class_folder_match_the_vectors(
    case: dict[str, Any], tmp_path: Path
) -> None:
    names = case["input"]["names"]
    if names is None:
        with pytest.raises(DriverError, match="driver isn't loaded"):
            found(tmp_path)
        return
    for name in names:
        (tmp_path / CLASS / name).mkdir(parents=True)
    assert [int(each.label) for each in found(tmp_path).devices] == case["expected"]["devices"]


@pytest.mark.vectors("vendor_neuron", "neuron.instance")
def test_core_counts_of_instances_match_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    expected = case["expected"]
    family = case["input"]["type"].partition(".")[0].title().removesuffix("N")
    made = paper.machine("neuron", tmp_path, expected["devices"], family=family)
    assert isinstance(made, NeuronInventory)
    assert made.cores == (expected["cores_per_device"],) * expected["devices"]


@pytest.mark.vectors("vendor_neuron", "neuron.architecture")
def test_models_of_architectures_match_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    paper.machine("neuron", tmp_path, 1, family="Trn2")
    for name, text in case["input"].items():
        file = tmp_path / CLASS / "neuron0" / name
        file.unlink()
        file.write_text(text)
    [device] = found(tmp_path).devices
    assert device.model == case["expected"]["model"]
    assert case["expected"]["family"] in {family for family, _ in discover.PRODUCTS.values()}


@pytest.mark.vectors("vendor_neuron", "neuron.pci_id")
def test_pci_ids_match_the_vectors(case: dict[str, Any]) -> None:
    family, model = discover.product(**case["input"]) or (None, None)
    expected = case["expected"]
    assert family == expected["family"]
    assert model == expected.get("model", model)


@pytest.mark.vectors("vendor_neuron", "neuron.connected_devices")
def test_connected_devices_match_the_vectors(case: dict[str, Any]) -> None:
    assert discover.connected(case["input"]["text"]) == case["expected"]["connected"]


@pytest.mark.vectors("vendor_neuron", "neuron.core_count")
def test_core_counts_match_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    made = paper.machine("neuron", tmp_path, 1, cores=case["input"]["text"])
    assert isinstance(made, NeuronInventory)
    assert made.cores == (case["expected"]["cores"],)


@pytest.mark.vectors("vendor_neuron", "neuron.serial")
def test_serial_numbers_match_the_vectors(case: dict[str, Any]) -> None:
    assert discover.serial(case["input"]["text"].strip()) == case["expected"]["uuid"]


@pytest.mark.vectors("vendor_neuron", "neuron.node")
def test_device_nodes_match_the_vectors(case: dict[str, Any]) -> None:
    name, dev, expected = case["input"]["name"], case["input"]["dev"], case["expected"]
    assert discover.device_numbers([name]) == [expected["index"]]
    major, _, minor = dev.strip().partition(":")
    node = DeviceNode(expected["path"], int(major), expected["minor"])
    assert int(minor) == expected["minor"]
    assert discover.state_of(node.path, dev.strip(), node) == ""


@pytest.mark.vectors("vendor_neuron", "neuron.lossless")
def test_unknown_keys_stay(case: dict[str, Any], tmp_path: Path) -> None:
    given = case["input"]["spec"]
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "gpuhook-prestart").touch(mode=0o755)
    machine = paper.machine("neuron", tmp_path / "root")
    spec = paper.spec_with("AWS_NEURON_VISIBLE_DEVICES=0", **given)
    made = edit(
        Spec(str(tmp_path / "config.json"), json.dumps(spec)),
        Config(),
        str(bin_folder),
        inventories={"neuron": machine},
    )
    assert made is not None
    assert made.data["x-unknown"] == given["x-unknown"]
    assert given["hooks"]["prestart"][0] in made.data["hooks"]["prestart"]


# Files in any state --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["neuron", "neuron01", "neuronx", "neuron-1", "neuron٣", "neuron1 "]
)
def test_malformed_device_names_are_ignored(tmp_path: Path, name: str) -> None:
    paper.machine("neuron", tmp_path, 1)
    (tmp_path / CLASS / name).mkdir()
    assert [each.label for each in found(tmp_path).devices] == ["0"]


@pytest.mark.parametrize("text", ["", "00000000000000000", "0000000000000000", "unknown", "12"])
def test_invalid_neuron_serials_are_ignored(text: str) -> None:
    assert discover.serial(text) == ""


def test_a_duplicate_serial_number_is_ignored(tmp_path: Path) -> None:
    paper.machine("neuron", tmp_path, 3)
    file = tmp_path / CLASS / "neuron1/info/serial_number"
    file.unlink()
    file.write_text((tmp_path / CLASS / "neuron0/info/serial_number").read_text())
    devices = found(tmp_path).devices
    assert [each.id for each in devices] == ["neuron0", "neuron1", "00a1b2c3d4e50002"]
    assert [list(each.names) for each in devices] == [["index"], ["index"], ["index", "serial"]]


def test_an_empty_serial_number_is_ignored(tmp_path: Path) -> None:
    made = paper.machine("neuron", tmp_path, 2, no_serial="1")
    assert [each.id for each in made.devices] == ["00a1b2c3d4e50000", "neuron1"]


def test_the_model_is_found_without_the_drivers_model_file(tmp_path: Path) -> None:
    paper.machine("neuron", tmp_path, 2, family="Inf1")
    (tmp_path / CLASS / "neuron0/info/architecture/device_name").unlink()
    assert [each.model for each in found(tmp_path).devices] == ["Inferentia", "Inferentia"]


def test_partly_initialized_devices_and_dangling_links_are_unusable(tmp_path: Path) -> None:
    paper.machine("neuron", tmp_path, 2, half_made="0")
    (tmp_path / CLASS / "neuron7").symlink_to("../../devices/virtual/neuron_device/neuron7")
    states = {each.label: each.state for each in found(tmp_path).devices}
    assert states["1"] == ""
    assert states["0"].startswith("the driver hasn't initialized it")
    assert states["7"] == states["0"]


def test_files_of_an_unexpected_type_are_ignored(tmp_path: Path) -> None:
    paper.machine("neuron", tmp_path, 1)
    folder = tmp_path / CLASS / "neuron0"
    for name in ("core_count", "info/serial_number", "info/architecture/device_name"):
        (folder / name).unlink()
    (folder / "core_count").mkdir()
    os.mkfifo(folder / "info/serial_number")
    (folder / "info/architecture/device_name").write_text("x" * (1 << 20))
    [device] = found(tmp_path).devices
    assert (device.id, device.state) == ("neuron0", "")
    assert found(tmp_path).cores == (0,)


def test_links_out_of_the_root_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "dev").write_text("1:3\n")
    (tmp_path / "root" / CLASS).mkdir(parents=True)
    (tmp_path / "root" / CLASS / "neuron0").symlink_to(outside)
    [device] = found(tmp_path / "root").devices
    assert device.state


def test_simulated_files_match_the_drivers(tmp_path: Path) -> None:
    found = paper.machine("neuron", tmp_path, 3)
    folder = tmp_path / "sys/class/neuron_device/neuron1"
    assert folder.is_symlink()
    assert folder.resolve() == tmp_path / "sys/devices/virtual/neuron_device/neuron1"
    [node] = [node for node in found.nodes if node.path == "/dev/neuron1"]
    assert (folder / "dev").read_text() == f"{node.major}:1\n"
    assert (folder / "core_count").read_text() == "2"  # without a newline
    assert (folder / "connected_devices").read_text() == "0, 2\n"
    assert f"{node.major} neuron\n" in (tmp_path / "proc/devices").read_text()
    card = tmp_path / "sys/bus/pci/drivers/neuron/0000:10:00.0"
    assert (card / "device").read_text() == "0x7164\n"
    assert (card / "driver").resolve() == card.parent.resolve()
