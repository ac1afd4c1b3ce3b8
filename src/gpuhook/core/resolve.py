"""Resolution of a spec and the configuration to requests, existing devices and grants.

The runtime, the hook and ``gpuhook explain`` share this sequence.
"""

from gpuhook.base import names as common
from gpuhook.base.errors import (
    AnyDeviceError,
    DriverError,
    NoDriverError,
    RequestError,
    shown,
)
from gpuhook.core import contract
from gpuhook.core.request.reader import Request, SpecReader, check_kinds
from gpuhook.core.request.sources import ANY, is_any, may_limit_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.oci.process import EnvironmentSetting
    from gpuhook.base.oci.spec import Spec
    from gpuhook.core.contract import Grant, Vendor, VendorRegistry
    from gpuhook.core.inventory.model import Device, Inventory
    from gpuhook.core.memory_limits import MemoryLimits
    from gpuhook.core.plan.image import Examine
    from gpuhook.core.records.choice import ChoiceContext
    from gpuhook.core.verdict import Verdict

    VendorRequests = list[tuple[Vendor, Request]]


class Progress:
    """The state of the sequence, for reports on the circumstances of a failure."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.inventories: list[Inventory] = []


class Allocation:
    """Requests that can be met, with each vendor's grant.

    ``groups`` are those of the host that the container's process needs to open its nodes, with
    reasons; ``settings`` its variables. ``cdi_devices`` are those of CDI specs, which
    only the runtime can give. ``chosen`` are the kinds of devices of which the container gets any,
    chosen for ``start``. ``absent`` has a sentence for each vendor whose devices a
    container doesn't get, because there is no driver here and the configuration ignores that.
    RequestError if two vendors need different values of one variable.
    """

    def __init__(
        self,
        grants: "list[Grant]",
        config: "Config",
        vendors: "VendorRegistry",
        absent: tuple[str, ...] = (),
        cdi_devices: tuple[str, ...] = (),
        chosen: tuple[str, ...] = (),
        start: "ChoiceContext | None" = None,
    ) -> None:
        self.grants = grants
        self.vendors = vendors
        self.absent = absent
        self.cdi_devices = cdi_devices
        self.chosen = chosen
        self.start = start
        self.settings: list[EnvironmentSetting] = []
        self.groups: dict[int, str] = {}
        adds_groups = not config.feature("no-additional-gids-for-device-nodes")
        for grant in grants:
            self.settings += grant.vendor.environment(grant)
            self.groups = {**grant.groups(), **self.groups} if adds_groups else {}
        if len(grants) > 1:
            _check_settings(grants)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all devices."""
        return tuple(found for grant in self.grants for found in grant.ids)

    @property
    def gives_devices(self) -> bool:
        """True if the container gets a device, and not only a driver's files."""
        return bool(self.cdi_devices) or any(grant.devices for grant in self.grants)

    @property
    def requests(self) -> "list[Request]":
        """The container's requests, one for each vendor."""
        return [grant.request for grant in self.grants]

    def examiners(self) -> "dict[str, Examine]":
        """Return each vendor's image probe, by vendor."""
        return {grant.vendor.names.NAME: grant.vendor.examine for grant in self.grants}

    def import_hook_modules(self) -> None:
        """Import the vendors' modules for the hook, before it accesses the container."""
        for grant in self.grants:
            grant.vendor.import_hook_modules()

    def warnings(self) -> list[str]:
        """Return what the container gets only in part, or differently, a sentence each."""
        found = [text for grant in self.grants for text in grant.vendor.warnings(grant)]
        return [*self.absent, *self.misunderstood(), *found]

    def misunderstood(self) -> list[str]:
        """Return the invalid words in the container's requests, a sentence each."""
        return [text for request in self.requests for text in request.warnings]


