"""What the one CDI hook does for a container, going by what the engine has given it.

The engine has written nodes and mounts into config.json. Which names were asked for, nobody
says, so what is there counts.
"""

import os

from gpuhook.ground.cgroup import access
from gpuhook.ground.container import kernel
from gpuhook.ground.loader.layout import HostLayout
from gpuhook.start import given_nodes
from gpuhook.start.cdi.generate import grant
from gpuhook.start.plan.image import Image
from gpuhook.start.plan.operations import (
    FILE_OPTIONS,
    AllowDevice,
    BindDevice,
    BindFile,
    Plan,
    Symlink,
    UpdateLdCache,
    WriteFile,
)
from gpuhook.start.planner import make_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.container.changes import Container
    from gpuhook.ground.container.rootfs import Rootfs
    from gpuhook.start.contract import Grant, Vendor
    from gpuhook.start.inventory.model import Device, Inventory
    from gpuhook.start.plan.operations import Operation

# By which an image's own ldconfig finds the host's folders, should it run later.
FOLDERS_CONFIG = "/etc/ld.so.conf.d/00-gpuhook.conf"
_BY_ENGINE = (AllowDevice, BindDevice, BindFile)


class Given:
    """What a container is given: nodes, by path with their numbers, and mounts.

    ``numbers_at`` returns the numbers of the node that a mount brings to a path, or None: who
    names volumes may put anything where a node would be.
    """

    def __init__(
        self,
        spec: "dict[str, Any]",
        mounts: list[tuple[str, str]],
        numbers_at: "Callable[[str], tuple[int, int] | None]",
    ) -> None:
        linux = spec.get("linux")
        linux = linux if isinstance(linux, dict) else {}
        self._numbers = {
            str(entry.get("path")): (entry.get("major"), entry.get("minor"))
            for entry in given_nodes.objects(linux.get("devices"))
        }
        resources = linux.get("resources")
        self._rules = resources.get("devices") if isinstance(resources, dict) else None
        self._numbers_at = numbers_at
        there = {str(entry.get("destination")) for entry in given_nodes.objects(spec.get("mounts"))}
        self.paths = {*there, *(place for _, place in mounts), *self._numbers}

    def has_node(self, path: str, numbers: tuple[int, int]) -> bool:
        """Tell whether a node is there: made by the runtime, or mounted."""
        if path in self._numbers:
            return self._numbers[path] == numbers
        return path in self.paths and self._numbers_at(path) == numbers  # protects: given-node

    def openable(self, numbers: "set[tuple[int, int]]") -> "set[tuple[int, int]]":
        """Return which devices its cgroup lets it open: all, where no rules are for it.

        A node alone is no gift: a container can make one in a volume of another's.
        """
        # protects: given-opened
        return access.openable(self._rules, numbers) if self._rules else numbers


def by_mounts(spec: "dict[str, Any]", bundle: str) -> "Callable[[str], tuple[int, int] | None]":
    """Return ``numbers_at`` of what config.json says of mounts; ``bundle`` is its folder."""
    sources = {
        str(entry.get("destination")): entry.get("source")
        for entry in given_nodes.objects(spec.get("mounts"))
    }
    return lambda path: given_nodes.numbers_at(bundle, sources.get(path))


def devices(given: Given, inventory: "Inventory") -> "list[Device]":
    """Return the devices all of whose nodes are there, but those that are for a part's sake."""
    opened = given.openable({node.numbers for node in inventory.nodes})
    there = {
        node.path
        for node in inventory.nodes
        if node.numbers in opened and given.has_node(node.inside or node.path, node.numbers)
    }
    whole = {
        device.id for device in inventory.devices if device.nodes and there.issuperset(device.nodes)
    }
    parents = {device.parent for device in inventory.devices if device.id in whole}
    return [device for device in inventory.devices if device.id in whole - parents]


