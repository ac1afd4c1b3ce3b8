"""What a container asks for, read from its OCI spec and the configuration's policy.

A pure function of its two arguments: the runtime, the hook and ``gpuhook explain`` call the
same one and so see the same request.
"""

from gpuhook.errors import RequestError, SpecError, shown
from gpuhook.names import cdi_parts
from gpuhook.oci.jsontext import Record
from gpuhook.request import sources
from gpuhook.request.sources import MountRequests
from gpuhook.vendors.nvidia import variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.config import Config

# NVIDIA's kind for "found on the machine when the container starts": its names are selectors.
AUTOMATIC = "runtime.nvidia.com/gpu="

_NAME_LIMIT = 256  # characters; the longest real name, an old MIG one, has about 60
_NAME_CHARACTERS = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:/=+@"
)


class Request(Record):
    """What a container asks for; never changed once it is made.

    ``source`` is where the devices were named: environment, volume-mounts, annotations or
    none. ``devices`` are the names in order, once each: None if nothing is asked for, ()
    for a container that wants the driver and no GPU. ``cdi_devices`` are those of them to be
    looked up in CDI specs, as qualified names; ``selectors`` those to be found among the
    machine's GPUs. ``ignored`` are (source, reason) pairs.
    """

    __slots__ = (
        "capabilities",
        "cdi_devices",
        "devices",
        "features",
        "ignored",
        "imex_channels",
        "mig_config",
        "mig_monitor",
        "requirements",
        "requirements_disabled",
        "selectors",
        "source",
    )

    def __init__(
        self,
        source: str = "none",
        devices: tuple[str, ...] | None = None,
        cdi_devices: tuple[str, ...] = (),
        selectors: tuple[str, ...] = (),
        capabilities: tuple[str, ...] = (),
        requirements: tuple[str, ...] = (),
        requirements_disabled: bool = False,
        imex_channels: tuple[int, ...] = (),
        mig_config: str | None = None,
        mig_monitor: str | None = None,
        features: tuple[str, ...] = (),
        ignored: tuple[tuple[str, str], ...] = (),
    ) -> None:
        put = object.__setattr__
        put(self, "source", source)
        put(self, "devices", devices)
        put(self, "cdi_devices", cdi_devices)
        put(self, "selectors", selectors)
        put(self, "capabilities", capabilities)
        put(self, "requirements", requirements)
        put(self, "requirements_disabled", requirements_disabled)
        put(self, "imex_channels", imex_channels)
        put(self, "mig_config", mig_config)
        put(self, "mig_monitor", mig_monitor)
        put(self, "features", features)
        put(self, "ignored", ignored)

    if TYPE_CHECKING:
        source: str
        devices: tuple[str, ...] | None
        cdi_devices: tuple[str, ...]
        selectors: tuple[str, ...]
        capabilities: tuple[str, ...]
        requirements: tuple[str, ...]
        requirements_disabled: bool
        imex_channels: tuple[int, ...]
        mig_config: str | None
        mig_monitor: str | None
        features: tuple[str, ...]
        ignored: tuple[tuple[str, str], ...]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a request never changes: {name}={shown(value)}")

    def to_json(self) -> "dict[str, Any]":
        """Return the "request" object of `gpuhook explain --format json`."""
        return {
            "source": self.source,
            "devices": None if self.devices is None else list(self.devices),
            "cdi_devices": list(self.cdi_devices),
            "capabilities": list(self.capabilities),
            "requirements": list(self.requirements),
            "requirements_disabled": self.requirements_disabled,
            "imex_channels": list(self.imex_channels),
            "mig_config": self.mig_config,
            "mig_monitor": self.mig_monitor,
            "features": list(self.features),
            "ignored": [{"source": source, "reason": reason} for source, reason in self.ignored],
        }


def read_request(spec: "dict[str, Any]", config: "Config") -> Request:
    """Return what the container described by an OCI spec asks for.

    Raises RequestError or a subclass for what is malformed or not allowed, with ``request``
    set to what had been understood, and SpecError for a spec of the wrong shape. A container
    that asks for no GPU never fails for what else it says to us.
    """
    if not isinstance(spec, dict):
        raise _misshapen("The whole", "an object")
    reader = _Reader(spec, config)
    try:
        reader.read()
    except RequestError as error:
        error.request = reader.request()
        raise
    return reader.request()


