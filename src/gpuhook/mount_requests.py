"""Requests made by mounting /dev/null below /var/run/nvidia-container-devices.

A cluster's device plugin asks in this way, because a user's image can't forge mounts.

Hot path: imports os.path alone.
"""

from os.path import normpath

from gpuhook import cdi_names
from gpuhook.quoting import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = "/var/run/nvidia-container-devices"
_SOURCE = "/dev/null"


class MountRequests:
    """The names found: ``devices`` and ``imex`` channels in mount order, once each.

    ``skipped`` says for every name that can't be understood why.
    """

    __slots__ = ("devices", "imex", "skipped")

    def __init__(self, mounts: "Iterable[tuple[str, str]]") -> None:
        """Read (source, destination) pairs."""
        devices: dict[str, None] = {}
        imex: dict[str, None] = {}
        skipped: dict[str, None] = {}
        for source, destination in mounts:
            name = _name(source, destination)
            if name is None:
                continue
            if name.startswith("imex/"):
                imex[name[5:]] = None
            elif name.startswith("cdi/"):
                qualified = _qualified(name[4:])
                if qualified is None:
                    skipped[f"{shown(destination)} holds no vendor/class/device"] = None
                else:
                    devices[qualified] = None
            else:
                devices[name] = None
        self.devices = tuple(devices)
        self.imex = tuple(imex)
        self.skipped = tuple(skipped)


def _name(source: str, destination: str) -> str | None:
    """Return what a mount asks for; None for a mount that is no request."""
    if _clean(source) != _SOURCE:
        return None
    # The slash keeps out folders whose names only begin in the same way.
    head, found, name = _clean(destination).partition(ROOT + "/")
    return name if found and not head else None


def _clean(path: str) -> str:
    # normpath keeps two leading slashes, which POSIX lets mean something; Linux does not.
    return "/" + normpath(path).lstrip("/") if path.startswith("/") else path


def _qualified(name: str) -> str | None:
    """Return vendor/class/device or vendor/class=device as a qualified CDI name."""
    if "=" not in name:
        kind, _, device = name.rpartition("/") if name.count("/") == 2 else ("", "", "")
        name = f"{kind}={device}"
    return name if cdi_names.parse(name) else None
