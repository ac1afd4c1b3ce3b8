"""Intel Gaudi: discovery, requests for devices, and variables for programs."""

import json
import os
from pathlib import Path
from typing import Any

import paper
import pytest
from asking import answered, labels, places, planned, resolved
from paper import spec_with
from steps import resolve

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import LostDeviceError, UnknownDeviceError
from gpuhook.base.oci.process import set_variable
from gpuhook.base.oci.runtime_argv import Arguments
from gpuhook.base.oci.spec import Spec
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.inventory.model import Inventory as AnyInventory
from gpuhook.core.plan import image
from gpuhook.core.planner import make_plan
from gpuhook.core.request.reader import is_privileged
from gpuhook.core.resolve import Allocation
from gpuhook.vendors.gaudi import discover
from gpuhook.vendors.gaudi.vendor import VENDOR, GaudiInventory

# Cases in which gpuhook's result differs from the vendor's -> the reason.
DIFFERENT = {
    "no variable gives all": "unset is none of our business",
    "nothing set, unprivileged": "as above",
    "a longer name with the same beginning counts too (fault)": "it is another variable",
    "first of several entries decides": "the last does, as programs and engines have it",
    "blank is part of the name": "blanks around names don't count",
    "index 0 also takes device 10 (fault)": "they are two devices",
    "unknown index": "refused, with what exists",
    "nothing found: container starts with a variable that says so": "as above",
    "void means all": "it means nothing, at every vendor",
    "not accepted, even where nothing was asked for": "such a container is left alone",
    "empty file": "the PCI id says the model",
}
# Of those cases, the ones that gpuhook doesn't refuse -> device labels, or None for no request.
OURS = {
    "no variable gives all": None,
    "a longer name with the same beginning counts too (fault)": None,
    "first of several entries decides": ["1"],
    "blank is part of the name": ["1", "0"],
    "index 0 also takes device 10 (fault)": ["0"],
}
DEVICES, MODULES, BUS_IDS = (
    "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_PCI_BUS_IDS",
)  # fmt: skip


@pytest.fixture
def eight(tmp_path: Path) -> AnyInventory:
    """Eight devices, whose seats (module ids) are 3 2 1 0 7 6 5 4."""
    return paper.machine("gaudi", tmp_path / "eight", 8)


def variables(answer: Allocation) -> dict[str, str]:
    return {each.name: each.value for each in answer.settings}


# The vendor's own cases ----------------------------------------------------------------------


def machine_of(given: dict[str, Any], root: Path) -> AnyInventory:
    """Return a machine with the nodes, module ids and bus ids of a case."""
    prefix = "/dev/accel/accel"
    paths = given.get("nodes", ["/dev/accel/accel0", "/dev/accel/accel1"])
    numbers = {int(path.removeprefix(prefix)) for path in paths if path[16:].isdecimal()}
    count = max(numbers) + 1
    rdma = [path.removeprefix("/dev/infiniband/uverbs") for path in paths if "uverbs" in path]
    settings = {
        "gap": ",".join(str(n) for n in range(count) if n not in numbers),
        "uverbs": ",".join(rdma),
    }
    for kind, name in (("modules", "module_ids"), ("addresses", "bus_ids")):
        if name in given:
            settings[kind] = ",".join(given[name][str(number)] for number in range(count))
    return paper.machine("gaudi", root, count, **settings)


@pytest.mark.vectors("vendor_habana", "habana.request", "habana.runtime_error")
def test_requests_match_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    found, env = machine_of(case["input"], tmp_path), case["input"]["env"]
    expected = case["expected"].get("nodes", [])
    if case["name"] not in DIFFERENT:
        answer = answered(found, *env)
        given = make_plan(answer.grants, image.unknown()) if answer else None
        assert sorted(places(given) if given else []) == sorted(expected)
    elif case["name"] not in OURS:
        with pytest.raises(UnknownDeviceError, match="no Gaudi '7': it has 0"):
            resolved(found, *env)
    elif OURS[case["name"]] is None:
        assert answered(found, *env) is None
    else:
        assert labels(resolved(found, *env)) == OURS[case["name"]]


@pytest.mark.vectors("vendor_habana", "habana.env")
def test_module_ids_are_set_as_in_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    found = machine_of(case["input"], tmp_path)
    assert variables(resolved(found, *case["input"]["env"])) == case["expected"]["sets"]