class _Reader:
    """One reading of a spec; ``found`` gathers the fields of the request."""

    __slots__ = ("accepts_env", "config", "env", "found", "ignored", "legacy", "mounts", "spec")

    def __init__(self, spec: "dict[str, Any]", config: "Config") -> None:
        self.spec = spec
        self.config = config
        self.env = sources.parse_environment(_strings(spec, "process", "env"))
        self.legacy = variables.is_legacy(self.env)
        self.mounts = MountRequests(_mount_pairs(spec))
        self.accepts_env = config.accept_envvar_unprivileged or is_privileged(spec)
        self.ignored: list[tuple[str, str]] = []
        self.found: dict[str, Any] = {}

    def request(self) -> Request:
        return Request(**self.found, ignored=tuple(self.ignored))

    def read(self) -> None:
        source, devices = self.chosen_devices()
        self.found.update(source=source, devices=devices)
        disabled = self.config.disable_require or sources.is_true(
            self.env.get(variables.DISABLE_REQUIRE)
        )
        self.found["requirements_disabled"] = disabled
        if devices is None:
            self.read_without_devices(disabled)
            return
        self.read_names(devices)
        self.found["capabilities"] = variables.granted_capabilities(
            self.env.get(variables.DRIVER_CAPABILITIES),
            self.legacy,
            variables.supported_capabilities(self.config.supported_driver_capabilities),
        )
        self.found["requirements"] = () if disabled else variables.asked_requirements(self.env)
        self.found["mig_config"] = self.mig(variables.MIG_CONFIG)
        self.found["mig_monitor"] = self.mig(variables.MIG_MONITOR)
        self.found["imex_channels"] = variables.imex_channels(self.imex_names())
        self.found["features"] = tuple(
            sorted(
                name
                for name in variables.FEATURES
                if self.env.get(f"NVIDIA_{name.upper()}") == "enabled"
            )
        )

    def read_without_devices(self, disabled: bool) -> None:
        """Fill in what can be told for a container that gets nothing; complain of nothing."""
        try:
            self.found["requirements"] = () if disabled else variables.asked_requirements(self.env)
            self.found["imex_channels"] = variables.imex_channels(self.imex_names())
        except RequestError as error:
            self.ignored.append(("environment", error.cause))

    def chosen_devices(self) -> tuple[str, tuple[str, ...] | None]:
        """Return (source, devices) of the most trusted source that names any.

        What the less trusted ones name is ignored: never the union of two.
        """
        named = {
            "volume-mounts": self.names_from_mounts(),
            "annotations": self.names_from_annotations(),
            "environment": self.names_from_environment(),
        }
        source = next((source for source, names in named.items() if names), "none")
        for other, names in named.items():
            if names and other != source:
                self.ignored.append((other, f"{source} decide, which are trusted more"))
        names = named.get(source, [])
        devices = tuple(names) if source == "annotations" else _decided(names)
        return (source, devices) if devices is not None else ("none", None)

    def names_from_annotations(self) -> list[str]:
        prefixes = self.config.cdi_annotation_prefixes
        annotations = _table(self.spec, "annotations")
        keys = sorted(key for key in annotations if prefixes and key.startswith(prefixes))
        reason = "" if self.config.reads_annotations else "accept-annotations in [gpuhook] is off"
        reason = reason or self.distrust()
        if reason:
            self.ignored += [("annotations", f"{shown(key)}: {reason}") for key in keys[:1]]
            return []
        names: list[str] = []
        for key in keys:
            value = annotations[key]
            if not isinstance(value, str):
                raise _misshapen(f"The annotation {shown(key)}", "a string")
            names += sources.items(value)
        return list(dict.fromkeys(self.counted_annotations(names)))

    def distrust(self) -> str:
        """Return why an image's user is not heard on devices, "" where he is."""
        if self.accepts_env:
            return ""
        return (
            "the container is not privileged and "
            "accept-nvidia-visible-devices-envvar-when-unprivileged is off"
        )

    def counted_annotations(self, names: list[str]) -> list[str]:
        """Drop the annotations' names that are not for us; the mode decides.

        In the modes hook and spec those are the names of other vendors, which the engine
        sees to, and all of them where the engine has already done its work: NVIDIA's CDI
        specs set NVIDIA_VISIBLE_DEVICES=void in the containers that they were applied to.
        """
        mode = self.config.mode
        if mode == "cdi":
            return names
        if mode == "auto":
            counted = names if all(cdi_parts(name) for name in names) else []
        elif self.env.get(variables.VISIBLE_DEVICES) == "void":
            counted = []
        else:
            vendor = self.config.cdi_default_kind.partition("/")[0]
            ours = (vendor, AUTOMATIC.partition("/")[0])
            counted = [name for name in names if (parts := cdi_parts(name)) and parts[0] in ours]
        kept = frozenset(counted)
        for name in names:
            if name not in kept:
                reason = f"{shown(name)} is not for gpuhook in mode {mode}"
                self.ignored.append(("annotations", reason))
        return counted

    def names_from_mounts(self) -> list[str]:
        mounts = self.mounts
        if self.config.accept_volume_mounts:
            self.ignored += [("volume-mounts", reason) for reason in mounts.skipped]
            return list(mounts.devices)
        if mounts.devices or mounts.imex:
            reason = "accept-nvidia-visible-devices-as-volume-mounts is off"
            self.ignored.append(("volume-mounts", reason))
        return []

    def names_from_environment(self) -> list[str]:
        swarm = [name for name in sources.items(self.config.swarm_resource) if name in self.env]
        fallback = variables.VISIBLE_DEVICES
        named = swarm or [fallback]
        if swarm and fallback in self.env and fallback not in swarm:
            reason = f"{fallback} is overridden by swarm-resource {shown(swarm[0])}"
            self.ignored.append(("environment", reason))
        names = self.names_in(named)
        if _decided(names) is not None and (reason := self.distrust()):
            self.ignored.append(("environment", reason))
            return []
        return names

    def names_in(self, named: list[str]) -> list[str]:
        """Return what the variables name together; a legacy image without any means all."""
        values = [self.env[name] for name in named if name in self.env]
        if not values:
            return ["all"] if self.legacy else []
        return [item for value in values for item in sources.items(value)]

    def read_names(self, devices: tuple[str, ...]) -> None:
        """Sort the devices' names into CDI names and selectors."""
        selectors = []
        qualified = []
        for name in devices:
            _check_name(name)
            if name.startswith(AUTOMATIC):
                if name != AUTOMATIC + "none":
                    selectors.append(name[len(AUTOMATIC) :])
            elif cdi_parts(name):
                qualified.append(name)
            elif self.config.mode == "cdi":
                qualified.append(f"{self.config.cdi_default_kind}={name}")
            else:
                selectors.append(name)
        self.found["cdi_devices"] = tuple(dict.fromkeys(qualified))
        self.found["selectors"] = tuple(dict.fromkeys(selectors))
        if qualified and selectors:
            raise RequestError(
                f"The container asks for {shown(selectors[0])} and for the CDI device "
                f"{shown(qualified[0])} at once",
                "Name all devices in one way, by CDI names or by ids",
            )

    def imex_names(self) -> tuple[str, ...] | None:
        if self.config.feature("ignore-imex-channel-requests"):
            return None
        if self.config.accept_volume_mounts and self.mounts.imex:
            return _decided(list(self.mounts.imex))
        return _decided(self.names_in([variables.IMEX_CHANNELS])) if self.accepts_env else None

    def mig(self, variable: str) -> str | None:
        """Return what is asked of MIG's management, which only a privileged container may."""
        value = self.env.get(variable)
        if value and not is_privileged(self.spec):
            raise RequestError(
                f"{variable} is set in a container that is not privileged",
                f"Start the container with CAP_SYS_ADMIN (--privileged) or unset {variable}",
            )
        return value or None


