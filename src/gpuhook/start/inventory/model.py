"""What a host has to give, as plain data: devices with their names, nodes and files.

Nothing here looks at the host; a vendor's ``discover`` fills these classes in, ``selection``
and the plan read them. They go to JSON and back without loss, so an inventory can be saved.

They are plain classes, because importing dataclasses costs two interpreter starts.
"""

import os
import stat

from gpuhook.ground.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Self

EVERYBODY = 0o666  # the mode of a node that everybody may open
SOCKET = "ipc"  # the kind of a file that is there or not: each start looks, and no inventory
NOBODY = 65534  # how the kernel shows an owner that a user namespace has no number for


class Node(Record):
    """A character device: its path below the driver root, its numbers, mode and owner.

    ``inside`` is its path in a container, "" where that is the same one.
    """

    path: str
    major: int
    minor: int
    mode: int = EVERYBODY
    uid: int = 0
    gid: int = 0
    inside: str = ""

    @classmethod
    def of(cls, path: str, status: os.stat_result | None, inside: str = "") -> "Self | None":
        """Return the node with that path and status, None if it isn't a character device."""
        if status is None or not stat.S_ISCHR(status.st_mode):
            return None
        numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
        mode = stat.S_IMODE(status.st_mode)
        return cls(path, *numbers, mode, status.st_uid, status.st_gid, inside)

    def to_json(self) -> "dict[str, Any]":
        """Return the fields as JSON values, without those that most nodes have."""
        found = {"path": self.path, "major": self.major, "minor": self.minor}
        if (self.mode, self.uid, self.gid) != (EVERYBODY, 0, 0):
            found.update(mode=self.mode, uid=self.uid, gid=self.gid)
        return {**found, "inside": self.inside} if self.inside else found

    @property
    def numbers(self) -> tuple[int, int]:
        """The device's (major, minor)."""
        return self.major, self.minor

    @property
    def group(self) -> int:
        """The group that may do with it what not everybody may, 0 where there is none.

        A group that this user namespace has no number for is none: nobody can be put in it.
        """
        alone = (self.mode >> 3) & ~self.mode & 0o006
        return self.gid if alone and self.gid != NOBODY else 0


class DriverFile(Record):
    """A file of the driver, found below the driver root.

    ``kind`` is one of library, library32, binary, firmware, ipc, config, folder, link, and what
    its vendor has besides. ``path`` is where it is: absolute below the driver root, every symbolic
    link resolved. ``target`` is where it goes in a container: an absolute path, for libraries the
    bare file name if their folder is the container's choice. A link's ``path`` is its own, and
    ``target`` what it says. ``capability`` is the part of the driver it belongs to (the empty
    string: always), ``soname`` a library's DT_SONAME, else None. ``content`` is what it says in a
    container, "" for a file that is given as it is.
    """

    kind: str
    path: str
    target: str
    capability: str = ""
    soname: str | None = None
    content: str = ""

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from what ``to_json`` returned; TypeError if it is not that.

        As for any record, in a fifth of the time: a machine has dozens.
        """
        fields = {**data}
        if not _FILE_NEEDS <= fields.keys() <= _FILE_HAS:
            raise TypeError(f"a driver's file has other fields than {[*fields]}")
        made = cls.__new__(cls)
        made.__dict__.update(fields)
        return made

    def to_json(self) -> "dict[str, Any]":
        """Return the fields as JSON values, without those that say nothing."""
        found: dict[str, Any] = {"kind": self.kind, "path": self.path, "target": self.target}
        if self.capability:
            found["capability"] = self.capability
        if self.soname is not None:
            found["soname"] = self.soname
        return {**found, "content": self.content} if self.content else found


_FILE_NEEDS = frozenset({"kind", "path", "target"})
_FILE_HAS = _FILE_NEEDS | {"capability", "soname", "content"}


class Device(Record):
    """One accelerator, or a part of one that can be asked for by itself.

    ``id`` tells it from every other device of its vendor, as long as that is possible (a
    UUID, a serial number, else a bus id); ``label`` is what a person calls it here (3, 0:1).
    ``names`` are the names by which it can be asked for, by name space; a name may be shared
    by several devices. ``nodes`` are paths of nodes of the inventory. ``bus_id`` is the PCI
    address as /sys spells it (0000:1b:00.0), ``model`` the product, ``parent`` the ``id`` of
    the device that it is a part of, ``state`` why it can't be used ("": it can). A part has
    no nodes of its parent's among its own: the vendor adds what it needs of them.
    """

    id: str
    label: str
    names: "Mapping[str, tuple[str, ...]]"
    nodes: tuple[str, ...] = ()
    bus_id: str = ""
    model: str = ""
    parent: str = ""
    state: str = ""


class Inventory(Record, devices=Device, nodes=Node, files=DriverFile):
    """What one host has of one vendor.

    ``vendor`` is the vendor's name, ``root`` the driver root as a host path (/ or for
    instance /run/nvidia/driver), ``version`` the driver's. ``nodes`` are all nodes that a
    container may get, those of ``control`` with whatever device it asks for (paths).
    ``lost`` are the labels of devices that are there and can't be reached any more, ``refused``
    says, a sentence each, which files no container is given although they are listed for it.
    """

    vendor: str
    root: str
    version: str
    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]
    control: tuple[str, ...] = ()
    files: tuple[DriverFile, ...] = ()
    lost: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()

    def node(self, path: str) -> Node | None:
        """Return the node with that path below the driver root, if it exists."""
        for node in self.nodes:
            if node.path == path:
                return node
        return None

    def nodes_of(self, device: Device) -> tuple[str, ...]:
        """Return the paths by which a device is reached, with those that few containers get of it.

        Whatever a vendor gives with one device and not with each is among them.
        """
        return device.nodes

    def remembering(self, before: "Self") -> "Self":  # noqa: ARG002
        """Return the inventory with those of its lost devices that an older one still has.

        A driver may say no more than the number of a device that is lost.
        """
        return self

    def missing(self) -> list[str]:
        """Return the paths of nodes that should be there, of its devices and of all, and aren't."""
        there = {node.path for node in self.nodes}
        wanted = [*self.control, *(path for device in self.devices for path in device.nodes)]
        return [path for path in dict.fromkeys(wanted) if path not in there]

    def summary(self) -> "dict[str, Any]":
        """Return the "inventory" object of `gpuhook explain --format json`."""
        return {
            "vendor": self.vendor,
            "driver_version": self.version,
            "devices": [device.to_json() for device in self.devices],
        }

    def sentence(self) -> str:
        """Return what there is in a few words: Driver 1.2, 8 devices."""
        return f"{self.vendor}: driver {self.version}, {len(self.devices)} devices"

    def facts(self) -> "list[tuple[str, str]]":
        """Return what else there is to tell a person, each with its title."""
        return []

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for a person: header and rows."""
        rows: list[tuple[object, ...]] = [
            (device.label, device.model, device.bus_id, device.id, device.state or "-")
            for device in self.devices
        ]
        return ("INDEX", "NAME", "BUS ID", "ID", "STATE"), rows

    def listing(self, users: "Mapping[str, list[str]]") -> "dict[str, list[Any]]":
        """Return the devices for `gpuhook list --format json`, each with its ``users`` by id."""
        found = [
            {"vendor": self.vendor, **device.to_json(), "containers": users[device.id]}
            for device in self.devices
        ]
        return {"devices": found}
