"""Checks of Ascend's driver for the doctor.

A host without any sign of an NPU is not checked: most have none.
"""

from collections.abc import Callable, Iterator

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError
from gpuhook.base.oci import jsontext
from gpuhook.core.inventory import model
from gpuhook.tools.doctor.case import Case, CheckStep, VendorChecks
from gpuhook.tools.doctor.devices import is_on_bus, missing_nodes, unusable
from gpuhook.tools.doctor.finding import Finding, failure, ok, warning
from gpuhook.tools.doctor.machine import Machine
from gpuhook.vendors.ascend import names
from gpuhook.vendors.ascend.discover import CHIPS
from gpuhook.vendors.ascend.lists import TOPOLOGY
from gpuhook.vendors.ascend.model import CLASS, LISTS, MANAGER, PCI_DRIVER, VERSION, AscendInventory
from gpuhook.vendors.ascend.vendor import VENDOR

_SMALL = 1 << 16


def ascend_devices(case: Case) -> Iterator[Finding]:
    """Check that there is a driver, and which NPUs it can use."""
    if not _is_of_interest(case):
        return
    try:
        inventory = VENDOR.discover(case.config)
    except DriverError as error:
        yield failure("ascend-devices", error.cause, error.remedy)
        return
    text = f"Ascend's driver {inventory.version} has {len(inventory.devices)} NPUs and vNPUs"
    yield ok("ascend-devices", text)
    missing = model.Inventory.missing(inventory)
    yield from missing_nodes("ascend-nodes", "Ascend", missing)
    split = {device.parent for device in inventory.devices}
    whole = tuple(device for device in inventory.devices if device.id not in split)
    yield from unusable("ascend-devices", names.NOUN, names.LOST_REMEDY, whole)


def ascend_lists(case: Case) -> Iterator[Finding]:
    """Check that the lists of files for containers are valid."""
    if not _is_of_interest(case):
        return
    inventory = VENDOR.discover(case.config)
    assert isinstance(inventory, AscendInventory)  # noqa: S101 - it is Ascend's
    for each in inventory.lists:
        remedy = f"Correct {LISTS}/{each.name}.list"
        if each.problem:
            text = f"The list of files {each.name} can't be used: {each.problem}"
            yield failure("ascend-lists", text, remedy)
        for sentence in each.refused:
            yield warning("ascend-lists", sentence, remedy)
    yield from _topology(inventory)


def _topology(inventory: AscendInventory) -> Iterator[Finding]:
    """Compare the version of the topology file with the chip."""
    path = TOPOLOGY[0]
    try:
        with Rootfs(inventory.root) as root:
            data = jsontext.loads((root.read_file(path, _SMALL) or b"{}").decode())
    except (OSError, ValueError):
        yield warning("ascend-topology", f"{path} isn't JSON", "Create it again with Huawei's tool")
        return
    version = data.get("version") if isinstance(data, dict) else None
    chips = {device.model for device in inventory.devices}
    if version and chips and (version == "2.0") != (chips == {"Ascend 950"}):
        yield warning(
            "ascend-topology",
            f"{path} has version {version}, which is not for {', '.join(sorted(chips))}: jobs "
            "on several NPUs fail with it",
            "Create it again with Huawei's tool for this host",
        )


def _is_of_interest(case: Case) -> bool:
    """Tell whether the host has an NPU, or files of a driver for one."""
    driver = Machine(VENDOR.root(case.config))
    if any(map(driver.exists, (PCI_DRIVER, CLASS, MANAGER))) or is_on_bus(driver, _is_npu):
        return True
    return not driver.exists("/") and bool(case.config.own_driver_root(names.NAME))


def _is_npu(fact: Callable[[str], str]) -> bool:
    vendor, device = (fact(name).removeprefix("0x") for name in ("vendor", "device"))
    return vendor == names.PCI_VENDOR and device in CHIPS


CHECKS = VendorChecks(
    (ascend_devices, CheckStep(ascend_lists, needs=("ascend-devices",))),
    report_files=(
        VERSION,
        f"{LISTS}/*.list",
        f"{PCI_DRIVER}/*/device",
        f"{PCI_DRIVER}/*/dev_id",
        f"{CLASS}/*/dev",
    ),
    report_nodes=(
        "/dev/davinci*",
        "/dev/vdavinci*",
        "/dev/devmm_svm",
        "/dev/hisi_hdc",
        "/dev/dvpp_cmdlist",
    ),
)
