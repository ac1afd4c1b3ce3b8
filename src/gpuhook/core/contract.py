"""The interface between gpuhook's core and the vendors of accelerators.

``Vendor`` is the interface of a vendor, ``load`` returns one by its names, and a ``Grant`` is the
set of devices that one vendor gives to one container. The caller passes in the vendors from
``gpuhook.vendors.registry``.

docs/engineering/add-a-vendor.md describes it step by step.
"""

import os

from gpuhook.base.errors import DriverError, MemoryLimitError, RequestError, listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.base.oci.jsontext import Record
    from gpuhook.base.oci.process import EnvironmentSetting
    from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
    from gpuhook.core.memory_limiter import MemoryLimiter
    from gpuhook.core.plan.image import Image
    from gpuhook.core.plan.operations import Operation
    from gpuhook.core.request.reader import Request, RequestReader

    # A vendor's name -> its names (vendors/NAME/names.py), in the order in which they are served.
    VendorRegistry = Mapping[str, ModuleType]

# Of names.py; a vendor without them has none.
OPTIONAL_NAMES = frozenset({"MEMORY_VARIABLES", "MEMORY_ANNOTATIONS"})
BY_DOCUMENT = "cdi"  # the source of a request that comes from a CDI spec
_SIGKILL = 9  # importing the module signal is too slow here
_REAP = 0.2  # seconds for a killed child to exit: it doesn't while the kernel hangs


def package(names: "ModuleType") -> str:
    """Return the package of a vendor: the one that contains its names."""
    return names.__name__.rpartition(".")[0]


def load(names: "ModuleType") -> "Vendor":
    """Return the vendor with these names, its own modules imported."""
    name = f"{package(names)}.vendor"
    module = __import__(name, fromlist=["VENDOR"])
    vendor: Vendor = module.VENDOR
    return vendor.of(names)