@pytest.mark.vectors("vendor_habana", "habana.hook.devices", "habana.hook.priority")
def test_gaudi_requests_depend_on_variables_and_privileges(
    case: dict[str, Any], eight: AnyInventory
) -> None:
    given, expected = case["input"], case["expected"]
    env = given.get("env", {DEVICES: given["value"]} if given.get("value") else {})
    accepts = given.get("accept_unprivileged", True)
    name = "accept-nvidia-visible-devices-envvar-when-unprivileged"
    config = loads(f"{name} = {str(accepts).lower()}\n")
    spec = spec_with(*(f"{name}={value}" for name, value in env.items()))
    if given["privileged"]:
        spec["process"]["capabilities"] = {"bounding": ["CAP_SYS_ADMIN"]}
    answer = resolve(spec, config, inventories={"gaudi": eight})
    if case["name"] in DIFFERENT:
        assert answer is None
        return
    assert answer is not None
    words = "all" if len(answer.ids) == 8 else ",".join(d.label for d in answer.grants[0].devices)
    assert words == expected["devices"]


@pytest.mark.vectors("vendor_habana", "habana.hook.privileged")
def test_privileged_containers_match_the_vectors(case: dict[str, Any]) -> None:
    given = case["input"]
    spec = {"ociVersion": given["ociVersion"], "process": {}}
    if "capabilities" in given:
        spec["process"] = {"capabilities": given["capabilities"]}
    assert is_privileged(spec) == case["expected"]["privileged"]


@pytest.mark.vectors("vendor_habana", "habana.k8s")
def test_device_plugin_variables_select_the_plugins_own_devices(
    case: dict[str, Any], eight: AnyInventory
) -> None:
    """The device plugin itself adds the same nodes to a container."""
    expected = case["expected"]
    env = [f"{name}={value}" for name, value in expected["env"].items()]
    plan = planned(eight, *env)
    ours = {path for path in places(plan) if "/accel/" in path}
    assert ours == {path for path in expected["linux_devices"] if "/accel/" in path}
    assert variables(resolved(eight, *env)) == {MODULES: "6"}  # module id of this host's device 5


@pytest.mark.vectors("vendor_habana", "habana.argv")
def test_command_lines_match_the_vectors(case: dict[str, Any]) -> None:
    given, expected = Arguments(case["input"]["argv"]), case["expected"]
    if "create" in expected:
        assert (given.verb == "create") == expected["create"]
    elif given.verb == "create" and not given.unclear:
        assert (given.bundle or ".") == expected["bundle"]
    else:  # words that runc and crun read differently are refused; other verbs are passed on
        assert given.unclear or given.verb not in ("create", "run")


@pytest.mark.vectors("vendor_habana", "habana.external_network")
def test_external_network_ports_give_a_warning(case: dict[str, Any], tmp_path: Path) -> None:
    given = case["input"]
    addresses = {int(name[5:]): text.strip() for name, text in given["pci_addr"].items()}
    count = max(addresses) + 1
    with_ports = [folder.split("/")[4] for folder in given["folders"] if folder.endswith("/net")]
    found = paper.machine(
        "gaudi",
        tmp_path,
        count,
        gap=",".join(str(n) for n in range(count) if n not in addresses),
        addresses=",".join(addresses.get(n, "0000:77:00.0") for n in range(count)),
        net=",".join(str(n) for n, address in addresses.items() if address in with_ports),
    )
    asked = ",".join(given["indexes"]) or "none"
    warnings = resolved(found, f"{DEVICES}={asked}").warnings()
    assert [text[:17] for text in warnings] == ["The network ports"] * case["expected"]["external"]


def test_the_listed_deviating_vectors_exist() -> None:
    text = (Path(__file__).parents[3] / "vectors/vendor_habana.json").read_text()
    names = {case["name"] for case in json.loads(text)["vectors"]}
    assert set(OURS) <= set(DIFFERENT) <= names


# Which devices -------------------------------------------------------------------------------


def test_a_device_number_is_never_taken_for_a_module_id(tmp_path: Path) -> None:
    """Device 1 is missing, and another device has module id 1."""
    found = paper.machine("gaudi", tmp_path, 3, gap="1")
    assert labels(resolved(found, f"{MODULES}=1")) == ["2"]
    for word in (f"{DEVICES}=1", f"{DEVICES}=habana.ai/gaudi=1"):
        with pytest.raises(UnknownDeviceError):
            resolved(found, word)