class Work:
    """What the hook has to do for one container, of one vendor.

    ``mounts`` are those of the document that are left to it: see ``own_hook``; ``numbers_at`` is
    as for ``Given``.
    """

    def __init__(
        self,
        spec: "dict[str, Any]",
        mounts: list[tuple[str, str]],
        vendor: "Vendor",
        inventory: "Inventory",
        config: "Config",
        numbers_at: "Callable[[str], tuple[int, int] | None]",
    ) -> None:
        self._given = Given(spec, mounts, numbers_at)
        self._mounts = mounts
        self.grant: Grant = grant(vendor, inventory, config, devices(self._given, inventory))

    def recorded(self, given: "dict[str, Any]") -> None:
        """Leave in a record what the container is given of the grant (``records.given``)."""
        opened = self._given.openable({(major, minor) for major, minor in given["devices"]})
        given["devices"] = [pair for pair in given["devices"] if tuple(pair) in opened]

    def plan(self, image: Image) -> Plan:
        """Return what there still is to do, for an image, where nodes and files are there."""
        host_image = Image(HostLayout(), image.brings, image.ldconfig)
        steps = make_plan([self.grant], host_image).operations
        made = [self._bind(*each) for each in self._mounts]
        places = {op.destination for op in made}
        known = [
            AlreadyMounted(op) for op in self._linked_to(steps) if op.destination not in places
        ]
        return Plan([*made, *known, *self._rest(steps, image)])

    def _bind(self, source: str, destination: str) -> BindFile:
        root = self.grant.inventory.root.rstrip("/")
        path = source.removeprefix(root) if source.startswith(f"{root}/") else source
        root = source.removesuffix(path) or "/"
        return BindFile(root, path, destination, FILE_OPTIONS, "the CDI document says so")

    def _linked_to(self, steps: "list[Operation]") -> "list[BindFile]":
        """Return the mounts of the engine that links lead to."""
        targets = _links(steps).values()
        mounts = [op for op in steps if isinstance(op, BindFile) and op.destination in targets]
        return [op for op in mounts if op.destination in self._given.paths]

    def _rest(self, steps: "list[Operation]", image: Image) -> "Iterator[Operation]":
        links = _links(steps)
        mounted = (op for op in steps if isinstance(op, (BindDevice, BindFile)))
        absent = {op.destination for op in mounted} - self._given.paths

        def leads_to_something(path: str) -> bool:
            return path not in absent and (path not in links or leads_to_something(links[path]))

        for op in steps:
            if isinstance(op, UpdateLdCache):
                found = tuple(each for each in op.libraries if leads_to_something(each[1]))
                if found:
                    yield from _for_loader(found, op, image)
            elif isinstance(op, Symlink):
                if leads_to_something(op.destination):
                    yield op
            elif not (op.by_runtime or isinstance(op, _BY_ENGINE)):
                yield op


def _links(steps: "list[Operation]") -> dict[str, str]:
    """Return where each link leads to."""
    return {
        op.destination: os.path.normpath(f"{os.path.dirname(op.destination)}/{op.target}")
        for op in steps
        if isinstance(op, Symlink)
    }


def _for_loader(
    libraries: tuple[tuple[str, str, int], ...], op: UpdateLdCache, image: Image
) -> "Iterator[Operation]":
    """Yield what makes an image's loader find libraries in the host's folders."""
    layout = image.layout
    if not layout.uses_cache:  # then it looks into its own folder and nowhere else
        first = {name: path for name, path, _ in reversed(libraries)}
        for name, path in first.items():
            yield Symlink(f"{layout.libraries}/{name}", path, replace=True, reason=op.reason)
        return
    folders = dict.fromkeys(os.path.dirname(path) for _, path, _ in libraries)
    others = [path for path in folders if path not in (layout.libraries, layout.libraries32)]
    if others:
        text = "".join(f"{path}\n" for path in others)
        yield WriteFile(FOLDERS_CONFIG, text, 0o644, op.reason)
    yield UpdateLdCache(libraries, op.reason, op.ldconfig)


class AlreadyMounted(BindFile):
    """A file of the driver that the engine has mounted: to cover others that have its names."""

    kind = "mounted"

    def __init__(self, op: BindFile) -> None:
        super().__init__(op.root, op.path, op.destination, op.options, op.reason)
        self._identity: tuple[int, int] | None = None

    def prepare(self, host: "Rootfs") -> None:
        """Look which file it is. Letting go of a clone that wasn't mounted takes long."""
        fd = self._opened(host)
        if fd is not None:
            self._identity = kernel.identity(fd)
            os.close(fd)

    def describe(self) -> str:
        """Say what is where."""
        return f"use {self.destination}, which the engine has mounted"

    def execute(self, container: "Container") -> None:
        """Let links to it know what they lead to."""
        if self._identity is not None:
            container.know(self._identity, self.destination)  # protects: covered-links
