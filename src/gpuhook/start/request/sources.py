"""Where a container's spec holds requests: in its environment and in its mounts.

A cluster's device plugin asks by mounting /dev/null below a folder that its vendor has given
a name, because a user's image can't forge mounts. For the same reason limits of devices' memory
that a pod must not lose stand there (``limit_place``).
"""

from os.path import normpath

from gpuhook.ground import names
from gpuhook.ground.errors import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_TRUE = ("1", "t", "T", "TRUE", "true", "True")

SOURCE = "/dev/null"

# Below a vendor's folder, before SIZE/DEVICE: what limits a device that the container has by other
# means, and what asks for the device as well.
_LIMIT, _LIMITED = "limit", "memory"
_PARTS = ("/limit", "/memory")
FOLDERS = "-container-devices"  # in the name of every vendor's folder


def limit_place(folder: str, device: str, size: str, *, gives: bool = False) -> str:
    """Return where SOURCE has to be mounted in a container that may use ``size`` of a device.

    ``folder`` is the vendor's ``MOUNTS``, ``device`` any of the device's names ("": each of the
    vendor's devices that the container has), ``size`` as ``ground.sizes`` has it. For those whom a
    pod must not undo: gpu-py and the hooks find the mount in config.json, which no image and no
    variable writes. Of several limits of a device the smallest holds.

    With ``gives`` the mount asks for the device, too. Some engines let a pod's own volume take the
    place of a plugin's mount; it takes the device with it then, and not only the limit. CDI
    documents, which bring the device themselves and whose mounts nothing replaces, do without.
    """
    return "/".join([folder, _LIMITED if gives else _LIMIT, size, *filter(None, (device,))])


def may_limit(destination: object) -> bool:
    """Tell whether a mount could be such a one: quick, and True for all that are."""
    return (
        isinstance(destination, str)
        and FOLDERS in destination
        and any(part in destination for part in _PARTS)
    )


class MountRequests:
    """The names found: ``devices`` and ``imex`` channels in mount order, once each.

    ``limits`` are pairs of size and device, as ``limit_place`` takes them, and unchecked.
    ``skipped`` says for every name that can't be understood why.
    """

    __slots__ = ("devices", "imex", "limits", "skipped")

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
            if kind in (_LIMIT, _LIMITED):
                size, _, name = rest.partition("/")
                limits[size, name] = None
                if kind == _LIMIT or not name:
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
        self.limits = tuple(limits)
        self.skipped = tuple(skipped)


def _name(source: str, destination: str, root: str) -> str | None:
    """Return what a mount asks for; None for a mount that is no request."""
    if _clean(source) != SOURCE:
        return None
    # The slash keeps out folders whose names only begin in the same way.
    head, found, name = _clean(destination).partition(root + "/")
    return name if found and not head else None


def _clean(path: str) -> str:
    # normpath keeps two leading slashes, which POSIX lets mean something; Linux does not.
    return "/" + normpath(path).lstrip("/") if path.startswith("/") else path


def _qualified(name: str) -> str | None:
    """Return vendor/class/device or vendor/class=device as a qualified CDI name."""
    if "=" not in name:
        kind, _, device = name.rpartition("/") if name.count("/") == 2 else ("", "", "")
        name = f"{kind}={device}"
    return name if names.cdi_parts(name) else None


def parse_environment(entries: "Iterable[str]") -> dict[str, str]:
    """Return NAME=VALUE entries as a mapping; of several entries for a name the last counts.

    An entry without = is a name that is set to nothing: it never fails a container. All that reads
    a container's environment reads it by this function: two readers that disagree on which entry
    counts are a way around what one of them decides.
    """
    variables = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        variables[name] = value
    return variables


def is_true(value: str | None) -> bool:
    """Say whether a value means yes, by the words of Go's strconv.ParseBool; others mean no."""
    return value in _TRUE


def items(value: str) -> list[str]:
    """Return the items of a comma list, blanks trimmed and empties dropped, in order.

    Blanks around the dash of a range are no more than those around the comma: 0 - 3 is 0-3.
    """
    return [
        _tight(item) if "-" in item else item for part in value.split(",") if (item := part.strip())
    ]


def _tight(item: str) -> str:
    first, dash, last = item.partition("-")
    ends = first.strip(), last.strip()
    return dash.join(ends) if dash and all(map(str.isdecimal, ends)) else item


def swarm_variables(setting: str) -> list[tuple[str, str]]:
    """Return vendor ("": not said) and variable of each item of swarm-resource, [VENDOR=]NAME."""
    found = [item.rpartition("=") for item in items(setting)]
    return [(vendor.strip(), variable.strip()) for vendor, _, variable in found]


def sort(word: str) -> str:
    """Return whose form a device's name in a swarm has: "hex" for 0x..., else "plain".

    A swarm calls the devices of all vendors by one name, if its administrators did so.
    """
    return "hex" if word[:2] in ("0x", "0X") else "plain"
