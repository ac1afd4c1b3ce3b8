"""Requirements on every vendor whose devices are found by files, on simulated machines."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import machines
import pytest
from asking import answered, labels, places, planned, resolved
from node_files import Machine, machine

from gpuhook.base.config.loader import loads
from gpuhook.base.errors import (
    DriverError,
    LostDeviceError,
    NoDriverError,
    SimulateError,
    UnknownDeviceError,
)
from gpuhook.core import contract, spec_devices
from gpuhook.core.cdi.generate import Source, generate
from gpuhook.core.inventory import fingerprint
from gpuhook.core.inventory.model import Inventory, Node
from gpuhook.vendors import registry

VENDORS = [name for name in registry.KNOWN if name != "nvidia"]
Settings = dict[str, object]


def ask(vendor: str, words: str) -> str:
    """Return a variable that asks for devices of a vendor."""
    return f"{next(iter(registry.KNOWN[vendor].VARIABLES))}={words}"


@pytest.mark.parametrize("names", registry.KNOWN.values(), ids=registry.KNOWN)
def test_what_documents_make_void_is_a_variable_of_the_vendors(names: ModuleType) -> None:
    assert names.VOID in {"", *names.VARIABLES}


# What is found -------------------------------------------------------------------------------


@pytest.mark.parametrize("names", registry.KNOWN.values(), ids=registry.KNOWN)
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
    "a driver that hangs in a file of /sys keeps no start and no command waiting",
)
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_file_of_the_driver_that_hangs(
    vendor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a start nor a command waits for it without end."""
    Machine(vendor, tmp_path)
    loaded = contract.load(registry.KNOWN[vendor])
    monkeypatch.setattr(loaded, "_discover", lambda _: time.sleep(20))
    config = loads(f'[gpuhook]\ndriver-roots = ["{vendor}={tmp_path}"]\n')
    config.nvml_timeout = 0.05
    with pytest.raises(DriverError, match=r"a file of it didn't respond within 0\.05 seconds"):
        loaded.discover(config)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_driver_without_devices(vendor: str, tmp_path: Path) -> None:
    assert machine(vendor, tmp_path, 0).devices == ()


