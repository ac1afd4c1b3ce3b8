"""Selection of a host's devices by the names in a request.

Names have an id kind. In the kind ``index`` they are numbers, and ranges (0-3) are allowed. So
they are in ``module``, the numbers of board seats, which count only if no other kind is asked
for. In ``bus_id`` they are PCI addresses, with or without the domain and zeros (0000:1B:00.0,
1b:00.0). In ``uuid`` a unique prefix is enough. In other kinds the whole name must match. Case
is ignored, 0x may be left out, and ``all`` means every device.
"""

from gpuhook.base.errors import LostDeviceError, UnknownDeviceError, listed, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from gpuhook.core.inventory.model import Device, Inventory

INDEX, MODULE, UUID, BUS_ID = "index", "module", "uuid", "bus_id"

# Engines put a message into one line: limits of the message, and of the list of devices.
_MOST = 450
_MOST_NAMES = 4
_DIGITS = 9  # more digits than any index has
_HEX = frozenset("0123456789abcdef")


def select(
    selectors: "Iterable[str]",
    inventory: "Inventory",
    names: "ModuleType",
    spaces: tuple[str, ...] = (),
) -> "tuple[Device, ...]":
    """Return the devices that the selectors name, in their order, without duplicates.

    ``names`` are the vendor's; ``spaces`` are the id kinds to search, () for all. ``all`` leaves
    out unusable devices, and selects none on a host without any. Any other name that matches
    nothing raises UnknownDeviceError, which lists the host's devices, or LostDeviceError if the
    device exists but can't be used.
    """
    selectors = tuple(selectors)
    search = _NameSearch(inventory, names, spaces, selectors)
    found: dict[str, Device] = {}
    for selector in selectors:
        for device in search.find(selector):
            found.setdefault(device.id, device)
    return tuple(found.values())


def fallen_off(lost: "Iterable[int]", names: "ModuleType") -> str:
    """Return the sentence that these devices are lost, without a full stop."""
    numbers = [str(number) for number in lost]
    one = len(numbers) == 1
    what = f"{names.NOUN}{'' if one else 's'} {listed(numbers)} {'has' if one else 'have'}"
    return f"{what} fallen off the bus (lost)"


