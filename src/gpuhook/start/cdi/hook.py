"""What the one CDI hook does for a container, going by what the engine has given it.

The engine has written nodes and mounts into config.json. Which names were asked for, nobody
says, so what is there counts.
"""

import os

from gpuhook.ground.cgroup import access
from gpuhook.ground.container import kernel
from gpuhook.ground.loader.layout import HostLayout
from gpuhook.start import given_nodes
from gpuhook.start.contract import Grant
from gpuhook.start.plan.image import Image
from gpuhook.start.plan.operations import (
    FILE_OPTIONS,
    BindFile,
    Plan,
    Symlink,
    UpdateLdCache,
    WriteFile,
)
from gpuhook.start.plan.writer import Places, PlanWriter
from gpuhook.start.planner import make_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.container.changes import Container
    from gpuhook.ground.container.rootfs import Rootfs
    from gpuhook.start.contract import Vendor
    from gpuhook.start.inventory.model import Device, Inventory
    from gpuhook.start.plan.operations import AllowDevice, BindDevice, Operation
    from gpuhook.start.plan.writer import Aliases

# By which an image's own ldconfig finds the host's folders, should it run later.
FOLDERS_CONFIG = "/etc/ld.so.conf.d/00-gpuhook.conf"


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
        found = devices(self._given, inventory)
        self.grant = Grant.of_document(vendor, inventory, config, found)

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
        planned = Places().write(steps)
        leads = {*planned.targets.values()}
        known = [
            AlreadyMounted(op)
            for op in planned.mounts.values()
            if op.destination in leads.intersection(self._given.paths) - places
        ]
        return Plan([*made, *known, *_Rest(planned, self._given.paths, image).write(steps).steps])

    def _bind(self, source: str, destination: str) -> BindFile:
        root = self.grant.inventory.root.rstrip("/")
        path = source.removeprefix(root) if source.startswith(f"{root}/") else source
        root = source.removesuffix(path) or "/"
        return BindFile(root, path, destination, FILE_OPTIONS, "the CDI document says so")


class _Rest(PlanWriter):
    """What an engine that applies a CDI document leaves to the hook: ``steps``.

    ``given`` are the paths of what it has given.
    """

    def __init__(self, planned: Places, given: set[str], image: Image) -> None:
        super().__init__()
        self.steps: list[Operation] = []
        self._links = planned.targets
        self._given = given
        self._absent = {*planned.mounts, *planned.nodes} - given
        self._image = image

    def _leads_to_something(self, path: str) -> bool:
        if path in self._absent:
            return False
        return path not in self._links or self._leads_to_something(self._links[path])

    def other(self, op: "Operation") -> None:
        """Do what the runtime doesn't."""
        if not op.by_runtime:
            self.steps.append(op)

    def rule(self, op: "AllowDevice") -> None:
        """Leave it to the engine."""

    def node(self, op: "BindDevice") -> None:
        """Leave it to the engine."""

    def mount(self, op: BindFile) -> None:
        """Leave it to the engine."""

    def link(self, op: Symlink) -> None:
        """Make a link to what the engine has given."""
        if self._leads_to_something(op.destination):
            self.steps.append(op)

    def copy(self, file: BindFile, aliases: "Aliases") -> None:
        """Leave the file to the engine, and make links at the paths that it names."""
        for place, target in aliases:
            is_there = place in self._links or place in self._given
            if not is_there and self._leads_to_something(target):
                self._links[place] = target
                self.steps.append(Symlink(place, target, replace=False, reason=file.reason))

    def cache(self, op: UpdateLdCache) -> None:
        """Let the loader find the libraries that the engine has given."""
        found = tuple(each for each in op.libraries if self._leads_to_something(each[1]))
        if found:
            self.steps += _for_loader(found, op, self._image)


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
