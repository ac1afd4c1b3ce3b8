"""Checks of Neuron's driver for the doctor."""

from collections.abc import Callable, Iterator

from gpuhook.base.errors import listed
from gpuhook.tools.doctor.case import VendorChecks
from gpuhook.tools.doctor.driver import DriverCheck
from gpuhook.tools.doctor.finding import Finding, warning
from gpuhook.tools.doctor.machine import Machine
from gpuhook.vendors.neuron.discover import connected, device_numbers, product
from gpuhook.vendors.neuron.vendor import CLASS, VENDOR, NeuronInventory, between, ranges

_CHECK = "neuron-devices"
_RELOAD = VENDOR.names.LOST_REMEDY


def _is_device(fact: Callable[[str], str]) -> bool:
    return bool(product(fact("vendor"), fact("device")))


def _stray_nodes(driver: Machine, inventory: NeuronInventory) -> Iterator[Finding]:
    names = [path.rpartition("/")[2] for path in driver.glob("/dev/neuron*")]
    known = {f"neuron{device.label}" for device in inventory.devices}
    stray = [f"/dev/neuron{n}" for n in device_numbers(names) if f"neuron{n}" not in known]
    if stray:
        text = f"The driver has no device of the node {listed(stray)}; no container gets it"
        yield warning(_CHECK, text, "Remove the rule or script that creates the node")


def _gaps(driver: Machine, inventory: NeuronInventory) -> Iterator[Finding]:
    """Report missing devices, by the numbers of the others and by their connections."""
    have = [int(device.label) for device in inventory.devices]
    gone = {*between(have)}
    for number in have:
        gone |= {*connected(driver.text(f"{CLASS}/neuron{number}/connected_devices") or "")}
    gone -= {*have}
    if gone:
        text = f"There is no Neuron device {ranges(gone)}: no container gets those on both sides"
        yield warning(_CHECK, text, _RELOAD)


def _further(driver: Machine, inventory: NeuronInventory) -> Iterator[Finding]:
    yield from _stray_nodes(driver, inventory)
    yield from _gaps(driver, inventory)


neuron_devices = DriverCheck(
    VENDOR,
    _CHECK,
    _is_device,
    without=_RELOAD,
    udev="Install the package aws-neuronx-dkms, whose udev rule permits all users",
    is_for_everybody=True,
    more=_further,
)
CHECKS = VendorChecks(
    (neuron_devices,),
    report_files=(
        "/sys/module/neuron/version",
        f"{CLASS}/neuron*/dev",
        f"{CLASS}/neuron*/core_count",
        f"{CLASS}/neuron*/connected_devices",
        f"{CLASS}/neuron*/info/architecture/*",
    ),
    report_nodes=("/dev/neuron*",),
)
