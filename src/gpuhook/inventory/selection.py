"""Which of a machine's GPUs and MIG devices the names in a request mean.

A selector is one of: all; an index (0) or a range of indices (0-3); a GPU's UUID
(GPU-8f3a..., whole or the beginning of only one); a PCI bus id (0000:1B:00.0 or 1B:00.0);
a MIG device by index in its GPU (0:1), by UUID (MIG-...) or in the old form
(MIG-GPU-<uuid>/<gpu instance>/<compute instance>). Letters may be of either case.
"""

from gpuhook.errors import LostDeviceError, RequestError, UnknownDeviceError, listed, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.inventory.model import Gpu, Inventory, Mig
    from gpuhook.request.reader import Request

    Found = tuple[Gpu, Mig | None]

LOST_REMEDY = "Look for Xid 79 in dmesg, reset the GPU or reboot, and use the other GPUs meanwhile"

_DIGITS = 9  # more digits than any index has
_HEX = frozenset("0123456789abcdef")


class Selection:
    """What was selected, in the request's order, once each.

    ``gpus`` are the GPUs whose nodes must appear, a MIG device's GPU included; ``migs`` are
    (GPU, MIG device) pairs; ``uuids`` name what was asked for.
    """

    __slots__ = ("gpus", "migs", "uuids")

    def __init__(
        self,
        gpus: "tuple[Gpu, ...]" = (),
        migs: "tuple[tuple[Gpu, Mig], ...]" = (),
        uuids: tuple[str, ...] = (),
    ) -> None:
        self.gpus = gpus
        self.migs = migs
        self.uuids = uuids


def select(request: "Request", inventory: "Inventory") -> Selection:
    """Return the GPUs and MIG devices that the request's selectors mean.

    ``all`` on a machine without GPUs selects none; any other name that fits nothing raises
    UnknownDeviceError, which names what the machine has, or LostDeviceError for the index of
    a GPU that has fallen off the bus. RequestError for management of MIG that is asked of
    anything but all devices.
    """
    gpus: dict[str, Gpu] = {}
    migs: dict[str, tuple[Gpu, Mig]] = {}
    uuids: dict[str, None] = {}
    for selector in request.selectors:
        for gpu, mig in _find(selector, inventory):
            gpus.setdefault(gpu.uuid, gpu)
            if mig is not None:
                migs.setdefault(mig.uuid, (gpu, mig))
            uuids[gpu.uuid if mig is None else mig.uuid] = None
    selection = Selection(tuple(gpus.values()), tuple(migs.values()), tuple(uuids))
    _check_mig_management(request, inventory, selection)
    return selection


def _check_mig_management(request: "Request", inventory: "Inventory", selection: Selection) -> None:
    """Refuse it to a container held to parts of GPUs: management of MIG reaches all of them."""
    partial = bool(selection.migs) and len(selection.gpus) < len(inventory.gpus)
    for name, value in (("CONFIG", request.mig_config), ("MONITOR", request.mig_monitor)):
        if value is not None and partial:
            raise RequestError(
                f"NVIDIA_MIG_{name}_DEVICES is set for a container with single MIG devices",
                f"Ask for all GPUs, or unset NVIDIA_MIG_{name}_DEVICES",
            )
        if value is not None and value != "all":
            raise RequestError(
                f"NVIDIA_MIG_{name}_DEVICES is {shown(value)}, and MIG is managed as a whole",
                f"Set NVIDIA_MIG_{name}_DEVICES=all or unset it",
            )


def _find(selector: str, inventory: "Inventory") -> "list[Found]":
    wanted = selector.lower()
    if wanted == "all":
        return [found for gpu in inventory.gpus for found in _with_migs(gpu)]
    for search in (_by_index, _by_gpu_uuid, _by_bus_id, _by_mig_index, _by_mig_name):
        found = search(wanted, inventory)
        if found:
            return found
    lost = _lost_among(wanted, inventory)
    if lost:
        raise LostDeviceError(fallen_off(lost), LOST_REMEDY)
    raise UnknownDeviceError(
        f"This machine has no GPU or MIG device {shown(selector)}: "
        f"{_wrong_in_range(wanted, inventory)}{_what_exists(inventory)}"
        f"{_may_be_lost(wanted, inventory)}",
        "Ask for one that exists, or for all; `gpuhook info` lists them",
    )


def fallen_off(indices: "tuple[int, ...] | list[int]") -> str:
    """Return the sentence that these GPUs are lost, without a full stop."""
    names = listed([str(index) for index in indices])
    what = f"GPU {names} has" if len(indices) == 1 else f"GPUs {names} have"
    return f"{what} fallen off the bus (lost)"


def _with_migs(gpu: "Gpu") -> "list[Found]":
    return [(gpu, None), *((gpu, mig) for mig in gpu.mig)]


def _number(text: str) -> int | None:
    if 0 < len(text) <= _DIGITS and text.isascii() and text.isdecimal():
        return int(text)
    return None


def _gpu_at(number: int | None, inventory: "Inventory") -> "Gpu | None":
    for gpu in inventory.gpus:
        if gpu.index == number:
            return gpu
    return None