class _NameSearch:
    """A search of an inventory, for several names."""

    __slots__ = ("asked", "indices", "inventory", "names", "spaces")

    def __init__(
        self,
        inventory: "Inventory",
        names: "ModuleType",
        spaces: tuple[str, ...],
        asked: tuple[str, ...],
    ) -> None:
        self.asked = asked
        self.inventory = inventory
        self.names = names
        self.spaces = spaces
        self.indices: dict[int, list[Device]] = {}
        numbered = MODULE if spaces == (MODULE,) else INDEX
        for device in inventory.devices if self._counts(numbered) else ():
            for text in device.names.get(numbered, ()):
                self.indices.setdefault(int(text), []).append(device)

    def _counts(self, space: str) -> bool:
        return not self.spaces or space in self.spaces

    def find(self, selector: str) -> "list[Device]":
        wanted = selector.lower()
        devices = self.inventory.devices
        if wanted == "all":  # protects: all-devices
            return [device for device in devices if not device.state]
        for search in (self._by_index, self._by_name, self._by_beginning, self._by_bus_id):
            found = search(wanted)
            if found:
                return self._usable(found)
        lost = self._lost_among(wanted)
        if lost:
            raise LostDeviceError(fallen_off(lost, self.names), self.names.LOST_REMEDY)
        raise self._unknown(selector, wanted)

    def _unknown(self, selector: str, wanted: str) -> UnknownDeviceError:
        """Return the error for an unknown name, with as many examples as fit."""
        from gpuhook.core import suggest  # noqa: PLC0415 - only if a container is refused

        count = suggest.counted(self.asked, self.indices)
        if count and not self.inventory.lost:
            return UnknownDeviceError(
                f"The container asks for {count} {self.names.NOUN}s, 0 to {count - 1}, and this "
                f"host has {len(self.indices)}",
                "Ask for fewer, or for all; `gpuhook info` lists them",
            )
        there = self._what_exists()
        remedy = "Ask for one that exists, or for all; `gpuhook info` lists them"
        head = f"This host has no {self.names.ANY_NOUN} {shown(selector)}: "
        tail = self._may_be_lost(wanted)
        for count in range(_MOST_NAMES, 0, -1):
            what = f"it has {listed(there, count)}" if there else self._has_none()
            cause = f"{head}{self._wrong_in_range(wanted)}{what}{tail}"
            if len(cause) + len(remedy) + len(". .") <= _MOST:
                break
        else:
            cause = f"This host has no {self.names.ANY_NOUN} of the requested name"
        return UnknownDeviceError(cause, remedy)

    def _has_none(self) -> str:
        return "it has none that answers" if self.inventory.lost else "it has none at all"

    def _what_exists(self) -> list[str]:
        """Return the names to offer: whole devices, then parts.

        If only shared names or board seats count, return those.
        """
        devices = sorted(self.inventory.devices, key=lambda device: bool(device.parent))
        if self.spaces == (MODULE,):
            return [str(number) for number in sorted(self.indices)]
        count = [
            text
            for device in devices
            for space, texts in device.names.items()
            for text in texts
            if self._counts(space)
        ]
        if not {text for device in devices for text in (device.label, device.id)} & {*count}:
            return list(dict.fromkeys(count))
        return [
            device.label if device.label == device.id else f"{device.label} ({device.id})"
            for device in devices
        ]

    def _usable(self, found: "list[Device]") -> "list[Device]":
        for device in found:
            if device.state:
                raise LostDeviceError(
                    f"{self.names.NOUN} {device.label} can't be used: {device.state}",
                    self.names.LOST_REMEDY,
                )
        return found

    # By number ---------------------------------------------------------------------------

    def _by_index(self, wanted: str) -> "list[Device]":
        """Find a number, or a complete range: a lost device should be noticed."""
        numbers = self._numbers(wanted)
        if not all(number in self.indices for number in numbers):
            return []
        return [device for number in numbers for device in self.indices[number]]

    def _numbers(self, wanted: str) -> list[int]:
        """Return the numbers of one name or range; none if the range is too long."""
        number = _number(wanted)
        start, end = (number, number) if number is not None else _range(wanted) or (0, -1)
        if end - start >= len(self.indices) + len(self.inventory.lost):
            return []
        return list(range(start, end + 1))

    def _lost_among(self, wanted: str) -> list[int]:
        """Return the lost devices that an index or range includes, if nothing else is wrong."""
        first, colon, second = wanted.partition(":")
        if colon and None in (_number(first), _number(second)):
            return []  # a bus id
        missing = [number for number in self._numbers(first) if number not in self.indices]
        return missing if set(missing) <= set(self.inventory.lost) else []

    def _may_be_lost(self, wanted: str) -> str:
        """Return the lost devices that a UUID or bus id may mean: their index is all we know."""
        lost = self.inventory.lost
        sort, dash, _ = wanted.partition("-")
        if not lost or not ((dash and sort.isalpha()) or "." in wanted):
            return ""
        it = "it" if len(lost) == 1 else "one of them"
        return f"; {fallen_off(lost, self.names)} and may be {it}"

    def _wrong_in_range(self, wanted: str) -> str:
        """Return why a range matches nothing, "" if it isn't a range."""
        ends = _range(wanted)
        have = {*self.indices, *self.inventory.lost}
        if ends is None or not have:
            return ""
        start, end = ends
        if start > end:
            return "the range runs backwards; "
        while start in have:
            start += 1
        later = [index for index in have if start < index <= end]
        end = min(later) - 1 if later else end
        return f"{start} doesn't exist; " if start == end else f"{start} to {end} don't exist; "

    # By name -----------------------------------------------------------------------------

    def _by_name(self, wanted: str) -> "list[Device]":
        plain = wanted.removeprefix("0x")
        if not self.spaces:
            typed = [each for each in self.inventory.devices if self._typed(each) == wanted]
            if typed:
                return typed
        return [
            device
            for device in self.inventory.devices
            for space, texts in device.names.items()
            if space not in (INDEX, MODULE, BUS_ID) and self._counts(space)
            for text in texts
            if text.lower().removeprefix("0x") == plain
        ]

    def _typed(self, device: "Device") -> str:
        """Return a device's name in CDI specs by type and number: gpu0, mig0:1."""
        whole, part = self.names.TYPES
        return f"{part if device.parent else whole}{device.label}"

    def _by_beginning(self, wanted: str) -> "list[Device]":
        """Find the only UUID with this prefix; it must be longer than the type (GPU-)."""
        if not self._counts(UUID) or not wanted.partition("-")[2]:
            return []
        found = [
            (device, text)
            for device in self.inventory.devices
            for text in device.names.get(UUID, ())
            if text.lower().startswith(wanted)
        ]
        uuids = list(dict.fromkeys(text for _, text in found))
        if len(uuids) > 1:
            raise UnknownDeviceError(
                f"{shown(wanted)} is the beginning of {len(uuids)} UUIDs: "
                f"{listed(uuids, _MOST_NAMES)}",
                "Write enough of the UUID to tell them apart",
            )
        return [device for device, _ in found]

    def _by_bus_id(self, wanted: str) -> "list[Device]":
        address = _address(wanted) if self._counts(BUS_ID) else None
        if address is None:
            return []
        return [
            device
            for device in self.inventory.devices
            for text in device.names.get(BUS_ID, ())
            if _address(text.lower()) == address
        ]


def _number(text: str) -> int | None:
    if 0 < len(text) <= _DIGITS and text.isascii() and text.isdecimal():
        return int(text)
    return None


def _range(wanted: str) -> "tuple[int, int] | None":
    """Return the ends of a range, None if it isn't one."""
    first, _, last = wanted.partition("-")
    start, end = _number(first), _number(last)
    return None if start is None or end is None else (start, end)


def _address(text: str) -> "tuple[int, ...] | None":
    """Return domain, bus, device and function of a PCI address; None if it isn't one."""
    parts = text.split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    if len(parts) != 3:
        return None
    parts[2:] = parts[2].split(".")
    numbers = [_hex(part) for part in parts]
    known = tuple(number for number in numbers if number is not None)
    return known if len(known) == len(parts) == 4 else None


def _hex(text: str) -> int | None:
    return int(text, 16) if 0 < len(text) <= 8 and _HEX.issuperset(text) else None
