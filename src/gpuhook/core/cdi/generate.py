"""CDI specs of one vendor's devices on this host: the plan's operations as CDI edits.

Every device is planned as for a container that requests only it; a container that requests
none is planned as well, and its edits become the common ones. The image is unknown, so libraries
go into the same folders as on the host. The hook (``gpuhook.cdi_hook``) does what depends on the
image or on the combination of devices. It also mounts daemons' sockets: a container fails to
start without a file that its CDI spec names, and daemons come and go.

Changes nothing, and only reads whether the mounted files may be mounted.
"""

from gpuhook.base import names as ours
from gpuhook.base.errors import CdiError, DriverError, NoDeviceError, RequestError, listed, shown
from gpuhook.base.loader.layout import HostLayout
from gpuhook.base.oci.jsontext import Record
from gpuhook.core.cdi import versions
from gpuhook.core.cdi.names import is_device
from gpuhook.core.contract import Grant, check_others
from gpuhook.core.plan.image import Image
from gpuhook.core.plan.operations import (
    AddGroup,
    AllowDevice,
    BindDevice,
    BindFile,
    SetVariable,
    UpdateLdCache,
    usable,
)
from gpuhook.core.plan.writer import PlanWriter, links_as_mounts
from gpuhook.core.planner import make_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Vendor
    from gpuhook.core.inventory.model import Device, Inventory
    from gpuhook.core.plan.operations import Operation

    Edits = dict[str, Any]

ALL = "all"
MARK = "GPUHOOK_CDI"  # a variable that no program reads
_MOUNT_OPTIONS = ("rbind", "rprivate")


def _type_index(device: "Device", vendor: "Vendor") -> str:
    whole, part = vendor.names.TYPES
    return f"{part if device.parent else whole}{device.label}"


# Naming strategies: a strategy's name -> the name that it gives a device.
STRATEGIES: "dict[str, Callable[[Device, Vendor], str]]" = {
    "index": lambda device, _: device.label,
    "uuid": lambda device, _: device.id,
    "type-index": _type_index,
}
DEFAULT_STRATEGIES = ("index", "uuid")


class GeneratedSpec(Record):
    """A CDI spec, and warnings for the user, a sentence each without a full stop."""

    document: "dict[str, Any]"
    warnings: list[str]


class CdiReader(Record):
    """An engine with its version, and the highest CDI version that it reads."""

    title: str
    highest: str