def test_a_gaudi_that_is_not_operational_is_omitted_or_refused(tmp_path: Path) -> None:
    found = paper.machine("gaudi", tmp_path, 3, reset="1")
    assert labels(resolved(found, f"{DEVICES}=all")) == ["0", "2"]
    assert variables(resolved(found, f"{DEVICES}=all")) == {MODULES: "1,3"}
    for word in (f"{DEVICES}=1", f"{DEVICES}=0-2", f"{MODULES}=2", f"{BUS_IDS}=1a:00.0"):
        with pytest.raises(LostDeviceError, match="Gaudi 1 can't be used: its status is In reset"):
            resolved(found, word)


# What programs are told ----------------------------------------------------------------------


@pytest.mark.parametrize("word", [f"{DEVICES}=all", f"{DEVICES}=2,0", f"{BUS_IDS}=1b:00.0"])
def test_variables_set_by_the_runtime_request_the_same_devices(
    eight: AnyInventory, word: str
) -> None:
    """The hook reads the config.json that the runtime has changed."""
    first = resolved(eight, word)
    spec = Spec("config.json", json.dumps(spec_with(word)))
    for setting in first.settings:
        spec = set_variable(spec, setting)
    again = resolve(spec.data, Config(), inventories={"gaudi": eight})
    assert again is not None
    assert set(again.ids) == set(first.ids)
    assert variables(again) == variables(first)


def test_missing_or_duplicate_module_ids_are_not_set(tmp_path: Path) -> None:
    found = paper.machine("gaudi", tmp_path / "a", 3, no_module="1")
    assert variables(resolved(found, f"{DEVICES}=0,1")) == {}
    assert variables(resolved(found, f"{DEVICES}=0,2")) == {MODULES: "1,3"}
    double = paper.machine("gaudi", tmp_path / "b", 3, modules="5,5,4")
    assert variables(resolved(double, f"{BUS_IDS}=19:00.0")) == {}
    with pytest.raises(UnknownDeviceError, match="it has 4"):
        resolved(double, f"{MODULES}=5")


def test_ten_and_more_module_ids_are_in_numeric_order(tmp_path: Path) -> None:
    found = paper.machine("gaudi", tmp_path, 12)
    text = variables(resolved(found, f"{DEVICES}=all"))[MODULES]
    assert text == ",".join(str(number) for number in range(12))


def test_a_request_for_no_device_sets_no_variables(eight: AnyInventory) -> None:
    assert variables(resolved(eight, f"{DEVICES}=none")) == {}


# The rest ------------------------------------------------------------------------------------


def test_the_gaudi_table_lists_bus_ids_and_states(tmp_path: Path) -> None:
    found = paper.machine("gaudi", tmp_path, 3, reset="2")
    assert found.table()[1][1:] == [
        ("1", "2", "Gaudi2", "0000:1a:00.0", "-"),
        ("2", "1", "Gaudi2", "0000:1b:00.0", "its status is In reset"),
    ]


def test_a_cdi_spec_sets_no_module_ids(eight: AnyInventory) -> None:
    """An engine keeps one value of a variable, so one device's id would replace the others."""
    made = generate(SpecSource(VENDOR, eight, Config(), "/hook"), ("index",)).document
    assert not any("env" in each["containerEdits"] for each in made["devices"])


# What is found --------------------------------------------------------------------------------


DRIVER = "sys/bus/pci/drivers/habanalabs"
FIRST = f"{DRIVER}/0000:19:00.0"


def found(root: Path) -> GaudiInventory:
    return discover.discover(str(root))


