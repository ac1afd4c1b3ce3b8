"""Discovery of Ascend NPUs below a driver root, without opening a device.

An NPU is a device that the driver has numbered: in the PCI folders that are bound to it, and in
its class. If both are missing (chips that aren't on a PCI bus), nodes count that have the driver's
major from /proc/devices.
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import NoDriverError
from gpuhook.base.oci.jsontext import Record
from gpuhook.core.inventory import fingerprint
from gpuhook.core.inventory.model import Device, DeviceNode
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.ascend import lists, names
from gpuhook.vendors.ascend.model import (
    CLASS,
    DRIVER_NAME,
    MANAGER,
    NUMBER,
    PCI_DRIVER,
    TABLE,
    UB_FOLDERS,
    VERSION,
    AscendInventory,
)
from gpuhook.vendors.ascend.variables import EVERY_VNPU

# If it exists, containers get this manager in place of the other one.
CONTAINERS_MANAGER = "/dev/davinci_manager_docker"
SHARED = ("/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist")
# Nodes of the chip 310B only: on other hosts, such names mean nothing.
OF_310B = tuple(
    f"/dev/{name}"
    for name in (
        "svm0", "ts_aisle", "upgrade", "sys", "vdec", "vpc", "pngd", "venc", "log_drv", "acodec",
        "ai", "ao", "vo", "hdmi",
    )
)  # fmt: skip

# PCI device -> the chip's name, all that the driver's own table has.
CHIPS = {
    "d100": "310", "d105": "310B", "d500": "310P", "d501": "310P", "d801": "910",
    "d802": "910B", "d803": "910B", "d804": "910C", "d805": "910B vNPU",
    "d806": "950", "d807": "950", "d808": "950",
}  # fmt: skip
# Further names of products, which may precede a device's number.
_PRODUCTS = ("npu", "Ascend910", "Ascend310", "Ascend310P", "Ascend310B")
_REGION = "devdrv-cdev"  # of the NPUs' nodes in /proc/devices
_FIRST_VNPU, _VNPUS = 100, 16  # npu-smi numbers vNPUs from 100 on, 16 numbers for each NPU


class _Npu(Record):
    """A device before its nodes are read."""

    number: int
    bus_id: str = ""
    model: str = ""
    dev: str = ""


def discover(path: str) -> AscendInventory:
    """Discover the devices below the driver root; DriverError if there is no driver."""
    return sysfs_devices.discover_below(names.TITLE, path, _discover)


def _discover(root: Rootfs) -> AscendInventory:
    folders = sysfs_devices.devices(root, DRIVER_NAME)
    if not folders and not any(map(root.exists, (PCI_DRIVER, CLASS, MANAGER))):
        raise NoDriverError(
            "Ascend's driver isn't loaded",
            "Install Huawei's driver for the NPU or load it again; npu-smi info should list NPUs",
        )
    npus = _by_number(root, "davinci", _on_pci(root, folders))
    vnpus = _by_number(root, "vdavinci", [])
    split = {(number - _FIRST_VNPU) // _VNPUS for number in vnpus if number >= _FIRST_VNPU}
    devices = [_npu(root, npus[number], split) for number in sorted(npus)]
    devices += [_vnpu(root, vnpus[number], npus) for number in sorted(vnpus)]
    control, optional = _control(root, folders)
    paths = (*control, *(path for device in devices for path in device.nodes))
    found = [DeviceNode.of(path, root.stat(path), _inside(path)) for path in dict.fromkeys(paths)]
    nodes = tuple(node for node in found if node is not None)
    listed = lists.find(root)
    absent = fingerprint.missing(root.path, [*optional, *listed.absent])
    return AscendInventory(
        names.NAME, root.path, _version(root), tuple(devices), nodes, control,
        listed.files, lists=listed.lists, absent=tuple(absent),
    )  # fmt: skip


# Devices -------------------------------------------------------------------------------------


def _by_number(root: Rootfs, beginning: str, on_pci: list[_Npu]) -> dict[int, _Npu]:
    """Return the devices by the number in their nodes' names, from all of the driver's sources."""
    found = {each.number: each for each in on_pci}
    for each in _in_class(root, beginning):
        found.setdefault(each.number, each).dev = each.dev
    return found or {each.number: each for each in _with_its_major(root, beginning)}


def _on_pci(root: Rootfs, folders: list[str]) -> list[_Npu]:
    found = []
    for folder in folders:
        address = _address(folder)
        bus_id = sysfs_devices.text(root, f"{folder}/bus_name") or address
        short = address.partition(":")[2]
        alone = [each.partition(":")[2] for each in map(_address, folders)].count(short) == 1
        table = rows(sysfs_devices.text(root, f"{folder}/{TABLE}")) if alone else []
        numbers = [number for bdf, number, _ in table if bdf == short]
        own = sysfs_devices.number("." + sysfs_devices.text(root, f"{folder}/{NUMBER}"), ".")
        numbers = numbers or ([own] if own is not None else [])
        found += [_Npu(number, bus_id, _model(root, folder)) for number in numbers]
    return found


def _address(folder: str) -> str:
    return folder.rpartition("/")[2]


def rows(text: str) -> list[tuple[str, int, int]]:
    """Return the rows of the driver's table: bus address without domain, number, suffix."""
    found = []
    for line in text.split("\n"):
        words = sysfs_devices.words(line)
        numbers = [sysfs_devices.number(f".{word}", ".") for word in words[1:]]
        if len(words) == 3 and None not in numbers:
            found.append((words[0].lower(), int(words[1]), int(words[2])))
    return found