class SpecSource:
    """The input of CDI specs: a vendor, its inventory, and the configuration's restrictions.

    ``hook`` is the hook's path on the host; ``config_path`` the value of its --config, if any.
    ``reader`` finds the oldest engine that has to read the specs, None if any may; it is called
    only when needed. With ``without_hook`` the specs are for programs that run no hooks, but know
    NVIDIA's by name: links become mounts, and the loader's folders are arguments of that hook.
    ``left_out`` lists what no spec contains, with the reason, a sentence each.
    """

    def __init__(
        self,
        vendor: "Vendor",
        inventory: "Inventory",
        config: "Config",
        hook: str,
        config_path: str | None = None,
        reader: "Callable[[], CdiReader | None] | None" = None,
        *,
        without_hook: bool = False,
    ) -> None:
        self.vendor = vendor
        self.inventory = inventory
        self.config = config
        self.left_out: dict[str, None] = {}
        self._hook = hook
        self._config_path = config_path
        self._reader = reader
        self._without_hook = without_hook
        self._variables: frozenset[str] | None = None

    def grant(self, devices: "Iterable[Device]") -> Grant:
        """Return the grant of a container with these devices."""
        return Grant.of_document(self.vendor, self.inventory, self.config, devices)

    def edits(self, devices: "Iterable[Device]", *, whole: bool = False) -> "Edits":
        """Return the edits for a container with these devices, including the common ones.

        ``whole`` says that it has no others of the vendor. Else engines add the edits of others
        and keep one value of a variable, so one whose value depends on the devices is left out.
        RequestError for a device that only gpu-py may inject.
        """
        granted = self.grant(devices)
        check_others(granted, self.config)
        plan = make_plan([granted], Image(HostLayout()), self._groups(granted))
        operations, left_out = usable(plan.operations)
        self.left_out.update(dict.fromkeys(left_out))
        if self._without_hook:
            operations += links_as_mounts(operations).values()
        return self.written(operations, whole=whole).edits

    def written(self, operations: "Iterable[Operation]", *, whole: bool = False) -> "CdiWriter":
        """Return operations as edits; ``whole`` as for ``edits``."""
        common = None if whole else self._common_variables()
        return CdiWriter(self.vendor.names.FIXED_MAJORS, common).write(operations)

    def _common_variables(self) -> frozenset[str]:
        """Return the variables that all devices set alike, each by itself and all together."""
        if self._variables is None:
            devices = [device for device in self.inventory.devices if not device.state]
            granted = [self.grant(each) for each in (devices, *([one] for one in devices))]
            settings = [self.vendor.environment(each) for each in granted]
            found = [{(one.name, one.value, one.front) for one in each} for each in settings]
            alike = frozenset(found[0]).intersection(*found[1:])
            self._variables = frozenset(name for name, _, _ in alike)
        return self._variables

    def _groups(self, granted: Grant) -> "dict[int, str]":
        """Return the groups that the specs contain, none if an engine here can't read them."""
        if self.config.feature("no-additional-gids-for-device-nodes"):
            return {}
        groups = granted.groups()
        reader = self._reader() if groups and self._reader is not None else None
        if reader is None or not versions.is_below(reader.highest, versions.GROUPS):
            return groups
        text = (
            f"Groups of device nodes are left out, because {reader.title} supports CDI specs up to "
            f"version {reader.highest}, and they need {versions.GROUPS}: users other than root "
            "can't open those nodes"
        )
        self.left_out[text] = None
        return {}

    def common(self) -> "Edits":
        """Return the edits for every container: those without devices, the hook and a marker.

        The marker prevents a second injection: a runtime that reads the variable in ``names.VOID``
        does nothing for its value. Without such a variable, gpuhook's own marks the spec.
        """
        edits = self.edits(())
        plan = make_plan([self.grant(self.inventory.devices)], Image(HostLayout()))
        written = self.written(plan.operations)
        if self._without_hook:
            edits["hooks"] = _in_nvidias_words(written.libraries)
        elif written.unwritten or self.config.shm_size:
            edits["hooks"] = [self.hook_entry()]
        edits["env"] = [*edits.get("env", ()), f"{self.vendor.names.VOID or MARK}=void"]
        return edits

    def hook_entry(self) -> "dict[str, Any]":
        """Return gpuhook's hook as an entry of a CDI spec."""
        config = ["--config", self._config_path] if self._config_path else []
        # protects: cdi-environment
        return {
            "hookName": ours.CDI_HOOK_STAGE,
            "path": self._hook,
            "args": [ours.CDI_HOOK, *config, self.vendor.names.KIND],
            "env": list(ours.HOOK_ENVIRONMENT),
        }


def _in_nvidias_words(libraries: list[str]) -> "list[dict[str, Any]]":
    """Return the hook entry that passes library folders to programs that run no hooks."""
    folders = dict.fromkeys(path.rpartition("/")[0] for path in libraries)
    if not folders:
        return []
    name = ours.TOOLKIT_CDI_HOOK
    words = [word for folder in folders for word in ("--folder", folder)]
    hook = {"hookName": ours.CDI_HOOK_STAGE, "path": f"/usr/bin/{name}"}
    return [{**hook, "args": [name, "update-ldcache", *words]}]


def generate(
    source: SpecSource,
    strategies: "Iterable[str]" = DEFAULT_STRATEGIES,
    selectors: "tuple[str, ...]" = (ALL,),
    *,
    all_device: bool = True,
) -> GeneratedSpec:
    """Return the CDI spec of a vendor's devices; CdiError if there is none to name.

    Each strategy names each device once, and ``all`` are all of them together, unless
    ``all_device`` is off. ``selectors`` choose devices, as containers name them;
    UnknownDeviceError for one that the host doesn't have.
    """
    vendor = source.vendor
    devices, warnings = _offered(source)
    if selectors != (ALL,):
        devices = _chosen(selectors, source, devices)
    named: dict[str, Edits] = {}
    for device in devices:
        edits = source.edits([device])
        for name in _names(device, vendor, strategies):
            named.setdefault(name, edits)
    if all_device:
        problem = _why_not_together(vendor, source.grant(devices))
        if problem:
            warnings.append(f"There is no device {ALL}: {problem}")
        else:
            named.setdefault(ALL, source.edits(devices))
    document = tidy(
        {
            "cdiVersion": "",
            "kind": vendor.names.KIND,
            "devices": [{"name": name, "containerEdits": edits} for name, edits in named.items()],
            "containerEdits": source.common(),
        }
    )
    document["cdiVersion"] = versions.needed(document)
    return GeneratedSpec(document, [*warnings, *_unwritten(source, devices), *source.left_out])