def resolve(
    spec: "dict[str, Any]",
    config: "Config",
    vendors: "VendorRegistry",
    progress: Progress | None = None,
    *,
    container: str = "",
    save: bool = True,
    skip_absent: bool = False,
    inventories: "Mapping[str, Inventory] | None" = None,
    starter: int | None = None,
    path: str = "",
    any_is_all: bool = False,
) -> Allocation | None:
    """Return how a container's requests are met, None if it requests nothing.

    ``vendors`` are all vendors. Raises the GpuhookError of the step that failed;
    ``progress`` holds the steps before it. With ``save`` off, a new inventory isn't
    saved. ``inventories``, by vendor, are known to be current. ``container`` is the
    container's id, "" if unknown: if the node has a gate, its verdict decides which
    devices are given, and RequestError is raised without one. With ``skip_absent`` a vendor without
    a driver here gives nothing, whatever is requested.

    Free devices (``any``) are chosen for the process ``starter`` (``ChoiceContext``) and the
    config.json at ``path``; for 0 nothing is recorded, and for None they are refused. With
    ``any_is_all`` they are all devices, of which the caller picks.
    """
    progress = progress or Progress()
    asked, cdi_devices = _asked(spec, config, vendors, progress, inventories or {})
    if not asked and not cdi_devices:
        return None
    verdict = _verdict(config, container, asked, cdi_devices) if config.gate else None
    chooser = _Chooser(spec, config, starter, container, path, any_is_all=any_is_all)
    grants: list[Grant] = []
    absent: list[NoDriverError] = []
    for vendor, request in asked:
        try:
            inventory = (inventories or {}).get(request.vendor)
            inventory = inventory or _inventory(config, vendor, save=save)
        except NoDriverError as error:
            ignored = config.missing_driver == "ignore" and _is_general(request)
            if not (ignored or skip_absent):
                raise
            absent.append(error)
            continue
        progress.inventories.append(inventory)
        if verdict is None:
            devices = chooser.select(vendor, request, inventory)
        else:
            devices = verdict.of(vendor.names, inventory)  # protects: verdict-devices
            if request.selectors and not devices:
                continue
        grants.append(contract.Grant(vendor, request, inventory, devices))
    for grant in grants:
        grant.vendor.check(grant)
    if any(is_any(name.rpartition("=")[2]) for name in cdi_devices):
        cdi_devices = chooser.documents(cdi_devices, vendors, progress.requests, inventories or {})
    causes = tuple(error.cause for error in absent)
    chosen = tuple(chooser.chosen)
    return Allocation(grants, config, vendors, causes, cdi_devices, chosen, chooser.start)


def _inventory(config: "Config", vendor: "Vendor", *, save: bool) -> "Inventory":
    """Return the devices of a vendor that this process may use; NoDriverError without a driver."""
    from gpuhook.core.inventory import cache  # noqa: PLC0415 - where a device is asked for

    found: Inventory = vendor.within_reach(cache.get_inventory(config, vendor, save=save))
    return found