def change(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


@pytest.mark.vectors("vendor_habana", "habana.device_type")
def test_models_match_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    paper.machine("gaudi", tmp_path, 1)
    change(tmp_path / FIRST / "device_type", case["input"]["text"])
    [device] = found(tmp_path).devices
    # The vendor's program fails on an empty file; gpuhook then uses the PCI id for the model.
    assert device.model.lower() == case["expected"].get("type", "gaudi2")


@pytest.mark.vectors("vendor_habana", "habana.bus_ids")
def test_bus_ids_match_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    files, indexes = case["input"]["files"], case["input"]["indexes"]
    addresses = [files[f"sys/class/accel/accel{index}/device/pci_addr"] for index in indexes]
    made = paper.machine("gaudi", tmp_path, len(indexes), addresses=",".join(addresses))
    assert {each.label: each.bus_id for each in made.devices} == case["expected"]["bus_ids"]


def test_device_numbers_are_the_drivers_and_not_the_bus_order(tmp_path: Path) -> None:
    made = paper.machine("gaudi", tmp_path, 2, addresses="0000:b3:00.0,0000:19:00.0")
    assert [(each.label, each.id) for each in made.devices] == [
        ("0", "0000:b3:00.0"),
        ("1", "0000:19:00.0"),
    ]


def test_devices_of_other_drivers_are_ignored(tmp_path: Path) -> None:
    made = paper.machine("gaudi", tmp_path, 2)
    assert (tmp_path / "sys/bus/pci/drivers/intel_vpu/0000:00:0b.0/accel/accel2/dev").exists()
    assert [each.label for each in made.devices] == ["0", "1"]
    (tmp_path / DRIVER / "0000:19:00.0").unlink()  # unbound
    assert [each.label for each in found(tmp_path).devices] == ["1"]


@pytest.mark.parametrize("name", ["bind", "new_id", "module", "0000:19:00", "x:y:z.0", "a.b.c.d"])
def test_names_that_are_not_pci_addresses_are_ignored(tmp_path: Path, name: str) -> None:
    paper.machine("gaudi", tmp_path, 1)
    (tmp_path / DRIVER / name).mkdir()
    assert len(found(tmp_path).devices) == 1


@pytest.mark.parametrize("status", ["In reset", "Disabled", "Needs reset", "In device creation"])
def test_a_status_that_is_not_operational_makes_a_device_unusable(
    tmp_path: Path, status: str
) -> None:
    paper.machine("gaudi", tmp_path, 1)
    change(tmp_path / FIRST / "status", f"{status}\n")
    [device] = found(tmp_path).devices
    assert device.state == f"its status is {status}"


@pytest.mark.parametrize("name", ["status", "accel/accel0", "accel/accel_controlD0", "accel"])
def test_partly_initialized_devices_are_unusable(tmp_path: Path, name: str) -> None:
    paper.machine("gaudi", tmp_path, 2)
    path = tmp_path / FIRST / name
    path.rename(tmp_path / "elsewhere")
    states = [bool(each.state) for each in found(tmp_path).devices]
    assert sorted(states) == [False, True]


def test_a_device_without_a_number_is_named_by_its_address(tmp_path: Path) -> None:
    made = paper.machine("gaudi", tmp_path, 2, no_accel="0")
    assert [each.label for each in made.devices] == ["1", "0000:19:00.0"]
    assert made.devices[1].state.startswith("the driver hasn't initialized it")


def test_a_device_without_rdma_has_no_uverbs_node(tmp_path: Path) -> None:
    made = paper.machine("gaudi", tmp_path, 2, uverbs="1")
    assert [len(each.nodes) for each in made.devices] == [2, 3]


def test_files_of_an_unexpected_type_are_ignored(tmp_path: Path) -> None:
    paper.machine("gaudi", tmp_path, 1)
    folder = tmp_path / FIRST
    for name in ("module_id", "device_type", "device"):
        (folder / name).unlink()
    os.mkfifo(folder / "module_id")
    (folder / "device_type").mkdir()
    (folder / "device").write_text("x" * (1 << 20))
    [device] = found(tmp_path).devices
    assert (device.model, device.state, list(device.names)) == ("", "", ["bus_id", "index"])


@pytest.mark.parametrize("text", ["", "-1", "x", "123456", "٣"])
def test_invalid_gaudi_module_ids_are_ignored(text: str) -> None:
    assert discover.seat(text) == ""


def test_links_out_of_the_root_are_not_followed(tmp_path: Path) -> None:
    paper.machine("gaudi", tmp_path / "outside", 1)
    (tmp_path / "root" / DRIVER).mkdir(parents=True)
    (tmp_path / "root" / FIRST).symlink_to(tmp_path / "outside" / FIRST)
    [device] = found(tmp_path / "root").devices
    assert device.state == "its status is unknown"
