"""The gate's verdict on a container: the devices that it may have, on a node with ``gate``.

``gpuhook nri`` writes it before the engine creates the container, in a folder that only root can
access, under the container's id. Engines choose the id, and copy nothing from a pod or an image
to that folder: no pod can write a verdict, or use the one of another container. The runtime and
the hook read it before they read the container's requests.
"""

from gpuhook.base.errors import RequestError, UnknownDeviceError, listed
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.jsontext import Record
from gpuhook.base.state_directory import StateDirectory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from gpuhook.base.config.model import Config
    from gpuhook.core.inventory.model import Device, Inventory

FOLDER = "verdicts"  # in the state folder
_LONGEST_ID = 128  # characters
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")


class Verdict(Record):
    """The devices that a container may have.

    ``devices`` are ids by vendor, in the order in which they are given. ``names`` are qualified CDI
    names: devices of CDI specs, and additions of options (``Vendor.tenant_names``).
    """

    devices: "dict[str, tuple[str, ...]]"
    names: tuple[str, ...] = ()

    def check_names(self, names: "Iterable[str]") -> None:
        """Raise RequestError for a name that the container may not have."""
        others = [name for name in names if name not in self.names]
        if others:  # protects: verdict-names
            raise RequestError(
                f"The gate of this node hasn't given the container {listed(others)}",
                "Request it in the pod's resources",
            )

    def of(self, names: "ModuleType", inventory: "Inventory") -> "tuple[Device, ...]":
        """Return the devices of a vendor; UnknownDeviceError for one that is gone."""
        there = {device.id: device for device in inventory.devices}
        wanted = self.devices.get(names.NAME, ())
        gone = [name for name in wanted if name not in there]
        if gone:
            raise UnknownDeviceError(
                f"The gate of this node has given the container {names.NOUN} {listed(gone)}, which "
                "this host no longer has",
                "Start the container again",
            )
        return tuple(there[name] for name in wanted)


def read(config: "Config", container: str) -> Verdict:
    """Return the verdict on a container; RequestError where there is none.

    ``container`` is its id, "" if unknown.
    """
    found = _read(config.state_dir, container) if is_id(container) else None
    if found is None:  # protects: verdict-missing
        raise RequestError(
            "The container requests devices, and this node gives them only to containers of pods "
            "that gpuhook nri --gate has seen (gate = true in [gpuhook])",
            "Check that gpuhook nri runs and is connected to the engine (`gpuhook doctor`), and "
            "start the container in a pod",
        )
    return found


def is_id(container: str) -> bool:
    """Tell whether a text can be a container's id, and so a file name."""
    if not 0 < len(container) <= _LONGEST_ID or container[0] == ".":
        return False
    return _LETTERS.issuperset(container)  # protects: verdict-id


def _read(state_dir: str, container: str) -> Verdict | None:
    parent = StateDirectory.open(state_dir)
    if parent is None:
        return None
    try:
        with parent, parent.folder(FOLDER, private=True) as folder:  # protects: verdict-owner
            found = folder.read_checked(container)
            return Verdict.from_json(jsontext.loads(found[0])) if found is not None else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