def _by_index(wanted: str, inventory: "Inventory") -> "list[Found]":
    """All of a range must exist: a machine that has lost a GPU should say so."""
    indices = _indices(wanted, inventory)
    gpus = [_gpu_at(number, inventory) for number in indices]
    found: list[Found] = [(gpu, None) for gpu in gpus if gpu is not None]
    return found if len(found) == len(gpus) else []


def _range(wanted: str) -> "tuple[int, int] | None":
    """Return the ends of a range, None for what is none."""
    first, _, last = wanted.partition("-")
    start, end = _number(first), _number(last)
    return None if start is None or end is None else (start, end)


def _indices(wanted: str, inventory: "Inventory") -> "list[int]":
    """Return the indices that an index or a range means; none of a range that is too long."""
    number = _number(wanted)
    start, end = (number, number) if number is not None else _range(wanted) or (0, -1)
    if end - start >= len(inventory.gpus) + len(inventory.lost):
        return []
    return list(range(start, end + 1))


def _lost_among(wanted: str, inventory: "Inventory") -> "list[int]":
    """Return the lost GPUs that a name means by index, if they are all that is wrong with it."""
    first, colon, second = wanted.partition(":")
    if colon and None in (_number(first), _number(second)):
        return []  # a bus id
    indices = _indices(first, inventory)
    missing = [index for index in indices if _gpu_at(index, inventory) is None]
    return missing if set(missing) <= set(inventory.lost) else []


def _may_be_lost(wanted: str, inventory: "Inventory") -> str:
    """Return which GPUs a UUID or a bus id may mean: of lost ones NVML tells the index alone."""
    if not inventory.lost or not (wanted.startswith(("gpu-", "mig-")) or "." in wanted):
        return ""
    it = "it" if len(inventory.lost) == 1 else "one of them"
    return f"; {fallen_off(inventory.lost)} and may be {it}"


def _wrong_in_range(wanted: str, inventory: "Inventory") -> str:
    """Return why a range fits nothing, "" for what is no range."""
    ends = _range(wanted)
    have = {*(gpu.index for gpu in inventory.gpus), *inventory.lost}
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


def _by_gpu_uuid(wanted: str, inventory: "Inventory") -> "list[Found]":
    if not wanted.startswith("gpu-") or wanted == "gpu-":
        return []
    exact = [gpu for gpu in inventory.gpus if gpu.uuid.lower() == wanted]
    found = exact or [gpu for gpu in inventory.gpus if gpu.uuid.lower().startswith(wanted)]
    _refuse_ambiguous(wanted, [gpu.uuid for gpu in found])
    return [(gpu, None) for gpu in found]


def _by_bus_id(wanted: str, inventory: "Inventory") -> "list[Found]":
    parts = wanted.split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    if len(parts) != 3 or not parts[2].endswith(".0"):
        return []
    numbers = [_hex(part) for part in (parts[0], parts[1], parts[2][:-2])]
    return [(gpu, None) for gpu in inventory.gpus if _bus_numbers(gpu) == numbers]


def _hex(text: str) -> int | None:
    return int(text, 16) if 0 < len(text) <= 8 and _HEX.issuperset(text) else None


def _bus_numbers(gpu: "Gpu") -> list[int | None]:
    domain, bus, slot = gpu.pci_bus_id.lower().split(":")
    return [_hex(domain), _hex(bus), _hex(slot.partition(".")[0])]


def _by_mig_index(wanted: str, inventory: "Inventory") -> "list[Found]":
    first, _, second = wanted.partition(":")
    gpu, index = _gpu_at(_number(first), inventory), _number(second)
    if gpu is None or index is None:
        return []
    return [(gpu, mig) for mig in gpu.mig if mig.index == index]


def _by_mig_name(wanted: str, inventory: "Inventory") -> "list[Found]":
    if not wanted.startswith("mig-") or wanted == "mig-":
        return []
    every = [(gpu, mig) for gpu in inventory.gpus for mig in gpu.mig]
    exact = [pair for pair in every if wanted in (pair[1].uuid.lower(), _old_name(*pair))]
    found = exact or [pair for pair in every if pair[1].uuid.lower().startswith(wanted)]
    _refuse_ambiguous(wanted, [mig.uuid for _, mig in found])
    return list(found)


def _old_name(gpu: "Gpu", mig: "Mig") -> str:
    """Return the name that drivers before 470 gave a MIG device."""
    return f"mig-{gpu.uuid}/{mig.gi}/{mig.ci}".lower()


def _refuse_ambiguous(wanted: str, uuids: list[str]) -> None:
    if len(uuids) > 1:
        raise UnknownDeviceError(
            f"{shown(wanted)} is the beginning of {len(uuids)} UUIDs: {listed(uuids)}",
            "Write as much of the UUID as tells them apart",
        )


def _what_exists(inventory: "Inventory") -> str:
    if not inventory.gpus:
        return "it has none that answers" if inventory.lost else "it has none at all"
    names = [f"{gpu.index} ({gpu.uuid})" for gpu in inventory.gpus]
    names += [f"{gpu.index}:{mig.index} ({mig.uuid})" for gpu in inventory.gpus for mig in gpu.mig]
    return f"it has {listed(names)}"
