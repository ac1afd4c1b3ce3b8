"""Sensors of PCI devices in sysfs, below a driver root: temperature, power, energy, memory, load.

They are small files, the first three the same for every driver with a hwmon device
(Documentation/hwmon/sysfs-interface.rst): millidegrees Celsius, microwatts, hertz, microjoules. A
DRM driver may have more (Documentation/gpu): bytes, percent. No driver library is used.
"""

from collections import Counter
from collections.abc import Callable

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.core.inventory.model import Inventory
from gpuhook.vendors import sysfs_devices

Values = dict[str, float]
Asking = Callable[[str], bool]
_MOST = 1 << 64
_DIGITS = 20  # of a number of 64 bits
_DEVICES = "/sys/bus/pci/devices"
# The first existing file of each: drivers report either the current power or a mean.
_SENSORS = (
    ("temperature_celsius", ("temp1_input", "temp2_input"), 1000),
    ("power_watts", ("power1_average", "power1_input"), 1_000_000),
    ("power_limit_watts", ("power1_cap",), 1_000_000),
    ("clock_mhz", ("freq1_input",), 1_000_000),
    ("energy_joules", ("energy1_input",), 1_000_000),
)
# In the device's own folder.
_FACTS = (
    ("memory_total_bytes", "mem_info_vram_total", 1),
    ("memory_used_bytes", "mem_info_vram_used", 1),
    ("utilization", "gpu_busy_percent", 100),
)


def read(inventory: Inventory, asking: Asking) -> dict[str, Values]:
    """Return values of the devices, by their ids and by fields of the exporter's ``Device``.

    ``asking`` is called before the files of a device are read, and tells whether to read them.
    Partitions of one PCI device have no values, because the values are those of the whole device.
    """
    shared = Counter(device.bus_id for device in inventory.devices)
    found: dict[str, Values] = {}
    try:
        with Rootfs(inventory.root) as root:
            for device in inventory.devices:
                own = sysfs_devices.is_address(device.bus_id) and shared[device.bus_id] == 1
                if own and asking(device.id):
                    folder = f"{_DEVICES}/{device.bus_id}"
                    found[device.id] = {**_sensors(root, folder), **_facts(root, folder)}
    except OSError:
        pass  # the root is gone, which the inventory detects
    return found


def integer(root: Rootfs, path: str) -> int | None:
    """Return the number in a small file, None if there is none."""
    text = sysfs_devices.text(root, path)
    is_plain = len(text) <= _DIGITS and text.isascii() and text.removeprefix("-").isdecimal()
    number = int(text) if is_plain else _MOST
    return number if abs(number) < _MOST else None


def _sensors(root: Rootfs, folder: str) -> Values:
    numbers = sysfs_devices.numbered(root, f"{folder}/hwmon", "hwmon")
    found: Values = {}
    for name, files, per_unit in _SENSORS:
        every = (
            integer(root, f"{folder}/hwmon/hwmon{number}/{file}")
            for number in numbers
            for file in files
        )
        value = next((each for each in every if each is not None), None)
        if value is not None:
            found[name] = value / per_unit
    return found


def _facts(root: Rootfs, folder: str) -> Values:
    found = {name: (integer(root, f"{folder}/{file}"), unit) for name, file, unit in _FACTS}
    return {
        name: value if unit == 1 else value / unit
        for name, (value, unit) in found.items()
        if value is not None
    }
