"""The contract between the house and the vendors of accelerators.

``Vendor`` is what a vendor has to be, ``load`` returns one by its names, and a ``Grant`` is what
one vendor gives to one container. Which vendors there are stands in ``gpuhook.vendors.registry``;
who starts is handed that.

docs/engineering/add-a-vendor.md goes through it step by step.
"""

import os

from gpuhook.ground.errors import DriverError, LimitError, RequestError, listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.container.rootfs import Rootfs
    from gpuhook.ground.oci.jsontext import Record
    from gpuhook.ground.oci.process import Setting
    from gpuhook.start.inventory.model import Device, Inventory, Node
    from gpuhook.start.limiter import Limiter
    from gpuhook.start.plan.image import Image
    from gpuhook.start.plan.operations import Operation
    from gpuhook.start.request.reader import Reading, Request

    # A vendor's name -> its names (vendors/NAME/names.py), in the order in which they are served.
    Known = Mapping[str, ModuleType]

OPTIONAL_NAMES = frozenset({"MEMORY_VARIABLES"})  # of names.py; without one, a vendor has none
BY_DOCUMENT = "cdi"  # the source of a request that a CDI document stands for
_SIGKILL = 9  # the module signal costs more than a look
_REAP = 0.2  # seconds that a killed child may take to end: where the kernel hangs, it doesn't


def package(names: "ModuleType") -> str:
    """Return the package that holds a vendor: the one that its names are in."""
    return names.__name__.rpartition(".")[0]


def load(names: "ModuleType") -> "Vendor":
    """Return the vendor with these names, its own modules imported."""
    name = f"{package(names)}.vendor"
    module = __import__(name, fromlist=["VENDOR"])
    vendor: Vendor = module.VENDOR
    return vendor.of(names)


class Grant:
    """What one vendor gives to one container: the devices that its request means."""

    __slots__ = ("_nodes", "devices", "inventory", "request", "vendor")

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
        self._nodes: list[tuple[Node, str]] | None = None

    @classmethod
    def of_document(
        cls,
        vendor: "Vendor",
        inventory: "Any",
        config: "Config",
        devices: "Iterable[Device]",
    ) -> "Grant":
        """Return what a container gets to which a CDI document gives these devices.

        That is all that belongs to them: a document doesn't know what else is asked for.
        """
        from gpuhook.start.request.reader import Request  # noqa: PLC0415 - imported already

        devices = tuple(devices)
        labels = tuple(device.label for device in devices)
        selectors = ("all",) if devices == inventory.devices else labels
        options = vendor.everything(config)
        name = vendor.names.NAME
        request = Request(name, BY_DOCUMENT, labels, selectors=selectors, options=options)
        return cls(vendor, request, inventory, devices)

    @property
    def nodes(self) -> "list[tuple[Node, str]]":
        """The nodes to give, each with the reason."""
        if self._nodes is None:
            self._nodes = self.vendor.nodes(self)
        return self._nodes

    @property
    def ids(self) -> tuple[str, ...]:
        """What the devices are told apart by."""
        return tuple(device.id for device in self.devices)

    def rules(self) -> "dict[tuple[int, int], str]":
        """Return the (major, minor) of all that the container may open, each with the reason."""
        found = {node.numbers: reason for node, reason in self.nodes}
        for pair, reason in self.vendor.rules(self).items():
            found.setdefault(pair, reason)
        return found

    def groups(self) -> dict[int, str]:
        """Return the groups that its process needs to open the nodes, each with the reason."""
        found: dict[int, str] = {}
        for node, _ in self.nodes:
            if node.group:
                found.setdefault(node.group, f"{node.path} is for this group")
        return found