class Grant:
    """The devices of one vendor that one container's request selects."""

    __slots__ = ("_nodes", "_rules", "devices", "inventory", "request", "vendor")

    def __init__(
        self,
        vendor: "Vendor",
        request: "Request",
        inventory: "Any",
        devices: "tuple[Device, ...]",
    ) -> None:
        self.vendor = vendor
        self.request = request
        self.inventory = inventory  # of the vendor's own class
        self.devices = devices
        self._nodes: list[tuple[DeviceNode, str]] | None = None
        self._rules: dict[tuple[int, int], str] | None = None

    @classmethod
    def of_document(
        cls,
        vendor: "Vendor",
        inventory: "Any",
        config: "Config",
        devices: "Iterable[Device]",
    ) -> "Grant":
        """Return the grant of a container that gets these devices from a CDI spec.

        It includes all options of the devices: a CDI spec doesn't know what else is requested.
        """
        from gpuhook.core.request.reader import Request  # noqa: PLC0415 - imported already

        devices = tuple(devices)
        labels = tuple(device.label for device in devices)
        selectors = ("all",) if devices == inventory.devices else labels
        options = vendor.everything(config)
        name = vendor.names.NAME
        request = Request(name, BY_DOCUMENT, labels, selectors=selectors, options=options)
        return cls(vendor, request, inventory, devices)

    @property
    def nodes(self) -> "list[tuple[DeviceNode, str]]":
        """The nodes to give, each with the reason."""
        if self._nodes is None:
            self._nodes = self.vendor.nodes(self)
        return self._nodes

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the devices."""
        return tuple(device.id for device in self.devices)

    def rules(self) -> "dict[tuple[int, int], str]":
        """Return the (major, minor) of every node that the container may open, with the reason."""
        if self._rules is None:
            self._rules = {node.numbers: reason for node, reason in self.nodes}
            for pair, reason in self.vendor.rules(self).items():
                self._rules.setdefault(pair, reason)
        return self._rules

    def groups(self) -> dict[int, str]:
        """Return the groups that its process needs to open the nodes, each with the reason."""
        found: dict[int, str] = {}
        for node, _ in self.nodes:
            if node.group:
                found.setdefault(node.group, f"{node.path} is for this group")
        return found


class Vendor:
    """The interface of a vendor; the defaults fit a vendor whose devices are only nodes.

    Everything is a pure function of its arguments except ``discover``, ``cache_key`` and
    ``examine``, which read. Nothing here changes anything or opens a device: the core carries out
    the operations.
    """

    names: "ModuleType"
    # The settings that its inventory depends on in addition to the driver root (attributes of
    # Config), and folders below /dev with too many nodes to check each at every start: gpuhook
    # only checks that such a folder is unchanged.
    settings: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()
    # The modules that only the hook needs, imported before it accesses the container: later, an
    # import would read the image's files.
    hook_modules: tuple[str, ...] = ()
    # True if the kernel's dmem controller knows its devices' memory, by their bus ids.
    in_dmem = False
    # True if a container can only use devices with successive numbers together.
    only_neighbours = False

    def of(self, names: "ModuleType") -> "Vendor":  # noqa: ARG002
        """Return the vendor with these names, as passed to ``load``."""
        return self

    # What the host has ------------------------------------------------------------------

    @property
    def inventory(self) -> "type[Inventory]":
        """The class of its inventory."""
        from gpuhook.core.inventory.model import Inventory  # noqa: PLC0415 - where it is asked

        return Inventory

    def root(self, config: "Config") -> str:
        """Return the driver root that the configuration names, / for the host's own."""
        return config.driver_root_of(self.names.NAME)

    def discover(self, config: "Config") -> "Inventory":
        """Read the driver root.

        NoDriverError if this vendor's driver is missing or isn't loaded; DriverError if it
        doesn't work, or a file can't be read; a driver without devices returns an empty
        inventory.
        """
        try:
            self.try_files(config, self.root(config), lambda: self._discover(config))
            return self._discover(config)
        except OSError as error:  # protects: vendor-error
            where = f": {error.filename}" if error.filename else ""
            raise DriverError(
                f"{self.names.TITLE}'s driver below {self.root(config)} can't be read: "
                f"{error.strerror}{where}",
                "Check the mounts and files there, and run gpuhook doctor",
            ) from None

    def driver_markers(self) -> "Sequence[str]":
        """Return paths below a driver root; if none exists, the driver isn't there.

        None if ``discover`` waits for the driver only in a child.
        """
        return ()

    def signs(self) -> "Sequence[str]":
        """Return paths below a driver root, one of which at least exists while it is loaded."""
        return self.driver_markers()

    def try_files(self, config: "Config", root: str, look: "Callable[[], object]") -> None:
        """Read in a child first: a driver may hang in a file of /sys, and a child can be abandoned.

        DriverError if it isn't done in time; the caller's own attempt reports other failures. Does
        nothing if the driver isn't in the root: a start may ask every vendor.
        """
        below = root.rstrip("/")
        if not any(os.path.lexists(below + path) for path in self.driver_markers()):
            return
        from gpuhook.base.container import kernel  # noqa: PLC0415 - only to make an inventory
        from gpuhook.base.host import signals  # noqa: PLC0415 - as above

        child = os.fork()
        if child == 0:
            try:
                kernel.die_with_parent()
                kernel.keep_only(
                    ()
                )  # an engine waits until all copies of a hook's pipes are closed
                look()
            finally:
                os._exit(0)
        if kernel.reap(child, config.nvml_timeout) is None:
            signals.send_to_child(child, _SIGKILL)
            kernel.reap(child, _REAP)
            # protects: driver-files-hang
            raise DriverError(
                f"{self.names.TITLE}'s driver below {root} can't be read: a file of it didn't "
                f"respond within {config.nvml_timeout:g} seconds",
                "Look for the driver in dmesg, and load it again or reboot",
            )

    def _discover(self, config: "Config") -> "Inventory":
        """Read the driver root for ``discover``, which handles an OSError.

        By default the vendor's module ``discover`` does so, which is slow to import.
        """
        module = __import__(f"{package(self.names)}.discover", fromlist=["discover"])
        found: Inventory = module.discover(self.root(config))
        return found

    def cache_key(self, config: "Config") -> "list[Any]":  # noqa: ARG002
        """Return JSON values on which an inventory depends: a change makes it stale.

        Called at every start, so it reads a few small files or folders at most.
        """
        return []

    def withheld(self, config: "Config") -> list[str]:  # noqa: ARG002
        """Return paths of device nodes on this host that this process may not open.

        Some drivers show each process only the devices that it may open. This process then sees a
        part of the host's, if its device cgroup denies the others, as in a Slurm job.
        """
        return []

    def within_reach(self, inventory: "Any") -> "Any":
        """Return the part of the whole host's inventory that its driver shows this process.

        Device indices are those that the driver uses in this process: see ``withheld``.
        """
        return inventory

    def volatile_paths(self, config: "Config") -> list[str]:  # noqa: ARG002
        """Return paths below the driver root whose creation or removal makes an inventory stale.

        Those that exist when it is made are among its files, which are checked anyway.
        """
        return []

    def watched_paths(self, config: "Config") -> list[str]:  # noqa: ARG002
        """Return folders below the driver root in which a new name makes an inventory stale.

        They are checked while they exist; ``volatile_paths`` has those that may appear.
        """
        return []

    def optional_modules(self, config: "Config") -> tuple[str, ...]:  # noqa: ARG002
        """Return the modules that starts import only with this configuration."""
        return ()

    def import_hook_modules(self) -> None:
        """Import ``hook_modules``."""
        for name in self.hook_modules:
            __import__(name)

    # What a container requests ----------------------------------------------------------

    def options(self) -> "Record | None":
        """Return an empty record of the options of its variables other than devices, if any."""
        return None

    def everything(self, config: "Config") -> "Any":  # noqa: ARG002
        """Return the options of a container that gets everything of its devices.

        A CDI spec uses them, because it doesn't know the container's request.
        """
        return self.options()

    def offered(self, grant: "Grant") -> "tuple[list[Device], list[str]]":
        """Return the devices to name in a CDI spec, and why others aren't, a sentence each.

        ``grant`` is of all devices and ``everything``. A device whose parts can be requested isn't
        listed itself.
        """
        devices = grant.inventory.devices
        whole = {device.parent for device in devices}
        found = [device for device in devices if not device.state and device.id not in whole]
        noun = self.names.NOUN
        return found, [f"{noun} {each.label}: {each.state}" for each in devices if each.state]

    def is_divided(self, device: "Device", inventory: "Any") -> bool:
        """Tell whether only parts of a device can be used, and not the whole."""
        return any(each.parent == device.id for each in inventory.devices)

    def read(self, reading: "RequestReader", options: "Any") -> None:
        """Fill in the options; RequestError for malformed or forbidden ones.

        A container that requests no device (``reading.devices`` is None) is never refused.
        """

    def tenant_names(self, options: "Any") -> list[str]:  # noqa: ARG002
        """Return what a container's options add to devices, for one tenant only.

        They are qualified CDI names, as in a cluster's allocation.
        """
        return []

    def check(self, grant: Grant) -> None:
        """Raise a RequestError or DriverError for devices that can't be given together."""

    def only_by_runtime(self, grant: Grant, config: "Config") -> str:  # noqa: ARG002
        """Return why only gpu-py may give one of the granted devices, "" if there is no reason.

        CDI specs, engines, plugins and a hook without gpu-py give only nodes and files.
        """
        return ""

    def warnings(self, grant: Grant) -> list[str]:
        """Return what a container gets only in part, a sentence each, without a full stop."""
        return [*grant.inventory.refused]

    # What it gets -----------------------------------------------------------------------

    def nodes(self, grant: Grant) -> "list[tuple[DeviceNode, str]]":
        """Return the nodes to give, each once, with the reason; DriverError without one of them."""
        noun, title = self.names.NOUN, self.names.TITLE
        wanted = dict.fromkeys(grant.inventory.control, f"control of {title}'s devices")
        for device in grant.devices:
            for path in device.nodes:
                wanted.setdefault(path, f"{noun} {device.label}")
        missing = [path for path in grant.inventory.missing() if path in wanted]
        if missing:
            raise DriverError(
                f"{title}'s driver has no node {listed(missing)}",
                "Check that udev creates it, or load the driver again",
            )
        return existing(wanted, grant.inventory.nodes)

    def rules(self, grant: Grant) -> "Mapping[tuple[int, int], str]":  # noqa: ARG002
        """Return (major, minor) to allow in addition to the nodes, each with the reason."""
        return {}

    def environment(self, grant: Grant) -> "list[EnvironmentSetting]":  # noqa: ARG002
        """Return the variables to set in the container; only the runtime can, the hook can't."""
        return []

    def memory_limiter(self, grant: Grant, config: "Config") -> "MemoryLimiter":  # noqa: ARG002
        """Return the limiter of the granted devices' memory; MemoryLimitError if there is none."""
        if self.in_dmem:
            from gpuhook.core.memory_limiter import DmemLimiter  # noqa: PLC0415 - few containers have limits

            return DmemLimiter(grant.devices, grant.inventory, self.names.NOUN)
        raise MemoryLimitError(
            f"The memory of {self.names.TITLE}'s devices can't be limited: neither their driver "
            "nor the kernel supports it",
            "Start the container without a limit, and set none in [gpuhook.limits] on this node",
        )

    def examine(self, root: "Rootfs", config: "Config") -> "Record | None":  # noqa: ARG002
        """Probe an image for what changes the plan; equal records make equal plans."""
        return None

    def edits(self, grant: Grant, image: "Image") -> "list[Operation]":  # noqa: ARG002
        """Return operations other than nodes and rules: files, links, masks, the loader's cache.

        The result of ``examine`` is ``image.brings[names.NAME]``.
        """
        return []


def check_others(grant: Grant, config: "Config") -> None:
    """Raise RequestError for a device that only gpu-py may give, given in another way."""
    why = grant.vendor.only_by_runtime(grant, config)
    if why:  # protects: only-by-runtime
        raise RequestError(
            why,
            "Request it by a variable in a container with runtime gpu-py, or request another one",
        )


def existing(
    wanted: "Mapping[str, str]", nodes: "Iterable[DeviceNode]"
) -> "list[tuple[DeviceNode, str]]":
    """Return the nodes with these paths, in their order, each with its reason."""
    there = {node.path: node for node in nodes}
    return [(there[path], reason) for path, reason in wanted.items() if path in there]
