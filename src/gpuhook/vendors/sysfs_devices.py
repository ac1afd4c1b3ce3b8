"""Helpers for vendors' discovery: the driver root, and devices by the driver bound to them.

Only sysfs is read.
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core.inventory.model import DeviceNode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    from gpuhook.core.inventory.model import Inventory

    T = TypeVar("T", bound=Inventory)

_SMALL = 1 << 16  # bytes; no attribute is longer than a page


def discover_below(title: str, path: str, find: "Callable[[Rootfs], T]") -> "T":
    """Return the result of ``find`` below the driver root of the vendor with this title.

    NoDriverError if there is no such folder, DriverError if it can't be read.
    """
    try:
        with Rootfs(path) as root:
            return find(root)
    except OSError as error:
        kind = NoDriverError if isinstance(error, FileNotFoundError) else DriverError
        raise kind(
            f"{title}'s driver root {path} can't be read: {error.strerror}",
            "Start the driver, or correct its root in [gpuhook] of config.toml",
        ) from None


def driver_folder(driver: str) -> str:
    """Return the folder with the kernel's links to the devices of a driver."""
    return f"/sys/bus/pci/drivers/{driver}"


def devices(root: Rootfs, driver: str) -> list[str]:
    """Return the folders of the devices that are bound to a driver, sorted by address."""
    folder = driver_folder(driver)
    return [f"{folder}/{name}" for name in root.list_folder(folder) if is_address(name)]


def is_address(name: str) -> bool:
    """Tell whether a name is a PCI address as in sysfs: 0000:c1:00.0."""
    domain, _, rest = name.partition(":")
    bus, _, slot = rest.partition(":")
    device, _, function = slot.partition(".")
    parts = (domain, bus, device, function)
    return all(part and set(part) <= set("0123456789abcdefABCDEF") for part in parts)


def text(root: Rootfs, path: str) -> str:
    """Return a small file's text, "" if it can't be read: sysfs may be incomplete."""
    try:
        return (root.read_file(path, _SMALL) or b"").decode("ascii", "replace").strip()
    except OSError:
        return ""


def words(line: str) -> list[str]:
    """Return the parts between blanks and tabs, in a line from a driver."""
    return [word for word in line.replace("\t", " ").split(" ") if word]


def number(name: str, beginning: str) -> int | None:
    """Return the number after a prefix of a name (card12), None for any other name."""
    digits = name.removeprefix(beginning)
    plain = len(digits) < 10 and digits.isascii() and digits.isdecimal()
    if not plain or digits == name or digits != str(int(digits)):
        return None
    return int(digits)


def numbered(root: Rootfs, folder: str, beginning: str) -> list[int]:
    """Return the numbers of a folder's names with that prefix, sorted."""
    found = (number(name, beginning) for name in root.list_folder(folder))
    return sorted(each for each in found if each is not None)


def nodes(root: Rootfs, paths: "Iterable[str]") -> "tuple[DeviceNode, ...]":
    """Return the character devices among some paths, without duplicates."""
    found = (DeviceNode.of(path, root.stat(path)) for path in dict.fromkeys(paths))
    return tuple(node for node in found if node is not None)


def wrong_numbers(node: "DeviceNode | None", dev: str) -> str:
    """Return the error of a node that should have the numbers ``dev`` (major:minor), else ""."""
    if node is None or not dev or f"{node.major}:{node.minor}" == dev:
        return ""
    return f"{node.path} has the numbers {node.major}:{node.minor}, but its driver's are {dev}"