class _Chooser:
    """Selection of a container's devices: by name, or free ones for ``any``.

    ``chosen`` are the kinds of the latter, ``start`` the container's start then. The arguments are
    those of ``resolve``.
    """

    def __init__(
        self,
        spec: "dict[str, Any]",
        config: "Config",
        starter: int | None,
        container: str,
        path: str,
        *,
        any_is_all: bool,
    ) -> None:
        self._spec = spec
        self._config = config
        self._starter = starter
        self._place = container, path
        self._any_is_all = any_is_all
        self.chosen: list[str] = []
        self.start: ChoiceContext | None = None

    def select(
        self, vendor: "Vendor", request: Request, inventory: "Inventory"
    ) -> "tuple[Device, ...]":
        """Return the devices for a request's selectors."""
        selectors = request.selectors
        if any(map(is_any, selectors)):
            if not self._any_is_all:
                return self._choose(vendor, request, selectors, inventory)
            selectors = tuple("all" if is_any(each) else each for each in selectors)
        from gpuhook.core.inventory import selection  # noqa: PLC0415 - as in resolve

        return selection.select(selectors, inventory, vendor.names, request.spaces)

    def _choose(
        self, vendor: "Vendor", request: Request, words: "Sequence[str]", inventory: "Inventory"
    ) -> "tuple[Device, ...]":
        """Return free devices for ``words``, all names of the vendor's devices in a request."""
        from gpuhook.core.records import choice  # noqa: PLC0415 - few containers ask for any device

        wanted = choice.count(words, vendor.names)
        if self._starter is None:
            raise AnyDeviceError(
                f"The container asks for {ANY} {vendor.names.NOUN}, and which is free is only "
                "decided when gpu-py or gpuhook's hook starts a container outside a cluster",
                "Name the device",
            )
        self.start = self.start or choice.ChoiceContext(self._spec, self._starter, *self._place)
        self.chosen.append(vendor.names.KIND)
        return choice.choose(vendor, request, wanted, inventory, self._config, self.start)

    def documents(
        self,
        names: tuple[str, ...],
        vendors: "VendorRegistry",
        requests: "Sequence[Request]",
        inventories: "Mapping[str, Inventory]",
    ) -> tuple[str, ...]:
        """Return the names of CDI devices, with the chosen ones in the place of each ``any``."""
        from gpuhook.core.inventory import cache  # noqa: PLC0415 - as in _choose
        from gpuhook.core.records import choice  # noqa: PLC0415 - as in _choose

        found: list[str] = []
        served = {each.KIND: each for each in vendors.values()}
        for name in names:
            kind, _, device = name.partition("=")
            if not is_any(device) or kind not in served:
                found.append(name)
                continue
            words = [each.partition("=")[2] for each in names if each.startswith(f"{kind}=")]
            vendor = contract.load(served[kind])
            inventory = inventories.get(vendor.names.NAME)
            inventory = inventory or cache.get_inventory(self._config, vendor)
            whole = next(each for each in requests if name in each.cdi_devices)
            request = Request(
                vendor.names.NAME, whole.source, whole.devices, options=vendor.options()
            )
            devices = self._choose(vendor, request, words, inventory)
            found += choice.names_in_documents(kind, devices, inventory, self._config)
        return tuple(dict.fromkeys(found))


def _verdict(
    config: "Config", container: str, asked: "VendorRequests", cdi_devices: tuple[str, ...]
) -> "Verdict":
    """Return the gate's verdict on a container; RequestError for a name of several."""
    from gpuhook.core import verdict  # noqa: PLC0415 - on nodes with a gate

    found = verdict.read(config, container)
    tenants = [name for vendor, request in asked for name in vendor.tenant_names(request.options)]
    found.check_names([*cdi_devices, *tenants])
    return found


def find_memory_limits(
    spec: "Spec",
    config: "Config",
    vendors: "VendorRegistry",
    resolved: Allocation | None,
    inventories: "Mapping[str, Inventory] | None" = None,
    *,
    given: "Sequence[Grant]" = (),
) -> "MemoryLimits | None":
    """Return the memory limits of a container's devices, None if there are none.

    ``resolved`` is the result of its requests; devices that engines give themselves count as well.
    MemoryLimitError for limits that can't be met, RequestError for a device that an engine
    gives and only gpu-py may give. ``inventories`` as for ``resolve``; ``given`` are further
    devices, which aren't in its config.json.
    """
    if not (config.limits_memory or config.mps_devices or sets_memory_limit(spec.data, vendors)):
        return None
    from gpuhook.core import memory_limits as found  # noqa: PLC0415 - few containers have any

    grants = resolved.grants if resolved is not None else ()
    return found.find(spec, config, vendors, (*grants, *given), inventories or {})


def sets_memory_limit(spec: "dict[str, Any]", vendors: "VendorRegistry") -> bool:
    """Tell whether a container sets a memory limit; its spec may have any shape."""
    process, annotations = spec.get("process"), spec.get("annotations")
    env = process.get("env") if isinstance(process, dict) else None
    variables = [
        word for each in vendors.values() for word in getattr(each, "MEMORY_VARIABLES", ())
    ]
    starts = tuple(f"{name}=" for name in (common.MEMORY_VARIABLE, *variables))
    ends = [end for each in vendors.values() for end in getattr(each, "MEMORY_ANNOTATIONS", ())[1:]]
    keys = (common.MEMORY_ANNOTATION, *ends)
    mounts = spec.get("mounts")
    return (
        (isinstance(annotations, dict) and any(key.endswith(keys) for key in annotations))
        or any(
            isinstance(each, str) and each.startswith(starts)
            for each in (env if isinstance(env, list) else ())
        )
        or any(
            isinstance(each, dict) and may_limit_memory(each.get("destination"))
            for each in (mounts if isinstance(mounts, list) else ())
        )
    )