class Vendor:
    """What the house asks of a vendor; by default, that of one whose devices are nodes alone.

    Everything is a pure function of its arguments but ``discover``, ``surroundings`` and
    ``examine``, which read. Nothing here changes anything, and no device is opened: the house does
    what the operations say.
    """

    names: "ModuleType"
    # The settings that its inventory depends on beside the driver root (attributes of Config), and
    # folders below /dev whose nodes are too many to look at each at every start: that such a
    # folder is as it was stands for them.
    settings: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()
    # Whether the kernel's dmem controller knows its devices' memory, by their bus ids.
    in_dmem = False

    def of(self, names: "ModuleType") -> "Vendor":  # noqa: ARG002
        """Return the vendor with these names, which ``load`` was asked for."""
        return self

    # What the machine has ---------------------------------------------------------------

    @property
    def inventory(self) -> "type[Inventory]":
        """The class of its inventory."""
        from gpuhook.start.inventory.model import Inventory  # noqa: PLC0415 - where it is asked

        return Inventory

    def root(self, config: "Config") -> str:
        """Return the driver root that the configuration names, / for the host's own."""
        return config.driver_root_of(self.names.NAME)

    def discover(self, config: "Config") -> "Inventory":
        """Look at the driver root.

        NoDriverError where there is no driver of this vendor, or it isn't loaded; DriverError
        where it doesn't work, or a file can't be looked at; a driver without devices is an
        inventory without any.
        """
        try:
            self.try_files(config, self.root(config), lambda: self._discover(config))
            return self._discover(config)
        except OSError as error:  # protects: vendor-error
            where = f": {error.filename}" if error.filename else ""
            raise DriverError(
                f"{self.names.TITLE}'s driver below {self.root(config)} can't be looked at: "
                f"{error.strerror}{where}",
                "See who has mounted or changed something there, and run gpuhook doctor",
            ) from None

    def traces(self) -> "Sequence[str]":
        """Return paths below a driver root; without one of them its driver isn't there.

        None where what ``discover`` waits for is in a child anyhow.
        """
        return ()

    def try_files(self, config: "Config", root: str, look: "Callable[[], object]") -> None:
        """Have a child look first: a driver may hang in a file of /sys, and a child can be left.

        DriverError if it isn't done in time; what else goes wrong is for who looks then. Nothing is
        done where the driver isn't in the root: starts may ask for each vendor.
        """
        below = root.rstrip("/")
        if not any(os.path.lexists(below + path) for path in self.traces()):
            return
        from gpuhook.ground.container import kernel  # noqa: PLC0415 - when an inventory is made alone
        from gpuhook.ground.host import signals  # noqa: PLC0415 - as above

        child = os.fork()
        if child == 0:
            try:
                kernel.die_with_parent()
                kernel.keep_only(())  # an engine waits until nobody has a hook's pipes any more
                look()
            finally:
                os._exit(0)
        if kernel.reap(child, config.nvml_timeout) is None:
            signals.send_to_child(child, _SIGKILL)
            kernel.reap(child, _REAP)
            # protects: driver-files-hang
            raise DriverError(
                f"{self.names.TITLE}'s driver below {root} can't be looked at: a file of it didn't "
                f"answer within {config.nvml_timeout:g} seconds",
                "Look for the driver in dmesg, and load it again or reboot",
            )

    def _discover(self, config: "Config") -> "Inventory":
        """Look at the driver root, as ``discover`` says; an OSError is said there.

        By default its module ``discover`` does, which is costly to import and rarely needed.
        """
        module = __import__(f"{package(self.names)}.discover", fromlist=["discover"])
        found: Inventory = module.discover(self.root(config))
        return found

    def surroundings(self, config: "Config") -> "list[Any]":  # noqa: ARG002
        """Return, as JSON values, what an inventory was made in: a change of it makes it stale.

        Asked at every start, so a few reads of small files or folders at most.
        """
        return []

    def withheld(self, config: "Config") -> list[str]:  # noqa: ARG002
        """Return paths of device nodes that this process may not open, on this machine.

        A driver that shows each process what it may open shows this one a part of the machine:
        where its device cgroup keeps it from the rest, as in a job of Slurm's.
        """
        return []

    def within_reach(self, inventory: "Any") -> "Any":
        """Return what of an inventory of the whole machine its driver shows this process.

        Numbers mean devices as the driver counts them here: see ``withheld``.
        """
        return inventory

    def volatile_paths(self, config: "Config") -> list[str]:  # noqa: ARG002
        """Return paths below the driver root whose coming or going makes an inventory stale.

        Those that exist when it is made are among its files, which are looked at anyhow.
        """
        return []

    def watched_paths(self, config: "Config") -> list[str]:  # noqa: ARG002
        """Return folders below the driver root in which a new name makes an inventory stale.

        They are looked at while they exist; ``volatile_paths`` has those that may come.
        """
        return []

    def optional_modules(self, config: "Config") -> tuple[str, ...]:  # noqa: ARG002
        """Return the modules that starts import with this configuration, and not without it."""
        return ()

    # What a container asks for ----------------------------------------------------------

    def options(self) -> "Record | None":
        """Return an empty record of what its variables may say beside devices, if anything."""
        return None

    def everything(self, config: "Config") -> "Any":  # noqa: ARG002
        """Return the options of a container that gets all that belongs to its devices.

        A CDI document can't know what a container asks for, so it brings that.
        """
        return self.options()

    def offered(self, grant: "Grant") -> "tuple[list[Device], list[str]]":
        """Return the devices to name in a CDI document, and why others aren't, a sentence each.

        ``grant`` is of all devices and ``everything``. A device whose parts can be asked for is
        none itself.
        """
        devices = grant.inventory.devices
        whole = {device.parent for device in devices}
        found = [device for device in devices if not device.state and device.id not in whole]
        noun = self.names.NOUN
        return found, [f"{noun} {each.label}: {each.state}" for each in devices if each.state]

    def read(self, reading: "Reading", options: "Any") -> None:
        """Fill in the options; RequestError for what is malformed or not allowed.

        Nothing is refused to a container that asks for no device (``reading.devices`` is None).
        """

    def tenant_names(self, options: "Any") -> list[str]:  # noqa: ARG002
        """Return what a container's options bring in addition to devices, for one tenant only.

        As qualified CDI names, which a cluster gives it by.
        """
        return []

    def check(self, grant: Grant) -> None:
        """Raise a RequestError or DriverError for devices that can't be given together."""

    def only_by_runtime(self, grant: Grant, config: "Config") -> str:  # noqa: ARG002
        """Return why only gpu-py may give one of the granted devices, "" where anybody may.

        Documents, engines, plugins and a hook without gpu-py give nodes and files, and no more.
        """
        return ""

    def warnings(self, grant: Grant) -> list[str]:
        """Return what a container gets only in part, a sentence each, without a full stop."""
        return [*grant.inventory.refused]

    # What it gets -----------------------------------------------------------------------

    def nodes(self, grant: Grant) -> "list[tuple[Node, str]]":
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
                "See that udev makes it, or load the driver again",
            )
        return existing(wanted, grant.inventory.nodes)

    def rules(self, grant: Grant) -> "Mapping[tuple[int, int], str]":  # noqa: ARG002
        """Return (major, minor) to allow beyond those of the nodes, each with the reason."""
        return {}

    def environment(self, grant: Grant) -> "list[Setting]":  # noqa: ARG002
        """Return the variables to set in the container; only the runtime can, the hook can't."""
        return []

    def limiter(self, grant: Grant, config: "Config") -> "Limiter":  # noqa: ARG002
        """Return what limits the memory of the granted devices; LimitError where nothing can."""
        if self.in_dmem:
            from gpuhook.start.limiter import Dmem  # noqa: PLC0415 - few containers have limits

            return Dmem(grant.devices, grant.inventory, self.names.NOUN)
        raise LimitError(
            f"The memory of {self.names.TITLE}'s devices can't be limited: neither their driver "
            "nor the kernel can do that",
            "Start the container without a limit, and set none in [gpuhook.limits] on this node",
        )

    def examine(self, root: "Rootfs", config: "Config") -> "Record | None":  # noqa: ARG002
        """Look at what an image brings that changes the plan; equal records make equal plans."""
        return None

    def edits(self, grant: Grant, image: "Image") -> "list[Operation]":  # noqa: ARG002
        """Return what is done beyond nodes and rules: files, links, covers, the loader's cache.

        What ``examine`` found is ``image.brings[names.NAME]``.
        """
        return []


def check_others(grant: Grant, config: "Config") -> None:
    """Raise RequestError where a device is given in another way than gpu-py's, and may not be."""
    why = grant.vendor.only_by_runtime(grant, config)
    if why:  # protects: only-by-runtime
        raise RequestError(
            why,
            "Ask for it by a variable in a container whose runtime is gpu-py, or for another one",
        )


def existing(wanted: "Mapping[str, str]", nodes: "Iterable[Node]") -> "list[tuple[Node, str]]":
    """Return the nodes with these paths, in their order, each with its reason."""
    there = {node.path: node for node in nodes}
    return [(there[path], reason) for path, reason in wanted.items() if path in there]
