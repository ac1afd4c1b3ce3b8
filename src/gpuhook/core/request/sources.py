"""The sources of requests in a container's spec: its environment and its mounts.

A cluster's device plugin requests devices by mounting /dev/null below a folder whose name its
vendor defines, because a user's image can't forge mounts. For the same reason memory limits
that a pod must not remove are there (``memory_limit_place``).
"""

from os.path import normpath

from gpuhook.base import names
from gpuhook.base.errors import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_TRUE = ("1", "t", "T", "TRUE", "true", "True")

SOURCE = "/dev/null"
ANY = "any"

# Below a vendor's folder, before SIZE/DEVICE: a limit of a device that the container gets by other
# means, and one that requests the device as well.
_LIMIT_ONLY, _WITH_DEVICE = "limit", "memory"
_PARTS = ("/limit", "/memory")
FOLDERS = "-container-devices"  # in the name of every vendor's folder


def memory_limit_place(folder: str, device: str, size: str, *, gives: bool = False) -> str:
    """Return the path at which to mount SOURCE in a container that may use ``size`` of a device.

    ``folder`` is the vendor's ``MOUNTS``, ``device`` any of the device's names ("": each of the
    vendor's devices that the container has), ``size`` as in ``base.sizes``. It is for limits that
    a pod must not remove: gpu-py and the hooks find the mount in config.json, and no image or
    variable can write there. Of several limits of a device the smallest one applies.

    With ``gives`` the mount requests the device, too. Some engines let a pod's own volume replace a
    plugin's mount; then the device is gone as well, and not only the limit. CDI
    specs, which contain the device themselves and whose mounts can't be replaced, do without.
    """
    return "/".join(
        [folder, _WITH_DEVICE if gives else _LIMIT_ONLY, size, *filter(None, (device,))]
    )


def may_limit_memory(destination: object) -> bool:
    """Tell whether a mount could be a limit: quick, and True for all limits."""
    return (
        isinstance(destination, str)
        and FOLDERS in destination
        and any(part in destination for part in _PARTS)
    )


class MountRequests:
    """The requested names: ``devices`` and ``imex`` channels in mount order, once each.

    ``memory_limits`` are pairs of size and device, as ``memory_limit_place`` takes them, and
    unchecked. ``skipped`` has the reason for every invalid name.
    """

    __slots__ = ("devices", "imex", "memory_limits", "skipped")

    def __init__(self, mounts: "Iterable[tuple[str, str]]", root: str) -> None:
        """Read (source, destination) pairs; ``root`` is the vendor's folder, "" if it has none."""
        devices: dict[str, None] = {}
        imex: dict[str, None] = {}
        limits: dict[tuple[str, str], None] = {}
        skipped: dict[str, None] = {}
        for source, destination in mounts if root else ():
            name = _name(source, destination, root)
            if name is None:
                continue
            kind, _, rest = name.partition("/")
            if kind in (_LIMIT_ONLY, _WITH_DEVICE):
                size, _, name = rest.partition("/")
                limits[size, name] = None
                if kind == _LIMIT_ONLY or not name:
                    continue
            if name.startswith("imex/"):
                imex[name[5:]] = None
            elif name.startswith("cdi/"):
                qualified = _qualified(name[4:])
                if qualified is None:
                    skipped[f"{shown(destination)} isn't vendor/class/device"] = None
                else:
                    devices[qualified] = None
            else:
                devices[name] = None
        self.devices = tuple(devices)
        self.imex = tuple(imex)
        self.memory_limits = tuple(limits)
        self.skipped = tuple(skipped)


def _name(source: str, destination: str, root: str) -> str | None:
    """Return the name that a mount requests; None for a mount that isn't a request."""
    if _clean(source) != SOURCE:
        return None
    # The slash excludes folders whose names only start in the same way.
    head, found, name = _clean(destination).partition(root + "/")
    return name if found and not head else None


def _clean(path: str) -> str:
    # normpath keeps two leading slashes, which may be special in POSIX; not in Linux.
    return "/" + normpath(path).lstrip("/") if path.startswith("/") else path


def _qualified(name: str) -> str | None:
    """Return vendor/class/device or vendor/class=device as a qualified CDI name."""
    if "=" not in name:
        kind, _, device = name.rpartition("/") if name.count("/") == 2 else ("", "", "")
        name = f"{kind}={device}"
    return name if names.cdi_parts(name) else None


def parse_environment(entries: "Iterable[str]") -> dict[str, str]:
    """Return NAME=VALUE entries as a mapping; of several entries for a name the last one counts.

    An entry without = is a name with an empty value: it never fails a container. All code
    must read a container's environment with this function: if two readers disagree on which entry
    counts, a container can bypass a decision of one of them.
    """
    variables = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        variables[name] = value
    return variables


def is_true(value: str | None) -> bool:
    """Tell whether a value is true for Go's strconv.ParseBool; all others are false."""
    return value in _TRUE


def items(value: str) -> list[str]:
    """Return the items of a comma list, without blanks and empty items, in order.

    Blanks around the dash of a range are ignored like those around the comma: 0 - 3 is 0-3.
    """
    return [
        _tight(item) if "-" in item else item for part in value.split(",") if (item := part.strip())
    ]


def _tight(item: str) -> str:
    first, dash, last = item.partition("-")
    ends = first.strip(), last.strip()
    return dash.join(ends) if dash and all(map(str.isdecimal, ends)) else item


def is_any(name: str) -> bool:
    """Tell whether a name asks for free devices: ``any``, or ``any:`` and a number of them."""
    return name[:4].lower() in (ANY, f"{ANY}:")


def swarm_variables(setting: str) -> list[tuple[str, str]]:
    """Return vendor ("": unset) and variable of each item of swarm-resource, [VENDOR=]NAME."""
    found = [item.rpartition("=") for item in items(setting)]
    return [(vendor.strip(), variable.strip()) for vendor, _, variable in found]


def sort(word: str) -> str:
    """Return the format of a device's name in a swarm: "hex" for 0x..., else "plain".

    A swarm uses one resource name for devices of all vendors, if its administrators configured so.
    """
    return "hex" if word[:2] in ("0x", "0X") else "plain"