def _asked(
    spec: "dict[str, Any]",
    config: "Config",
    vendors: "VendorRegistry",
    progress: Progress,
    inventories: "Mapping[str, Inventory]",
) -> "tuple[VendorRequests, tuple[str, ...]]":
    """Return the vendors of requested devices, and the CDI devices of specs."""
    reader = SpecReader(spec, config)
    asked: dict[str, tuple[Vendor, Request]] = {}
    for names in vendors.values():
        if reader.asks(names):
            vendor, request = _read(reader, names, (), vendors, progress)
            by_mounts = request.source == "volume-mounts"
            if by_mounts and reader.env.get(names.VOID, "").lower() == "void":
                request = _beside_cdi(request, reader, vendor, inventories)
            asked[names.NAME] = vendor, request
    every = dict.fromkeys(name for _, request in asked.values() for name in request.cdi_devices)
    for names in vendors.values() if every and config.mode != "cdi" else ():
        ours = tuple(name for name in every if name.startswith(f"{names.KIND}="))
        if ours:
            asked[names.NAME] = _read(reader, names, ours, vendors, progress)
            for name in ours:
                del every[name]
    progress.requests = [request for _, request in asked.values()]
    wanting = [(vendor, request) for vendor, request in asked.values() if _wants(request)]
    return wanting, tuple(every)


def _read(
    reader: SpecReader,
    names: "ModuleType",
    more: tuple[str, ...],
    vendors: "VendorRegistry",
    progress: Progress,
) -> "tuple[Vendor, Request]":
    """Return a vendor and the request to it; ``more`` are names from other sources."""
    vendor = contract.load(names)
    try:
        request = reader.read(names, vendor, more)
        if request.cdi_devices:
            check_kinds(request, vendors.values(), reader.config)  # protects: kinds
    except RequestError as error:
        progress.requests.append(error.request)
        raise
    return vendor, request


def _beside_cdi(
    request: "Request", reader: SpecReader, vendor: "Vendor", inventories: "Mapping[str, Inventory]"
) -> "Request":
    """Return a request by mounts; one for nothing if an engine has given devices by a CDI spec.

    Such specs set the vendor's variable to void, and so may an image whose devices a cluster
    requests by mounts: that one has no nodes. Source: NVIDIA Container Toolkit 1.20.2.
    """
    from gpuhook.core import spec_devices  # noqa: PLC0415 - few containers have both
    from gpuhook.core.inventory import cache  # noqa: PLC0415 - as above

    has = spec_devices.numbers(reader.spec)
    try:
        found = inventories.get(request.vendor) or cache.get_inventory(reader.config, vendor)
    except DriverError:  # it is reported where the devices are looked up
        return request
    if not spec_devices.devices_of(has, found):
        return request
    reason = f"the engine has given the container {vendor.names.TITLE}'s devices by CDI"
    ignored = (*request.ignored, ("volume-mounts", reason))
    # protects: mounts-beside-cdi
    return Request(request.vendor, options=vendor.options(), ignored=ignored)


def _wants(request: "Request") -> bool:
    """Tell whether it requests anything of its vendor, and not only CDI devices."""
    return request.devices is not None and (bool(request.selectors) or not request.cdi_devices)


def _is_general(request: "Request") -> bool:
    """Tell whether it requests all devices, as images do for hosts that they don't know."""
    return all(name.lower() == "all" for name in request.selectors)


def _check_settings(grants: "list[Grant]") -> None:
    """Refuse vendors that would override each other's variables."""
    values: dict[str, tuple[Grant, EnvironmentSetting]] = {}
    for grant in grants:
        for each in grant.vendor.environment(grant):
            other, before = values.setdefault(each.name, (grant, each))
            in_front = before.front and each.front
            same = (before.value, before.front) == (each.value, each.front)
            if other is not grant and not in_front and not same:
                names = other.vendor.names.TITLE, grant.vendor.names.TITLE
                raise RequestError(
                    f"{' and '.join(names)} need different values of the variable {each.name} in "
                    f"the container: {shown(before.value)} and {shown(each.value)}",
                    "Request only the devices of one of the two vendors",
                )