def _offered(source: SpecSource) -> "tuple[list[Device], list[str]]":
    """Return the devices to name, those with all their nodes, and why others aren't."""
    vendor, inventory = source.vendor, source.inventory
    devices, reasons = vendor.offered(source.grant(inventory.devices))
    missing = inventory.missing()
    found = []
    for device in devices:
        absent = [path for path in device.nodes if path in missing]
        kept = vendor.only_by_runtime(source.grant([device]), source.config)
        if kept:
            reasons.append(kept)
        elif absent:
            noun = vendor.names.NOUN
            reasons.append(f"{noun} {device.label}: there is no device node {listed(absent)}")
        else:
            found.append(device)
    if not found:
        raise _nothing(vendor, reasons)
    return found, reasons


def _chosen(
    selectors: "tuple[str, ...]", source: SpecSource, offered: "list[Device]"
) -> "list[Device]":
    """Return the selected devices, of those that a CDI spec can name."""
    from gpuhook.core.inventory import selection  # noqa: PLC0415 - not where containers start

    names = source.vendor.names
    found = selection.select(selectors, source.inventory, names)
    can = {device.id for device in offered}
    for device in found:
        if device.id not in can:
            raise CdiError(
                f"A CDI spec can't name the {names.NOUN} {device.label}",
                "Name one of those that gpuhook cdi generate has without --device-id",
            )
    return list(found)


def _why_not_together(vendor: "Vendor", granted: Grant) -> str:
    """Return why devices can't be given to one container, "" if they can."""
    try:
        vendor.check(granted)
    except RequestError as error:
        return error.cause
    except DriverError:
        pass  # concerns each of them by itself, and ``offered`` has reported it
    return ""


def _nothing(vendor: "Vendor", reasons: list[str]) -> NoDeviceError:
    because = f": {'; '.join(reasons)}" if reasons else ""
    return NoDeviceError(
        f"This host has no {vendor.names.ANY_NOUN} that a CDI spec could name{because}",
        "Run `gpuhook info` and `gpuhook doctor`; an older CDI spec is unchanged",
    )


def _names(device: "Device", vendor: "Vendor", strategies: "Iterable[str]") -> list[str]:
    """Return a device's names, without those that CDI doesn't allow."""
    names = [STRATEGIES[strategy](device, vendor) for strategy in strategies]
    found = [name for name in names if is_device(name)]
    if not found:
        raise CdiError(
            f"The {vendor.names.NOUN} {shown(names[0])} isn't a valid device name in a CDI spec",
            "Choose another --device-name-strategy",
        )
    return found


def _unwritten(source: SpecSource, devices: "Iterable[Device]") -> list[str]:
    """Return what containers get from gpuhook itself but not from CDI, a sentence each."""
    plan = make_plan([source.grant(devices)], Image(HostLayout()))
    return source.written(plan.operations).losses


# Operations as edits ------------------------------------------------------------------------


