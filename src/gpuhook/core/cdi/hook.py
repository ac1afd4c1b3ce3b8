"""The work of our CDI hook in one container.

The engine has written nodes and mounts into config.json. It doesn't pass on the requested device
names, so the hook derives the devices from these nodes and mounts.
"""

import os

from gpuhook.base.cgroup import access
from gpuhook.base.container import kernel
from gpuhook.base.loader.layout import HostLayout
from gpuhook.core import spec_devices
from gpuhook.core.contract import Grant
from gpuhook.core.plan.image import Image
from gpuhook.core.plan.operations import (
    FILE_OPTIONS,
    BindFile,
    Plan,
    Symlink,
    UpdateLdCache,
    WriteFile,
)
from gpuhook.core.plan.writer import PlanIndex, PlanWriter
from gpuhook.core.planner import make_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.changes import ContainerRootfs
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.core.contract import Vendor
    from gpuhook.core.inventory.model import Device, Inventory
    from gpuhook.core.plan.operations import AllowDevice, BindDevice, Operation
    from gpuhook.core.plan.writer import Aliases

# Lets an image's own ldconfig find the host's folders if it runs later.
FOLDERS_CONFIG = "/etc/ld.so.conf.d/00-gpuhook.conf"


class EngineDevices:
    """Nodes (by path, with their numbers) and mounts that the engine gives a container.

    ``numbers_at`` returns the numbers of the node that is mounted at a path, or None: a user's
    volume can put anything there.
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
            for entry in spec_devices.objects(linux.get("devices"))
        }
        resources = linux.get("resources")
        self._rules = resources.get("devices") if isinstance(resources, dict) else None
        self._numbers_at = numbers_at
        there = {
            str(entry.get("destination")) for entry in spec_devices.objects(spec.get("mounts"))
        }
        self.paths = {*there, *(place for _, place in mounts), *self._numbers}

    def has_node(self, path: str, numbers: tuple[int, int]) -> bool:
        """Tell whether a node is there: created by the runtime, or mounted."""
        if path in self._numbers:
            return self._numbers[path] == numbers
        return path in self.paths and self._numbers_at(path) == numbers  # protects: given-node

    def openable(self, numbers: "set[tuple[int, int]]") -> "set[tuple[int, int]]":
        """Return which devices the container's cgroup lets it open: all, if it has no rules.

        A node is not enough: a container can create one in another container's volume.
        """
        # protects: given-opened
        return access.openable(self._rules, numbers) if self._rules else numbers


def by_mounts(spec: "dict[str, Any]", bundle: str) -> "Callable[[str], tuple[int, int] | None]":
    """Return ``numbers_at`` for the mounts in config.json; ``bundle`` is the bundle's folder."""
    sources = {
        str(entry.get("destination")): entry.get("source")
        for entry in spec_devices.objects(spec.get("mounts"))
    }
    return lambda path: spec_devices.numbers_at(bundle, sources.get(path))


def devices(given: EngineDevices, inventory: "Inventory") -> "list[Device]":
    """Return the devices whose nodes are all present, except parents of present parts."""
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


class HookWork:
    """Work of the hook for one container and one vendor.

    ``mounts`` are the CDI spec's mounts that are left to the hook: see ``hook_args``.
    ``numbers_at`` is as for ``EngineDevices``.
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
        self._given = EngineDevices(spec, mounts, numbers_at)
        self._mounts = mounts
        found = devices(self._given, inventory)
        self.grant = Grant.of_document(vendor, inventory, config, found)

    def recorded(self, given: "dict[str, Any]") -> None:
        """Keep in a record only the devices that the container may open (``records.given``)."""
        opened = self._given.openable({(major, minor) for major, minor in given["devices"]})
        given["devices"] = [pair for pair in given["devices"] if tuple(pair) in opened]

    def plan(self, image: Image) -> Plan:
        """Return the remaining operations for an image, given the nodes and files that exist."""
        host_image = Image(HostLayout(), image.brings, image.ldconfig)
        steps = make_plan([self.grant], host_image).operations
        made = [self._bind(*each) for each in self._mounts]
        places = {op.destination for op in made}
        planned = PlanIndex().write(steps)
        leads = {*planned.targets.values()}
        known = [
            AlreadyMounted(op)
            for op in planned.mounts.values()
            if op.destination in leads.intersection(self._given.paths) - places
        ]
        return Plan(
            [*made, *known, *_DeferredWriter(planned, self._given.paths, image).write(steps).steps]
        )

    def _bind(self, source: str, destination: str) -> BindFile:
        root = self.grant.inventory.root.rstrip("/")
        path = source.removeprefix(root) if source.startswith(f"{root}/") else source
        root = source.removesuffix(path) or "/"
        return BindFile(root, path, destination, FILE_OPTIONS, "the CDI spec says so")


class _DeferredWriter(PlanWriter):
    """Operations that an engine which applies a CDI spec leaves to the hook: ``steps``.

    ``given`` are the paths that the engine has provided.
    """

    def __init__(self, planned: PlanIndex, given: set[str], image: Image) -> None:
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
        """Keep an operation that the runtime doesn't do."""
        if not op.by_runtime:
            self.steps.append(op)

    def rule(self, op: "AllowDevice") -> None:
        """Leave the rule to the engine."""

    def node(self, op: "BindDevice") -> None:
        """Leave the node to the engine."""

    def mount(self, op: BindFile) -> None:
        """Leave the mount to the engine."""

    def link(self, op: Symlink) -> None:
        """Keep a link to a path that the engine has provided."""
        if self._leads_to_something(op.destination):
            self.steps.append(op)

    def copy(self, file: BindFile, aliases: "Aliases") -> None:
        """Leave the file to the engine, and add links for its aliases."""
        for place, target in aliases:
            is_there = place in self._links or place in self._given
            if not is_there and self._leads_to_something(target):
                self._links[place] = target
                self.steps.append(Symlink(place, target, replace=False, reason=file.reason))

    def cache(self, op: UpdateLdCache) -> None:
        """Make the loader find the libraries that the engine has mounted."""
        found = tuple(each for each in op.libraries if self._leads_to_something(each[1]))
        if found:
            self.steps += _for_loader(found, op, self._image)


def _for_loader(
    libraries: tuple[tuple[str, str, int], ...], op: UpdateLdCache, image: Image
) -> "Iterator[Operation]":
    """Yield the operations that make an image's loader find libraries in the host's folders."""
    layout = image.layout
    if not layout.uses_cache:  # then it searches only its own folder
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
    """A driver file that the engine has mounted; files of the same name are masked."""

    kind = "mounted"

    def __init__(self, op: BindFile) -> None:
        super().__init__(op.root, op.path, op.destination, op.options, op.reason)
        self._identity: tuple[int, int] | None = None

    def prepare(self, host: "Rootfs") -> None:
        """Record the file's identity. Dropping an unmounted clone would be slow."""
        fd = self._opened(host)
        if fd is not None:
            self._identity = kernel.identity(fd)
            os.close(fd)

    def describe(self) -> str:
        """Describe the operation."""
        return f"use {self.destination}, which the engine has mounted"

    def execute(self, container: "ContainerRootfs") -> None:
        """Tell the container what links to this file lead to."""
        if self._identity is not None:
            container.know(self._identity, self.destination)  # protects: covered-links