def _in_class(root: Rootfs, beginning: str) -> list[_Npu]:
    return [
        _Npu(number, dev=sysfs_devices.text(root, f"{CLASS}/{beginning}{number}/dev"))
        for number in sysfs_devices.numbered(root, CLASS, beginning)
    ]


def _with_its_major(root: Rootfs, beginning: str) -> list[_Npu]:
    rows_of = [
        sysfs_devices.words(line) for line in sysfs_devices.text(root, "/proc/devices").split("\n")
    ]
    majors = {words[0] for words in rows_of if words[1:] == [_REGION]}
    found = []
    for number in sysfs_devices.numbered(root, "/dev", beginning):
        path = f"/dev/{beginning}{number}"
        node = DeviceNode.of(path, root.stat(path))
        if node is not None and str(node.major) in majors:
            found.append(_Npu(number))
    return found


# Properties ----------------------------------------------------------------------------------


def _npu(root: Rootfs, npu: _Npu, split: set[int]) -> Device:
    number = npu.number
    called = {
        "index": (str(number),),
        "name": tuple(f"{product}-{number}" for product in _PRODUCTS),
    }
    if npu.bus_id:
        called["bus_id"] = (npu.bus_id,)
    path = f"/dev/davinci{number}"
    state = sysfs_devices.wrong_numbers(DeviceNode.of(path, root.stat(path)), npu.dev)
    state = state or ("it is split into vNPUs" if number in split else "")
    return Device(f"npu-{number}", str(number), called, (path,), npu.bus_id, npu.model, state=state)


def _vnpu(root: Rootfs, vnpu: _Npu, npus: dict[int, _Npu]) -> Device:
    number = vnpu.number
    called: dict[str, tuple[str, ...]] = {"name": (f"vnpu-{number}", EVERY_VNPU)}
    if number not in npus:
        called["index"] = (str(number),)
    whole = npus.get((number - _FIRST_VNPU) // _VNPUS) if number >= _FIRST_VNPU else None
    path = f"/dev/vdavinci{number}"
    wrong = sysfs_devices.wrong_numbers(DeviceNode.of(path, root.stat(path)), vnpu.dev)
    return Device(
        f"vnpu-{number}", str(number), called, (path,),
        whole.bus_id if whole else "", f"{whole.model} vNPU" if whole else "Ascend vNPU",
        f"npu-{whole.number}" if whole else "", wrong,
    )  # fmt: skip


def _inside(path: str) -> str:
    """Return the path that Ascend's libraries use for a node, "" if it is the host's."""
    if path == CONTAINERS_MANAGER:
        return MANAGER
    return path.replace("/vdavinci", "/davinci") if path.startswith("/dev/vdavinci") else ""


def _control(root: Rootfs, folders: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the nodes that go with every device, and the missing ones that would.

    The existing ones depend on the chip's family. The manager is always required.
    """
    chips = {CHIPS.get(_pci_device(root, folder)) for folder in folders}
    edge = not folders or "310B" in chips
    manager = CONTAINERS_MANAGER if edge and _is_node(root, CONTAINERS_MANAGER) else MANAGER
    optional = [*SHARED, *(OF_310B if edge else ())]
    optional += [f"{folder}/{each}" for folder in UB_FOLDERS for each in root.list_folder(folder)]
    there = [path for path in optional if _is_node(root, path)]
    others = [CONTAINERS_MANAGER] if edge and manager == MANAGER else []
    return (manager, *there), [*others, *(path for path in optional if path not in there)]


def _is_node(root: Rootfs, path: str) -> bool:
    return DeviceNode.of(path, root.stat(path)) is not None


def _model(root: Rootfs, folder: str) -> str:
    device = _pci_device(root, folder)
    return f"Ascend {CHIPS.get(device, device)}".strip()


def _pci_device(root: Rootfs, folder: str) -> str:
    return sysfs_devices.text(root, f"{folder}/device").removeprefix("0x")


def _version(root: Rootfs) -> str:
    for line in sysfs_devices.text(root, VERSION).split("\n"):
        key, _, value = line.partition("=")
        if key.strip().lower() == "version" and value.strip():
            return value.strip()
    return "of unknown version"
