"""The host's devices as extended resources of a cluster.

This reads small files below the driver roots (a device's NUMA node and driver), and changes
nothing. A broken vendor or device never affects the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, GpuhookError, MemoryLimitError, RequestError, listed
from gpuhook.base.sizes import amount, parse_size
from gpuhook.cluster.device_plugin.names import wrong_name
from gpuhook.cluster.device_plugin.settings import (
    CDI_ANNOTATIONS,
    CDI_CRI,
    ENVVAR,
    INDEX,
    VOLUME_MOUNTS,
    Settings,
    Sharing,
)
from gpuhook.cluster.device_plugin.state import DeviceSpec, PluginState, Resource, Unit
from gpuhook.cluster.vendors import cluster
from gpuhook.cluster.vendors.cluster import Extras, RequestChannels
from gpuhook.core.cdi.names import is_device
from gpuhook.core.contract import BY_DOCUMENT, Grant, Vendor
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.request.reader import Request
from gpuhook.monitor.vendors import pci
from gpuhook.tools.cdi.transform import mover

Links = Mapping[str, Mapping[str, int]]  # by the ids of devices


def resources(
    found: Sequence[tuple[Vendor, Inventory]],
    settings: Settings,
    config: Config,
    health: Mapping[str, str] | None = None,
    links: Links | None = None,
) -> tuple[PluginState, list[str]]:
    """Return the resources to offer, and warnings, a sentence each.

    ``health`` has the reasons why devices can't be allocated, by the inventory's ids; a whole
    device's reason also applies to its parts. ``links`` has the link scores between devices, by
    these ids.
    """
    made: dict[str, Resource] = {}
    warnings: list[str] = []
    for vendor, inventory in found:
        try:
            one = _Vendors(vendor, inventory, settings, config, health or {}, links or {})
            offered = one.resources()
        except GpuhookError as error:
            warnings.append(f"{vendor.names.TITLE}'s devices aren't offered: {error.cause}")
            continue
        warnings += one.warnings
        for resource in offered:
            if resource.name in made:
                warnings.append(f"Two kinds of devices would be {resource.name}: rename one")
            else:
                made[resource.name] = resource
    shared = {name for name, each in settings.sharing.items() if each.rename not in made}
    warnings += [f"The resource {name} is to be shared, and there is none" for name in shared]
    return PluginState(tuple(made.values())), warnings


class _Vendors:
    """The conversion of one vendor's devices to resources; collects ``warnings``."""

    def __init__(
        self,
        vendor: Vendor,
        inventory: Inventory,
        settings: Settings,
        config: Config,
        health: Mapping[str, str],
        links: Links,
    ) -> None:
        self.vendor = vendor
        self.inventory = inventory
        self.settings = settings
        self.config = config
        self.health = health
        self.links = links
        self.cluster = cluster.of(vendor.names, settings.vendors.get(vendor.names.NAME))
        self.by_id = {device.id: device for device in inventory.devices}
        self.wholes = {device.parent for device in inventory.devices}
        self.missing = set(inventory.missing())
        self.warnings: list[str] = []
        self.options = vendor.everything(config)
        self.extras = self._extras()
        self.on_host = _on_host(settings, inventory.root)

    def resources(self) -> list[Resource]:
        """Return the resources, without those whose names the kubelet would refuse."""
        path = self.inventory.root
        try:
            with Rootfs(path) as root:
                return self._resources(root)
        except OSError as error:
            raise DriverError(
                f"the driver root {path} can't be read: {error.strerror}", "Start the driver"
            ) from None

    def _resources(self, root: Rootfs) -> list[Resource]:
        self._check_variable()
        offers, warnings = self.cluster.offers(self.inventory, root)
        self.warnings += warnings
        for each in self.cluster.lost(self.inventory, root):
            offers.setdefault(self.cluster.resource(each, root), []).append(each)
        found = []
        for name, devices in offers.items():
            wrong = wrong_name(name)
            if wrong:
                self.warnings.append(f"The devices {name} can't be offered by that name: {wrong}")
            else:
                units = [self._unit(each, root) for each in devices]
                shared = self.settings.sharing.get(name)
                if shared is not None and shared.shares:
                    units = self._by_mps(units, shared)
                elif shared is not None and shared.memory:
                    units = [
                        self._by_memory(*pair, shared) for pair in zip(devices, units, strict=True)
                    ]
                found.append(self._resource(name, units))
        return found

    def _resource(self, name: str, units: list[Unit]) -> Resource:
        names = self.vendor.names
        shared = self.settings.sharing.get(name)
        return Resource(
            name=shared.rename if shared else name,
            vendor=names.NAME,
            variable=next(iter(names.VARIABLES), ""),
            mounts=names.MOUNTS,
            units=tuple(_unique(units)),
            replicas=shared.replicas if shared else 1,
            single=shared is not None and self._is_single(shared),
            environment=self.extras.variables,
            links=self._links(),
            cdi=self.extras.cdi,
            places=self.extras.mounts,
            nothing=self.cluster.nothing,
            driver_folder=self.cluster.driver_folder,
            shares=shared.shares if shared else (),
            memory=shared.memory if shared else (),
        )

    def _is_single(self, shared: Sharing) -> bool:
        return self.settings.single_requests if shared.single is None else shared.single

    def _by_mps(self, units: list[Unit], shared: Sharing) -> list[Unit]:
        """Return devices shared by MPS with their memory, or why they can't be allocated.

        ``gpuhook mps`` runs the daemon on the node, and gpu-py makes a container its client.
        """
        from gpuhook.vendors.nvidia import mps  # noqa: PLC0415 - few share devices by MPS

        strategies = {*self.settings.device_list_strategy}
        if not strategies <= {ENVVAR, VOLUME_MOUNTS}:
            raise DriverError(
                "sharing.mps needs gpu-py, and so only the strategy envvar or volume-mounts",
                "Set deviceListStrategy to one of them",
            )
        state = mps.read(self.config.state_dir)
        if state is None or not mps.lives(state):
            why = "MPS' control daemon isn't running on this node"
            return [replace(unit, reason=unit.reason or why) for unit in units]
        if shared.replicas > state.clients:
            self.warnings.append(
                f"{shared.name} has {shared.replicas} replicas for each device, and MPS serves "
                f"{state.clients} containers: raise clients in [gpuhook.mps]"
            )
        found = []
        for unit in units:
            device = state.device(unit.id)
            why = "" if device else "[gpuhook.mps] in config.toml doesn't share it"
            total = device.total if device else 0
            found.append(replace(unit, reason=unit.reason or why, memory=total))
        return found

    def _by_memory(self, device: Device, unit: Unit, shared: Sharing) -> Unit:
        """Return a device shared by memory with its memory, or why it can't be allocated."""
        if unit.reason:
            return unit
        try:
            limiter = self.vendor.memory_limiter(self._grant((device,)), self.config)
        except MemoryLimitError as error:
            return replace(unit, reason=error.cause)
        memory = limiter.memory[device.id]
        sizes = [size.of(memory) for text in shared.memory if (size := parse_size(text))]
        together = max(sizes) if shared.overcommits else sum(sizes)
        why = f"{shared.name} is shared in {amount(together)}, and it has {amount(memory)}"
        return replace(unit, memory=memory, reason=why if together > memory else "")

    def _check_variable(self) -> None:
        """Refuse to offer devices that no container can request, as a vendor without a variable."""
        others = {*self.settings.device_list_strategy} - {ENVVAR, VOLUME_MOUNTS}
        if not self.vendor.names.VARIABLES and not others:
            raise DriverError(
                "there is no variable with which a container could request them",
                "Use the strategy mounts or a CDI strategy",
            )

    # What every container gets ---------------------------------------------------------------

    def _extras(self) -> Extras:
        strategies = {*self.settings.device_list_strategy}
        ways = RequestChannels(
            by_variable=bool({ENVVAR, VOLUME_MOUNTS} & strategies),
            by_mounts=bool(self.vendor.names.MOUNTS) and ENVVAR not in strategies,
            unprivileged=self.config.accept_envvar_unprivileged,
        )
        found = self.cluster.extras(self.options, ways, lambda: self._why_not(()))
        self.warnings += found.warnings
        return found

    # Devices ---------------------------------------------------------------------------------

    def _unit(self, device: Device, root: Rootfs) -> Unit:
        by_index = self.settings.device_id_strategy == INDEX
        whole = self.by_id.get(device.parent, device)
        identity = self.cluster.id(device)
        known = {name for space in device.names.values() for name in space}
        nodes, reason = self._nodes(device)
        return Unit(
            id=identity,
            selector=device.label if by_index or identity not in known else identity,
            cdi=self._cdi_name(device, by_index),
            whole=self.cluster.id(whole),
            nodes=nodes,
            numa=pci.numa(root, device.bus_id or whole.bus_id),
            reason=self._reason(device) or reason,
            variables=self.cluster.variables(device),
        )

    def _cdi_name(self, device: Device, by_index: bool) -> str:
        """Return its name in gpuhook's CDI specs, "" if it has none."""
        if device.id in self.wholes:
            return ""
        name = device.label if by_index or not is_device(device.id) else device.id
        return f"{self.vendor.names.KIND}={name}"

    def _reason(self, device: Device) -> str:
        """Return why a device can't be allocated: by its state, its health or its setup."""
        noun = self.vendor.names.NOUN
        if device.state:
            return f"{noun} {device.label}: {device.state}"
        said = self.health.get(device.id) or self.health.get(device.parent, "")
        if said:
            return said
        absent = [path for path in self._paths(device) if path in self.missing]
        if absent:
            return f"{noun} {device.label}: there is no device node {listed(absent)}"
        if not {*self.settings.device_list_strategy} <= {ENVVAR, VOLUME_MOUNTS}:
            kept = self.vendor.only_by_runtime(self._grant((device,)), self.config)
            if kept:  # protects: plugin-shared
                return kept
        if self._needs_name() and not self._cdi_name(device, by_index=False):
            return f"{noun} {device.label}: {self.cluster.unnamed}"
        return ""

    def _needs_name(self) -> bool:
        return bool({CDI_CRI, CDI_ANNOTATIONS} & {*self.settings.device_list_strategy})

    def _paths(self, device: Device) -> list[str]:
        """Return the nodes of a device and of its parent."""
        whole = self.by_id.get(device.parent)
        return [*device.nodes, *(whole.nodes if whole else ())]

    def _nodes(self, device: Device) -> tuple[tuple[DeviceSpec, ...], str]:
        """Return all nodes for a container with only this device, or why it can't have them."""
        if device.id not in self.by_id:
            return (), ""
        try:
            nodes = self._grant((device,)).nodes
        except (DriverError, RequestError) as error:
            return (), error.cause
        found = (DeviceSpec(self.on_host(node.path), node.inside or node.path) for node, _ in nodes)
        return tuple(found), ""

    def _why_not(self, devices: tuple[Device, ...]) -> str:
        """Return why a container can't have these devices and the common nodes, "" if it can."""
        try:
            self.vendor.nodes(self._grant(devices))
        except (DriverError, RequestError) as error:
            return error.cause
        return ""

    def _grant(self, devices: tuple[Device, ...]) -> Grant:
        labels = tuple(device.label for device in devices)
        name = self.vendor.names.NAME
        request = Request(name, BY_DOCUMENT, labels, selectors=labels, options=self.options)
        return Grant(self.vendor, request, self.inventory, devices)

    def _links(self) -> dict[str, dict[str, int]]:
        """Return the links between this vendor's devices, by the cluster's ids."""
        ids = {device.id: self.cluster.id(device) for device in self.inventory.devices}
        own = self.cluster.links(self.inventory)
        found: dict[str, dict[str, int]] = {}
        for source in (own, self.links):
            for one, others in source.items():
                near = {ids[other]: score for other, score in others.items() if other in ids}
                if one in ids and near:
                    found[ids[one]] = near
        return found


def _unique(units: list[Unit]) -> list[Unit]:
    """Return the units without those whose id another has before them."""
    found: dict[str, Unit] = {}
    for unit in units:
        found.setdefault(unit.id, unit)
    return [*found.values()]


def _on_host(settings: Settings, root: str) -> Callable[[str], str]:
    """Return the mapping of paths below the driver root ``root``, as seen here, to the host's."""
    above = settings.dev_root or (settings.driver_root and _moved(settings, root)) or root
    return lambda path: above.rstrip("/") + path


def _moved(settings: Settings, root: str) -> str:
    return mover(settings.driver_root_ctr_path, settings.driver_root)(root)