FIRST_TWELVE = [str(number) for number in range(12) if number != 3]
ORDERS: dict[str, tuple[str, int, Settings, list[str], list[str]]] = {
    "neuron": ("neuron", 12, {"gap": 3}, FIRST_TWELVE, ["/dev/neuron11"]),
    "gaudi": (
        "gaudi", 12, {"gap": 3}, FIRST_TWELVE,
        ["/dev/accel/accel11", "/dev/accel/accel_controlD11", "/dev/infiniband/uverbs11"],
    ),
    "ascend": (
        "ascend", 0, {"numbers": ",".join(reversed(FIRST_TWELVE))}, FIRST_TWELVE,
        ["/dev/davinci11"],
    ),
    "ascend whose class alone shows numbers": (
        "ascend", 11, {"pci": "no", "chip": "310B"}, [*map(str, range(11))], ["/dev/davinci10"],
    ),
    "intel_gpu": (
        "intel_gpu", 20, {"driver": "xe"}, [*map(str, range(20))],
        ["/dev/dri/card19", "/dev/dri/renderD147"],
    ),
    "intel_npu beside another maker's": (
        "intel_npu", 12, {"first": 1, "decoy": "yes"}, [*map(str, range(1, 13))],
        ["/dev/accel/accel12"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("vendor", "count", "settings", "expected", "last"), ORDERS.values(), ids=ORDERS
)
def test_ten_and_more_are_in_the_order_of_their_numbers(
    vendor: str,
    count: int,
    settings: Settings,
    expected: list[str],
    last: list[str],
    tmp_path: Path,
) -> None:
    found = machine(vendor, tmp_path, count, **settings)
    assert [device.label for device in found.devices] == expected
    assert list(found.devices[-1].nodes) == last


@pytest.mark.parametrize(
    ("vendor", "settings"),
    [
        ("amd", {"model": "AMD Instinct MI308X"}),
        ("neuron", {"half_made": 1}),
        ("gaudi", {"net": 1, "reset": 2}),
        ("ascend", {"vnpus": "116,117"}),
        ("intel_gpu", {"cards": 1, "vfs": 2, "vm": 2}),
        ("intel_npu", {}),
    ],
)
def test_an_inventory_is_saved_without_loss(
    vendor: str, settings: Settings, tmp_path: Path
) -> None:
    found = machine(vendor, tmp_path, 3, **settings)
    assert all(found.node(path) for device in found.devices for path in device.nodes)
    assert type(found).from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("vendor", "path", "said"),
    [
        ("amd", "/dev/dri/card1", "is another device's node (9:9, not "),
        ("neuron", "/dev/neuron1", "is another device (the driver's is "),
        ("gaudi", "/dev/accel/accel1", "is another device (the driver's is "),
        ("ascend", "/dev/davinci1", "has the numbers 9:9, but its driver's are "),
        ("intel_gpu", "/dev/dri/renderD129", "has the numbers 9:9, but its driver's are "),
        ("intel_npu", "/dev/accel/accel1", "has the numbers 9:9, but its driver's are "),
    ],
)
def test_a_node_with_other_numbers_than_the_drivers(
    vendor: str, path: str, said: str, tmp_path: Path
) -> None:
    made = Machine(vendor, tmp_path, 2)
    made.nodes[path] = Node(path, 9, 9)
    found = made.look()
    fine, wrong = found.devices
    assert fine.state == ""
    assert f"{path} {said}" in wrong.state or f"{path.rpartition('/')[2]} {said}" in wrong.state
    assert labels(resolved(found, ask(vendor, "all"))) == ["0"]
    with pytest.raises(LostDeviceError, match=r"9:9|another device"):
        resolved(found, ask(vendor, "1"))


def _replace(path: str, text: str) -> Callable[[Machine], object]:
    return lambda made: made.text(path, text)


def _make(path: str) -> Callable[[Machine], object]:
    return lambda made: (made.place / path.lstrip("/")).mkdir(parents=True)


def _remove(path: str) -> Callable[[Machine], object]:
    return lambda made: (made.place / path.lstrip("/")).unlink()


GAUDI = "/sys/bus/pci/drivers/habanalabs/0000:1a:00.0"
NEURON = "/sys/class/neuron_device"
INTEL = "/sys/bus/pci/drivers"
ASCEND = "/usr/local/Ascend/driver"
NPU = "/sys/devices/pci0000:00/0000:01:00.0"
CHANGES: list[tuple[str, Callable[[Machine], object]]] = [
    ("gaudi", _replace(f"{GAUDI}/status", "In reset\n")),
    ("gaudi", _make(f"{GAUDI}/accel/accel7")),
    ("gaudi", _make(f"{GAUDI}/infiniband_verbs/uverbs7")),
    ("gaudi", _make(f"{GAUDI}/net/ens1")),
    ("gaudi", _remove(GAUDI)),
    ("neuron", _replace(f"{NEURON}/neuron0/dev", "9:9\n")),
    ("neuron", _make(f"{NEURON}/neuron2")),
    ("neuron", _replace(f"{NEURON}/neuron0/info/serial_number", "00a1b2c3d4e50001\n")),
    ("ascend", lambda made: made.node("/dev/uburma/ub7", 9, 9)),
    ("ascend", lambda made: made.node("/dev/davinci9", 9, 9)),
    ("ascend", _replace("/etc/ascend-docker-runtime.d/new.list", "/opt\n")),
    ("ascend", _replace(f"{ASCEND}/version.info", "Version=25\n")),
    ("ascend", _replace(f"{ASCEND}/lib64/driver/libnew.so", "")),
    ("ascend", _replace("/sys/class/devdrv-class/vdavinci100/dev", "1:1\n")),
    ("ascend", _replace("/sys/class/devdrv-class/davinci0/dev", "9:9\n")),
    ("ascend", _replace(f"{NPU}/dev_id", "1\n")),
    ("ascend", _replace(f"{NPU}/devdrv_sysfs_bdf_to_devid", "01:00.0 1 0\n02:00.0 0 0\n")),
    ("intel_gpu", _remove(f"{INTEL}/i915/0000:04:00.0")),
    ("intel_gpu", _make("/sys/devices/pci0000:00/0000:03:00.0/drm/card7")),
    ("intel_gpu", _make(f"{INTEL}/xe")),
    ("intel_gpu", lambda made: shutil.rmtree(made.place / "dev/dri")),
    ("intel_npu", _remove(f"{INTEL}/intel_vpu/0000:00:0b.0")),
    ("intel_npu", _make(f"{INTEL}/intel_vpu/0000:00:0b.0/accel/accel9")),
    ("intel_npu", _remove("/dev/accel/accel0")),
]


@pytest.mark.parametrize(("vendor", "change"), CHANGES)
def test_a_change_is_noticed(
    vendor: str, change: Callable[[Machine], object], tmp_path: Path
) -> None:
    made = Machine(vendor, tmp_path, 2)
    config = loads(f'gpuhook.driver-roots = ["{vendor}={tmp_path}"]\n')
    loaded = contract.load(registry.KNOWN[vendor])
    before = fingerprint.surroundings(config, loaded)
    assert fingerprint.surroundings(config, loaded) == before
    change(made)
    assert fingerprint.surroundings(config, loaded) != before


# What containers get -------------------------------------------------------------------------

# In the order of their numbers: AMD's second GPU is in four parts with one id; Gaudis have the
# seats 3 2 1 0 7 6 5 4; the second NPU of Ascend's is split; of Intel's GPUs the third has two
# virtual functions.
MACHINES: dict[str, tuple[int, Settings]] = {
    "amd": (3, {"split": 1, "partitions": 4, "ids": "shared"}),
    "neuron": (16, {}),
    "gaudi": (8, {}),
    "ascend": (4, {"vnpus": "116,117"}),
    "intel_gpu": (3, {"cards": 1, "vfs": 2, "vm": 2}),
    "intel_npu": (3, {}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inventory]:
    return {
        vendor: machine(vendor, tmp_path_factory.mktemp(vendor), count, **settings)
        for vendor, (count, settings) in MACHINES.items()
    }


DEVICES, MODULES, BUS_IDS = (
    "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_PCI_BUS_IDS",
)  # fmt: skip
SIXTEEN = " ".join(map(str, range(16)))
# Vendor, what is asked for by its first variable, or as NAME=VALUE, and the devices.
MEANT = [
    ("amd", "0", "0"),
    ("amd", "5,0,5", "5 0"),
    ("amd", "0-2,1", "0 1 2"),
    ("amd", "0x84cafeae17e7620", "5"),
    ("amd", "84CAFEAE17E7620", "5"),
    ("amd", "0X084cafeae17e7620", "5"),
    ("amd", "0x84cafeae17e7610", "1 2 3 4"),
    ("amd", "0x84cafeae17e7610:2", "3"),
    ("amd", "2,0x84cafeae17e7610", "2 1 3 4"),
    ("amd", "0000:0b:00.0", "5"),
    ("amd", "08:00.0", "1 2 3 4"),
    ("amd", "ALL", "0 1 2 3 4 5"),
    ("amd", " 0 , 2,0 ", "0 2"),
    ("amd", "0,ALL", "0 1 2 3 4 5"),
    ("amd", "None", ""),
    ("amd", "amd.com/gpu=0", "0"),
    ("neuron", "all", SIXTEEN),
    ("neuron", "All", SIXTEEN),
    ("neuron", "none", ""),
    ("neuron", "2-4", "2 3 4"),
    ("neuron", " 3 , 2,,3 ", "3 2"),
    ("neuron", "9-11", "9 10 11"),
    ("neuron", "00a1b2c3d4e5000b", "11"),
    ("neuron", "aws.amazon.com/neuron=2,aws.amazon.com/neuron=3", "2 3"),
    ("neuron", "aws.amazon.com/neuron=neuron2", "2"),
    ("neuron", "aws.amazon.com/neuron=all", SIXTEEN),
    ("gaudi", "ALL", "0 1 2 3 4 5 6 7"),
    ("gaudi", "none", ""),
    ("gaudi", "4-6, 1 ,,4", "4 5 6 1"),
    ("gaudi", "0000:19:00.0,1A:00.0", "0 1"),
    ("gaudi", f"{MODULES}=0", "3"),
    ("gaudi", f"{MODULES}=0-3", "3 2 1 0"),
    ("gaudi", f"{MODULES}=7,6", "4 5"),
    ("gaudi", f"{BUS_IDS}=0000:20:00.0", "7"),
    ("gaudi", f"{DEVICES}=all {MODULES}=0,1", "3 2"),
    ("gaudi", f"{DEVICES}=all {MODULES}=all {BUS_IDS}=19:00.0", "0"),
    ("gaudi", f"{DEVICES}=all {MODULES}= {BUS_IDS}=", "0 1 2 3 4 5 6 7"),
    ("gaudi", f"{DEVICES}=2 {MODULES}=0", "2"),
    ("gaudi", f"{DEVICES}=0 {DEVICES}=1", "1"),
    ("gaudi", "habana.ai/gaudi=2", "2"),
    ("gaudi", "habana.ai/gaudi=accel2", "2"),
    ("gaudi", "habana.ai/gaudi=0000:1b:00.0", "2"),
    ("ascend", "0", "0"),
    ("ascend", "2 - 3, 0,2", "2 3 0"),
    ("ascend", "npu-2,0", "2 0"),
    ("ascend", "ascend910-3", "3"),
    ("ascend", "0000:03:00.0", "2"),
    ("ascend", "117", "117"),
    ("ascend", "vnpu-116", "116"),
    ("ascend", "all", "0 2 3 116 117"),
    ("ascend", "ALL", "0 2 3 116 117"),
    ("ascend", "ascend.com/npu=vnpu117", "117"),
    ("ascend", "none", ""),
    ("intel_gpu", "0", "0"),
    ("intel_gpu", "0 - 1, 1", "0 1"),
    ("intel_gpu", "card3", "2"),
    ("intel_gpu", "2.1", "2.1"),
    ("intel_gpu", "0000-04-00-0-0x56c0", "1"),
    ("intel_gpu", "04:00.0", "1"),
    ("intel_gpu", "all", "0 1 2 2.0 2.1"),
    ("intel_gpu", "intel.com/gpu=card2", "1"),
    ("intel_gpu", "intel.com/gpu=gpu0", "0"),
    ("intel_gpu", "intel.com/gpu=vf2.0", "2.0"),
    ("intel_gpu", "none", ""),
    ("intel_npu", "0", "0"),
    ("intel_npu", "1-2,0", "1 2 0"),
    ("intel_npu", "accel2", "2"),
    ("intel_npu", "01:0b.0", "1"),
    ("intel_npu", "all", "0 1 2"),
    ("intel_npu", "intel.com/npu=0", "0"),
    ("intel_npu", "intel.com/npu=npu1", "1"),
]


def env_of(vendor: str, asked: str) -> list[str]:
    return asked.split() if "VISIBLE" in asked else [ask(vendor, asked)]


@pytest.mark.parametrize(("vendor", "asked", "expected"), MEANT)
def test_which_are_meant(
    found: dict[str, Inventory], vendor: str, asked: str, expected: str
) -> None:
    answer = resolved(found[vendor], *env_of(vendor, asked))
    assert " ".join(labels(answer)) == expected


NPU_GROUP = 106


def test_the_group_of_the_nodes_comes_with_them(found: dict[str, Inventory]) -> None:
    assert set(resolved(found["intel_npu"], "INTEL_VISIBLE_NPUS=0").groups) == {NPU_GROUP}


IT_HAS = {
    "amd": r"This host has no AMD GPU .* it has 0 \(0x84cafeae17e7600\), 1 \(0x84c.*10:0\)",
    "neuron": r"no Neuron device .* it has 0 \(00a1b2c3d4e50000\), 1 \(00a1b2c3d4e50001\)",
    "gaudi": r"no Gaudi .* it has 0(000:19:00\.0| \(0000:19:00\.0\)|, 1, 2, 3 and 4 more\. )",
    "ascend": r"no NPU or vNPU .* it has 0 \(npu-0\)",
    "intel_gpu": r"it has 0 \(card1\), 1 \(card2\), 2 \(card3\)",
    "intel_npu": r"no NPU .* it has 0 \(accel0\)",
}
NOT_THERE = {
    "amd": ["6", "4-6", "0x84cafeae17e76", "card0", "0000:0c:00.0", "-1"],
    "neuron": ["16", "0-16", "neuron0", "/dev/neuron0", "1.0", "-1"],
    "gaudi": ["8", "accel0", "0-8", f"{MODULES}=8", f"{MODULES}=0000:19:00.0", f"{BUS_IDS}=0",
              "habana.ai/gaudi=8"],
    "ascend": ["9", "npu-0-3"],
    "intel_gpu": ["3", "card0", "card", "2.2", "renderD129", "0000:06:00.0"],
    "intel_npu": ["3", "card0"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("vendor", "asked"), [(name, word) for name, words in NOT_THERE.items() for word in words]
)
def test_what_is_not_there_is_refused(found: dict[str, Inventory], vendor: str, asked: str) -> None:
    with pytest.raises(UnknownDeviceError, match=IT_HAS[vendor]):
        resolved(found[vendor], *env_of(vendor, asked))


@pytest.mark.parametrize(
    ("vendor", "asked"),
    [
        *[("neuron", word) for word in ("", "void", "VOID", " , ")],
        ("gaudi", ""),
        ("gaudi", "void"),
        ("gaudi", f"{MODULES}=Void"),
        ("gaudi", f"{DEVICES}=all {MODULES}=void"),
        ("gaudi", f"{DEVICES}X=0"),
        ("gaudi", "VISIBLE"),
        ("amd", "0,Void"),
        ("amd", ""),
        ("amd", " , "),
        ("amd", "ROCR_VISIBLE_DEVICES=0 HIP_VISIBLE_DEVICES=0 GPU=0"),
        ("amd", "AMD_VISIBLE_DEVICES_X=0 DOCKER_RESOURCE_GPU=0x1"),
    ],
)
def test_what_asks_for_nothing(found: dict[str, Inventory], vendor: str, asked: str) -> None:
    assert answered(found[vendor], *env_of(vendor, asked)) is None


@pytest.mark.parametrize("vendor", VENDORS)
def test_beside_nvidia(found: dict[str, Inventory], vendor: str) -> None:
    nvidia = machines.machine(machines.gpu(0, 3))
    env = (ask(vendor, "0"), "NVIDIA_VISIBLE_DEVICES=0")
    plan = planned(found[vendor], *env, beside=[nvidia])
    assert {*found[vendor].devices[0].nodes, "/dev/nvidia3"} < {*places(plan)}
    kinds = [op.kind for op in plan.operations]
    assert kinds.count("ldcache") == 1
    assert kinds[-1] == "ldcache"


@pytest.mark.parametrize(
    ("vendor", "settings", "paths"),
    [
        ("neuron", {"no_node": 1}, "/dev/neuron1"),
        ("gaudi", {"no_node": 1}, "/dev/accel/accel1, /dev/accel/accel_controlD1"),
        ("ascend", {"missing": "davinci1"}, "/dev/davinci1"),
        ("intel_gpu", {"no_node": 1}, "/dev/dri/card1"),
        ("intel_npu", {"no_node": 1}, "/dev/accel/accel1"),
    ],
)
def test_a_node_that_is_missing(
    vendor: str, settings: Settings, paths: str, tmp_path: Path
) -> None:
    there = machine(vendor, tmp_path, 2, **settings)
    assert labels(resolved(there, ask(vendor, "0"))) == ["0"]
    with pytest.raises(DriverError, match=f"'s driver has no node {paths}"):
        resolved(there, ask(vendor, "1"))


# Documents and simulators --------------------------------------------------------------------


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_document_names_each_device_and_switches_the_variable_off(
    found: dict[str, Inventory], vendor: str
) -> None:
    """A container with one requests nothing by the variable; split devices are listed by part."""
    loaded = contract.load(registry.KNOWN[vendor])
    source = Source(loaded, found[vendor], loads(""), "/hook")
    document = generate(source, ("index",)).document
    assert document["kind"] == registry.KNOWN[vendor].KIND
    devices = found[vendor].devices
    split = {device.parent for device in devices}
    usable = {each.label for each in devices if not each.state and each.id not in split}
    assert {each["name"] for each in document["devices"]} == {*usable, "all"}
    assert ask(vendor, "void") in document["containerEdits"].get("env", [])
    with_hooks = {"ascend", "intel_gpu"}  # of the loader's cache, and of links
    assert ("hooks" in document["containerEdits"]) == (vendor in with_hooks)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_simulator_has_no_setting_of_another_name(vendor: str, tmp_path: Path) -> None:
    with pytest.raises(SimulateError, match="has no setting 'colour'"):
        Machine(vendor, tmp_path, 1, colour="red")


@pytest.mark.parametrize(
    ("vendor", "settings", "message"),
    [
        ("neuron", {"family": "Trn9"}, "no family 'Trn9'"),
        ("gaudi", {"type": "GAUDI9"}, "no type 'GAUDI9'"),
        ("ascend", {"chip": "9"}, "'9' isn't an Ascend chip"),
        ("intel_gpu", {"driver": "nouveau"}, "isn't a driver of"),
    ],
)
def test_what_a_simulator_refuses(
    vendor: str, settings: Settings, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SimulateError, match=message):
        Machine(vendor, tmp_path, 1, **settings)


# Whose a node is -----------------------------------------------------------------------------


def two_of(vendor: str, root: Path) -> Inventory:
    if vendor == "nvidia":
        return machines.machine(machines.gpu(0, 1), machines.gpu(1, 0))
    found: Inventory = machine(vendor, root, 2)
    return found


@pytest.mark.parametrize("vendor", registry.KNOWN)
def test_what_comes_with_one_device_alone_is_that_devices(vendor: str, tmp_path: Path) -> None:
    """Exclusive devices and limits depend on it, whatever gives a container such a node."""
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
