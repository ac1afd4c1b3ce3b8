"""Data model of a host's inventory: devices with their names, nodes and files.

Nothing here reads the host: a vendor's ``discover`` fills these classes, and ``selection`` and
the plan read them. They convert to JSON and back without loss, so inventories can be saved.

They are plain classes, because importing dataclasses costs two interpreter starts.
"""

import os
import stat

from gpuhook.base.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Self

EVERYBODY = 0o666  # the mode of a node that all users may open
SOCKET = "ipc"  # kind of files that come and go: each start looks for them
NOBODY = 65534  # the kernel's stand-in for an owner that isn't mapped into a user namespace


class DeviceNode(Record):
    """A character device: its path below the driver root, its numbers, mode and owner.

    ``inside`` is its path in a container, "" if that is the same.
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
        """Return the fields as JSON values, without common defaults."""
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
        """The group with more rights on the node than other users, 0 if there is none.

        A group that isn't mapped into this user namespace doesn't count: no process can join it.
        """
        alone = (self.mode >> 3) & ~self.mode & 0o006
        return self.gid if alone and self.gid != NOBODY else 0


class DriverFile(Record):
    """A file of the driver, found below the driver root.

    ``kind`` is one of library, library32, binary, firmware, ipc, config, folder, link, or a kind
    of its vendor's own. ``path`` is absolute below the driver root, with symbolic links resolved;
    a link's is its own. ``target`` is the absolute path in a container; for libraries, the bare
    file name if the container's layout determines the folder; for links, what they point to.
    ``capability`` is the part of the driver it belongs to ("": always mounted), ``soname`` a
    library's DT_SONAME, else None. ``content`` replaces the file's content in a container, ""
    for an unchanged file.
    """

    kind: str
    path: str
    target: str
    capability: str = ""
    soname: str | None = None
    content: str = ""

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from the result of ``to_json``; TypeError for anything else.

        Does what a record does, in a fifth of the time: a host has dozens of files.
        """
        fields = {**data}
        if not _FILE_NEEDS <= fields.keys() <= _FILE_HAS:
            raise TypeError(f"a driver's file has other fields than {[*fields]}")
        made = cls.__new__(cls)
        made.__dict__.update(fields)
        return made

    def to_json(self) -> "dict[str, Any]":
        """Return the fields as JSON values, without empty ones."""
        found: dict[str, Any] = {"kind": self.kind, "path": self.path, "target": self.target}
        if self.capability:
            found["capability"] = self.capability
        if self.soname is not None:
            found["soname"] = self.soname
        return {**found, "content": self.content} if self.content else found


_FILE_NEEDS = frozenset({"kind", "path", "target"})
_FILE_HAS = _FILE_NEEDS | {"capability", "soname", "content"}


class Device(Record):
    """One accelerator, or a part of one that can be requested separately.

    ``id`` is unique among the vendor's devices where possible (a UUID, a serial number, else a
    bus id); ``label`` is the name in messages (3, 0:1). ``names`` are the names for requests, by
    id kind; several devices may share a name. ``nodes`` are paths of the inventory's nodes.
    ``bus_id`` is the PCI address as in /sys (0000:1b:00.0), ``model`` the product, and
    ``parent`` the ``id`` of the device that it is a part of. ``state`` is why it can't be used
    ("": it can). A part's nodes don't include its parent's: the vendor adds those it needs.
    """

    id: str
    label: str
    names: "Mapping[str, tuple[str, ...]]"
    nodes: tuple[str, ...] = ()
    bus_id: str = ""
    model: str = ""
    parent: str = ""
    state: str = ""


class Inventory(Record, devices=Device, nodes=DeviceNode, files=DriverFile):
    """Inventory of one vendor on one host.

    ``vendor`` is the vendor's name, ``root`` the driver root as a host path (/ or, for
    instance, /run/nvidia/driver), ``version`` the driver's version. ``nodes`` are all nodes that
    a container may get. Those of ``control`` (paths) come with any device. ``lost`` are the
    labels of devices that no longer respond. ``refused`` says, a sentence each, which listed
    files containers don't get.
    """

    vendor: str
    root: str
    version: str
    devices: tuple[Device, ...]
    nodes: tuple[DeviceNode, ...]
    control: tuple[str, ...] = ()
    files: tuple[DriverFile, ...] = ()
    lost: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()

    def node(self, path: str) -> DeviceNode | None:
        """Return the node with that path below the driver root, if it exists."""
        for node in self.nodes:
            if node.path == path:
                return node
        return None

    def nodes_of(self, device: Device) -> tuple[str, ...]:
        """Return the paths that give access to a device, including rarely granted ones.

        They include everything that a vendor grants with one device but not with every device.
        """
        return device.nodes

    def remembering(self, before: "Self") -> "Self":  # noqa: ARG002
        """Return the inventory with details of its lost devices from an older one.

        A driver may report only the number of a lost device.
        """
        return self

    def missing(self) -> list[str]:
        """Return the nodes that should exist, for its devices and in general, but don't."""
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
        """Return a short summary: Driver 1.2, 8 devices."""
        return f"{self.vendor}: driver {self.version}, {len(self.devices)} devices"

    def facts(self) -> "list[tuple[str, str]]":
        """Return further facts for display, each with its title."""
        return []

    def table(self) -> "tuple[tuple[str, ...], list[tuple[object, ...]]]":
        """Return the devices as a table for display: header and rows."""
        rows: list[tuple[object, ...]] = [
            (device.label, device.model, device.bus_id, device.id, device.state or "-")
            for device in self.devices
        ]
        return ("INDEX", "NAME", "BUS ID", "ID", "STATE"), rows

    def details(self) -> "dict[str, dict[str, Any]]":
        """Return further values of devices by their ids, under the keys of docs/json.md."""
        return {}

    def listing(self, users: "Mapping[str, list[str]]") -> "dict[str, list[Any]]":
        """Return the devices for `gpuhook list --format json`, each with its ``users`` by id."""
        found = [
            {"vendor": self.vendor, **device.to_json(), "containers": users[device.id]}
            for device in self.devices
        ]
        return {"devices": found}
