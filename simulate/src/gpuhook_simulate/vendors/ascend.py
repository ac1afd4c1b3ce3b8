"""A driver root with simulated NPUs: only the files that discover reads.

Settings: ``chip`` (910, 910B, 310P, 310, 310B or 950), ``numbers`` of the NPUs if they don't
start at 0, ``vnpus`` (100,101), ``group`` of the nodes, ``missing`` nodes (davinci1,hisi_hdc),
``ub`` nodes of the UB bus (ub0,ub1), ``pci=no`` for a driver that has the numbers only in its
class, ``lists=no`` for no lists of files, ``decoys=yes`` for files that only resemble an NPU.
"""

from gpuhook.base.errors import SimulateError, shown
from gpuhook.vendors.ascend import discover
from gpuhook.vendors.ascend.lists import DEFAULT
from gpuhook.vendors.ascend.model import (
    CLASS,
    DRIVER,
    LISTS,
    MANAGER,
    PCI_DRIVER,
    UB_FOLDERS,
    VERSION,
)
from gpuhook_simulate.library import shared_library
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.settings import checked
from gpuhook_simulate.tree import Tree

SETTINGS = {
    "chip": "910B", "numbers": "", "vnpus": "", "group": "1000", "missing": "", "ub": "",
    "pci": "yes", "lists": "yes", "decoys": "no",
}  # fmt: skip
# Chip -> its PCI device id, and the shared nodes that its driver creates.
CHIPS = {
    "310": ("d100", discover.SHARED),
    "310B": ("d105", ("/dev/dvpp_cmdlist", discover.CONTAINERS_MANAGER, *discover.OF_310B)),
    "310P": ("d500", discover.SHARED),
    "910": ("d801", discover.SHARED),
    "910B": ("d802", discover.SHARED),
    "950": ("d806", ("/dev/hisi_hdc",)),
}
_FILES = {
    VERSION: "Version=24.1.rc3\n",
    f"{DRIVER}/include/dcmi_interface_api.h": "\n",
    "/usr/local/dcmi/dcmi_interface_api.h": "\n",
    "/var/queue_schedule": "\n",
    "/etc/ascend_install.info": "Driver_Install_Path_Param=/usr/local/Ascend\n",
    "/etc/hccl_rootinfo.json": '{"version":"1.0"}\n',
}
_LIBRARIES = {"common": "libc_sec.so", "driver": "libascend_hal.so"}


def simulate(tree: Tree, count: int, settings: dict[str, str]) -> list[str]:
    """Fill the tree; return lines about the devices."""
    settings = checked(settings, SETTINGS, "Ascend's simulator")
    if settings["chip"] not in CHIPS:
        raise SimulateError(
            f"{shown(settings['chip'])} isn't an Ascend chip", f"Use one of {', '.join(CHIPS)}"
        )
    known = machines_devices()
    majors = free_majors(("devdrv-cdev", "hisi_davinci_intf"), known)
    tree.text("proc/devices", devices_text(majors, known), 0o444)
    tree.folder(CLASS)
    numbers = [int(word) for word in _words(settings["numbers"])] or list(range(count))
    for position, number in enumerate(numbers):
        _npu(tree, position, number, settings)
    _nodes(tree, numbers, majors, settings)
    _files(tree, with_lists=settings["lists"] == "yes")
    if settings["decoys"] == "yes":
        _decoys(tree, majors["devdrv-cdev"])
    chip = settings["chip"]
    lines = [f"NPU {number}: Ascend {chip} at {_address(at)}" for at, number in enumerate(numbers)]
    return lines + [f"vNPU {number}" for number in _words(settings["vnpus"])]


def _words(value: str) -> list[str]:
    return [word for part in value.split(",") if (word := part.strip())]


def _address(position: int) -> str:
    return f"0000:{position + 1:02x}:00.0"


def _npu(tree: Tree, position: int, number: int, settings: dict[str, str]) -> None:
    """Create the PCI folder of an NPU: bus numbers run against its own, as on real boards."""
    if settings["pci"] != "yes":
        return
    address = _address(position)
    device = f"sys/devices/pci0000:00/{address}"
    facts = {
        "vendor": "0x19e5", "device": f"0x{CHIPS[settings['chip']][0]}", "dev_id": str(number),
        "chip_id": "0", "bus_name": address, "davinci_dev_num": "1",
        "devdrv_sysfs_bdf_to_devid": f"bdf      udevid add_id\n{address[5:]}  {number}      0",
    }  # fmt: skip
    for name, text in facts.items():
        tree.text(f"{device}/{name}", f"{text}\n", 0o444)
    tree.link(f"{device}/driver", f"../../../..{PCI_DRIVER.removeprefix('/sys')}")
    tree.link(f"{PCI_DRIVER}/{address}", f"../../../../devices/pci0000:00/{address}")
    tree.link(f"sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")


def _nodes(
    tree: Tree, numbers: list[int], majors: dict[str, int], settings: dict[str, str]
) -> None:
    missing = _words(settings["missing"])
    gid = int(settings["group"])
    minors = {f"davinci{number}": number for number in numbers}
    for position, word in enumerate(_words(settings["vnpus"])):
        minors[f"vdavinci{word}"] = 255 - position
    for name, minor in minors.items():
        tree.text(f"{CLASS}/{name}/dev", f"{majors['devdrv-cdev']}:{minor}\n", 0o444)
        if name not in missing:
            tree.node(f"/dev/{name}", majors["devdrv-cdev"], minor, 0o660, gid)
    shared = [MANAGER, *CHIPS[settings["chip"]][1]]
    shared += [f"{UB_FOLDERS[0]}/{word}" for word in _words(settings["ub"])]
    for minor, path in enumerate(shared):
        if path.rpartition("/")[2] not in missing:
            tree.node(path, majors["hisi_davinci_intf"], minor, 0o660, gid)


def _files(tree: Tree, *, with_lists: bool) -> None:
    for path, text in _FILES.items():
        tree.text(path, text)
    for folder, name in _LIBRARIES.items():
        tree.data(f"{DRIVER}/lib64/{folder}/{name}", shared_library(name), 0o755)
    tree.text("/usr/local/sbin/npu-smi", "#!/bin/sh\necho 'npu-smi 24.1.rc3'\n", 0o755)
    tree.link("/usr/local/bin/npu-smi", "../sbin/npu-smi")
    if with_lists:
        tree.text(f"{LISTS}/base.list", "".join(f"{path}\n" for path in DEFAULT[:5]), 0o440)


def _decoys(tree: Tree, major: int) -> None:
    """Create decoys: another driver's device, a file and an incomplete folder."""
    tree.node("/dev/davinci98", major - 1, 98)
    tree.text("/dev/davinci99", "")
    tree.folder(f"{CLASS}/davinci_manager")
    tree.text(f"{PCI_DRIVER}/bind", "", 0o200)
    tree.folder(f"{PCI_DRIVER}/0000:ff:00.0")
