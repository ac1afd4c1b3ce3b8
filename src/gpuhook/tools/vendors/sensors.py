"""What the kernel says of how PCI devices are, below a driver root: temperature, power, energy.

Small files of sysfs, the same for every driver that has a hwmon device (Documentation/hwmon/
sysfs-interface.rst): millidegrees Celsius, microwatts, hertz, microjoules. No driver's library is
asked.
"""

from collections import Counter
from collections.abc import Callable

from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start.inventory.model import Inventory
from gpuhook.vendors import bound

Values = dict[str, float]
Asking = Callable[[str], bool]
_MOST = 1 << 64
_DIGITS = 20  # of a number of 64 bits
_DEVICES = "/sys/bus/pci/devices"
# Of each the first that there is: drivers say the power of a moment, or a mean.
_SENSORS = (
    ("temperature_celsius", ("temp1_input", "temp2_input"), 1000),
    ("power_watts", ("power1_average", "power1_input"), 1_000_000),
    ("power_limit_watts", ("power1_cap",), 1_000_000),
    ("clock_mhz", ("freq1_input",), 1_000_000),
    ("energy_joules", ("energy1_input",), 1_000_000),
)


def read(
    inventory: Inventory,
    asking: Asking,
    more: Callable[[Rootfs, str], Values] = lambda _, __: {},
) -> dict[str, Values]:
    """Return values of the devices, by their ids and by fields of the exporter's ``Device``.

    ``asking`` is told of each before its files are read, and says whether to. ``more`` adds what a
    driver alone has, of a folder. Where parts share a PCI device, there are none, because they are
    those of the whole.
    """
    shared = Counter(device.bus_id for device in inventory.devices)
    found: dict[str, Values] = {}
    try:
        with Rootfs(inventory.root) as root:
            for device in inventory.devices:
                own = bound.is_address(device.bus_id) and shared[device.bus_id] == 1
                if own and asking(device.id):
                    folder = f"{_DEVICES}/{device.bus_id}"
                    found[device.id] = {**_sensors(root, folder), **more(root, folder)}
    except OSError:
        pass  # the root is gone, which the inventory notices
    return found


def integer(root: Rootfs, path: str) -> int | None:
    """Return a small file's number, None where there is none."""
    text = bound.text(root, path)
    is_plain = len(text) <= _DIGITS and text.isascii() and text.removeprefix("-").isdecimal()
    number = int(text) if is_plain else _MOST
    return number if abs(number) < _MOST else None


def _sensors(root: Rootfs, folder: str) -> Values:
    numbers = bound.numbered(root, f"{folder}/hwmon", "hwmon")
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