class CdiWriter(PlanWriter):
    """The part of a plan that CDI can express: ``edits``, with CDI's names in the library's order.

    Node numbers are written only for fixed majors: engines would use others as they are, even
    after a module was loaded again with different ones. ``unwritten`` is for the hook;
    ``libraries`` are the paths of those for the loader's cache. ``variables`` are the names
    of those to write, None for all.
    """

    def __init__(
        self, fixed_majors: tuple[int, ...], variables: frozenset[str] | None = None
    ) -> None:
        super().__init__()
        self.libraries: list[str] = []
        self._fixed = fixed_majors
        self._variables = variables
        self._edits: Edits = {"env": [], "deviceNodes": [], "mounts": [], "additionalGids": []}
        self._rules: list[AllowDevice] = []
        self._nodes: set[tuple[int, int]] = set()
        self._unset: list[SetVariable] = []
        self._in_front: list[SetVariable] = []

    @property
    def edits(self) -> "Edits":
        """The edits, without empty lists."""
        return {key: value for key, value in self._edits.items() if value}

    @property
    def losses(self) -> list[str]:
        """Things that containers get from gpuhook itself but not from CDI, a sentence each."""
        return (
            [
                f"CDI can't express it: {op.describe()} ({op.reason})"
                for op in self._rules
                if op.allows not in self._nodes
            ]
            + [
                f"Only gpu-py sets {op.setting.name}, whose value depends on all devices of a "
                f"container ({op.reason})"
                for op in self._unset
            ]
            + [
                f"{op.setting.name} replaces the image's value: {op.reason}"
                for op in self._in_front
            ]
        )

    def rule(self, op: AllowDevice) -> None:
        """Skip a rule: CDI writes those of nodes, with the node."""
        self._rules.append(op)

    def variable(self, op: SetVariable) -> None:
        """Write a variable, which replaces the image's, if it is among those to write."""
        if self._variables is not None and op.setting.name not in self._variables:
            self._unset.append(op)
            return
        self._edits["env"].append(f"{op.setting.name}={op.setting.value}")
        if op.setting.front:
            self._in_front.append(op)

    def group(self, op: AddGroup) -> None:
        """Write a group."""
        self._edits["additionalGids"].append(op.gid)

    def node(self, op: BindDevice) -> None:
        """Write a node, with its rule."""
        self._nodes.add(op.node.numbers)
        self._edits["deviceNodes"].append(_node(op, self._fixed))

    def mount(self, op: BindFile) -> None:
        """Write a mount."""
        self._edits["mounts"].append(_mount(op))

    def cache(self, op: UpdateLdCache) -> None:
        """Leave libraries to the hook."""
        self.libraries += [path for _, path, _ in op.libraries]
        self.other(op)


def _node(op: BindDevice, fixed_majors: tuple[int, ...]) -> "dict[str, Any]":
    node = op.node
    entry: dict[str, Any] = {"path": op.destination}
    if op.source != op.destination:
        entry["hostPath"] = op.source
    if op.major in fixed_majors:
        entry.update(type="c", major=op.major, minor=op.minor)
    # Without it most runtimes create nodes for all users, and gVisor's fails.
    entry["fileMode"] = node.mode
    entry["permissions"] = AllowDevice.access
    if node.gid:
        entry["gid"] = node.gid
    return entry


def _mount(op: BindFile) -> "dict[str, Any]":
    return {
        "hostPath": op.source,
        "containerPath": op.destination,
        "options": [*op.options, *_MOUNT_OPTIONS],
    }


# CDI specs as they are written ------------------------------------------------------------------


def tidy(document: "dict[str, Any]") -> "dict[str, Any]":
    """Return a CDI spec without duplicates, and sorted, so that equal ones are equal texts.

    Edits of a device that the common ones contain are dropped, unless the device would have none.
    Devices are sorted by name, nodes and mounts by the depth of their container path, then by
    the path; the order of variables and hooks matters, and is kept.
    """
    common = _tidy_edits(document.get("containerEdits") or {})
    devices = []
    for device in document.get("devices") or ():
        edits = _tidy_edits(device["containerEdits"])
        devices.append({**device, "containerEdits": _without(edits, common) or edits})
    found = dict(document)
    if devices:
        found["devices"] = sorted(devices, key=lambda device: device["name"])
    if common:
        found["containerEdits"] = common
    return found


_LISTS = ("env", "deviceNodes", "netDevices", "hooks", "mounts", "additionalGids")
_PATHS = {"deviceNodes": "path", "mounts": "containerPath"}  # sort keys of such entries


def _tidy_edits(edits: "Edits") -> "Edits":
    found: Edits = {}
    for key in (*_LISTS, *edits):
        if key in found or not edits.get(key):
            continue
        found[key] = _once(edits[key]) if key in _LISTS else edits[key]
        if key in _PATHS:
            found[key].sort(key=lambda entry, name=_PATHS[key]: _depth_first(entry[name]))
    return found


def _depth_first(path: str) -> tuple[int, str]:
    return path.rstrip("/").count("/"), path


def _once(entries: "list[Any]") -> "list[Any]":
    return [each for at, each in enumerate(entries) if each not in entries[:at]]


def _without(edits: "Edits", common: "Edits") -> "Edits":
    """Return the edits that aren't in the common ones."""
    found = {}
    for key, value in edits.items():
        shared = common.get(key)
        if key not in _LISTS:
            rest = None if value == shared else value
        else:
            rest = [each for each in value if each not in (shared or ())]
        if rest:
            found[key] = rest
    return found