def is_privileged(spec: "dict[str, Any]") -> bool:
    """Say whether the container may have CAP_SYS_ADMIN, by its bounding set.

    Specs before 1.0.0-rc5 have one plain list of capabilities instead of five sets.
    """
    sets = _table(spec, "process").get("capabilities") or ()
    if isinstance(sets, dict):
        sets = sets.get("bounding") or ()
    if not isinstance(sets, (list, tuple)):
        raise _misshapen("process.capabilities.bounding", "a list")
    return "CAP_SYS_ADMIN" in sets


def _decided(names: list[str]) -> tuple[str, ...] | None:
    """Apply the words with a meaning of their own: void cancels, else the first one decides."""
    if not names or "void" in names:
        return None
    for name in names:
        if name == "all":
            return ("all",)
        if name == "none":
            return ()
    return tuple(dict.fromkeys(names))


def _check_name(name: str) -> None:
    """Refuse what can't name a device before it comes near a path."""
    if len(name) <= _NAME_LIMIT and _NAME_CHARACTERS.issuperset(name) and ".." not in name:
        return
    raise RequestError(
        f"{shown(name)} can't be the name of a device",
        "Ask for GPUs by index, by UUID or by PCI bus id, or for all",
    )


def _table(spec: "dict[str, Any]", name: str) -> "dict[str, Any]":
    value = spec.get(name) or {}
    if not isinstance(value, dict):
        raise _misshapen(name, "an object")
    return value


def _strings(spec: "dict[str, Any]", table: str, name: str) -> list[str]:
    value = _table(spec, table).get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _misshapen(f"{table}.{name}", "a list of strings")
    return value


def _mount_pairs(spec: "dict[str, Any]") -> list[tuple[str, str]]:
    mounts = spec.get("mounts") or []
    if not isinstance(mounts, list) or not all(isinstance(mount, dict) for mount in mounts):
        raise _misshapen("mounts", "a list of objects")
    pairs = [(mount.get("source") or "", mount.get("destination") or "") for mount in mounts]
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise _misshapen("A mount's source or destination", "a string")
    return pairs


def _misshapen(what: str, expected: str) -> SpecError:
    return SpecError(
        f"{what} in the container's config.json is not {expected}",
        "Report it to whatever wrote the bundle (the engine)",
    )


def effective_mode(mode: str, request: Request) -> str:
    """Return hook or spec for a container; ``mode`` is the configuration's.

    In mode cdi, names of NVIDIA's automatic kind stand for the machine's own GPUs and are
    written into config.json. CDI devices never get here: ``resolve.resolve`` refuses them.
    """
    if mode == "cdi" and request.selectors:
        return "spec"
    return "spec" if mode == "spec" else "hook"
