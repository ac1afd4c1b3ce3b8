"""A container's request, read from its OCI spec under the configuration's policy.

Pure functions of these and of the vendor's names: the runtime, the hook and ``gpuhook explain``
call the same ones and so get the same requests. Reading device names works alike for all
vendors; each vendor reads its other variables itself.
"""

from gpuhook.base.errors import RequestError, SpecError, shown
from gpuhook.base.names import cdi_parts
from gpuhook.base.oci.jsontext import Record
from gpuhook.core.request import sources
from gpuhook.core.request.sources import MountRequests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType
    from typing import Any, Protocol

    from gpuhook.base.config.model import Config

    class OptionsReader(Protocol):
        """Reader of a vendor's further variables: its ``Vendor``."""

        def options(self) -> Record | None:
            """Return the defaults, for a container without further settings."""

        def read(self, reading: "RequestReader", options: Any) -> None:
            """Read a container's settings other than devices."""


_MOST_NAMES = 1 << 12  # of one vendor's devices; no host has a tenth of them
_MAX_NAME = 256  # characters; the longest real name, an old MIG one, has about 60
_NAME_CHARACTERS = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:/=+@"
)


class Request(Record):
    """A container's request to one vendor; immutable.

    ``source`` is where the devices were named: environment, volume-mounts, annotations or
    none. ``devices`` are the names in order, without duplicates: None if nothing is requested,
    () for a container that wants the driver but no device. Of these, ``cdi_devices`` are looked
    up in CDI specs, as qualified names, and ``selectors`` among the host's devices. ``spaces``
    are the id kinds for selectors, () for all. ``options`` is what else the vendor read, None
    if that is nothing. ``ignored`` are (source, reason) pairs; ``warnings`` tell what may have
    been meant otherwise.
    """

    vendor: str
    source: str = "none"
    devices: tuple[str, ...] | None = None
    cdi_devices: tuple[str, ...] = ()
    selectors: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    options: "Any" = None
    ignored: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a request never changes: {name}={shown(value)}")

    def to_json(self) -> "dict[str, Any]":
        """Return the "request" object of `gpuhook explain --format json`."""
        return {
            "vendor": self.vendor,
            "source": self.source,
            "devices": None if self.devices is None else list(self.devices),
            "cdi_devices": list(self.cdi_devices),
            **(self.options.to_json() if self.options is not None else {}),
            "ignored": [{"source": source, "reason": reason} for source, reason in self.ignored],
        }


class SpecReader:
    """An OCI spec, and the parts that may contain requests; SpecError if it is malformed."""

    __slots__ = ("annotations", "config", "env", "mounts", "spec")

    def __init__(self, spec: "dict[str, Any]", config: "Config") -> None:
        if not isinstance(spec, dict):
            raise _misshapen("The whole", "an object")
        self.spec = spec
        self.config = config
        self.env = sources.parse_environment(_strings(spec, "process", "env"))
        self.mounts = _mount_pairs(spec)
        self.annotations = _table(spec, "annotations")

    def asks(self, names: "ModuleType") -> bool:
        """Tell whether there may be a request to this vendor; most containers have none."""
        words = (*names.VARIABLES, *names.LEGACY[:1])
        folder = names.MOUNTS.rpartition("/")[2]
        return (
            any(word in self.env for word in words)
            or bool(self.swarm(names))
            or (bool(folder) and any(folder in place for _, place in self.mounts))
            or bool(self.annotations_for(names))
        )

    def read(
        self, names: "ModuleType", vendor: "OptionsReader", more: "tuple[str, ...]" = ()
    ) -> Request:
        """Return the container's request to a vendor.

        ``more`` are CDI names of this vendor's kind from another vendor's variable. Raises
        RequestError or a subclass if the request is malformed or not allowed, with ``request``
        set to what had been read. A container without device requests never fails because of
        other settings.
        """
        reading = RequestReader(self, names)
        try:
            reading.read(vendor, more)
        except RequestError as error:
            error.request = reading.request()
            raise
        return reading.request()

    def annotations_for(self, names: "ModuleType") -> "dict[str, Any]":
        """Return the annotations that may name a vendor's devices.

        In modes that use CDI specs, the vendor with automatic kinds passes on all names.
        Otherwise each vendor gets the annotations that contain its kind.
        """
        prefixes = self.config.cdi_annotation_prefixes
        found = {key: self.annotations[key] for key in self.annotations if key.startswith(prefixes)}
        if names.AUTOMATIC or not found:
            return found
        if self.config.mode not in ("hook", "spec"):
            return {}
        own = f"{names.KIND}="
        return {key: text for key, text in found.items() if isinstance(text, str) and own in text}

    def swarm(self, names: "ModuleType") -> dict[str, list[str]]:
        """Return the swarm-resource variables that are set, and their words for this vendor.

        A variable that isn't assigned to a vendor serves every vendor whose words it contains.
        """
        found: dict[str, list[str]] = {}
        for vendor, variable in sources.swarm_variables(self.config.swarm_resource):
            if variable not in self.env:
                continue
            words = sources.items(self.env[variable])
            ours = [word for word in words if sources.sort(word) == names.SWARM_RESOURCE]
            if vendor == names.NAME:
                found[variable] = words
            elif not vendor and (ours or (not words and names.SWARM_RESOURCE == "plain")):
                found[variable] = ours
        return found


class RequestReader:
    """One vendor's reading of a spec; ``found`` collects the fields of the request.

    For the vendor's ``read``: ``env`` is the container's environment, ``config`` the
    configuration, and ``devices`` the requested devices (as in Request). ``legacy`` means that
    the image is older than the vendor's variables, ``accepts_env`` that its environment may
    request devices.
    """

    __slots__ = (
        "accepts_env",
        "annotations",
        "config",
        "devices",
        "env",
        "found",
        "ignored",
        "legacy",
        "mounts",
        "names",
        "spec",
        "swarm",
        "warnings",
    )

    def __init__(self, spec: SpecReader, names: "ModuleType") -> None:
        self.names = names
        self.config = spec.config
        self.env = spec.env
        self.annotations = spec.annotations_for(names)
        self.spec = spec.spec
        self.swarm = spec.swarm(names)
        self.mounts = MountRequests(spec.mounts, names.MOUNTS)
        self.accepts_env = self.config.accept_envvar_unprivileged or self.is_privileged()
        self.legacy = is_legacy(self.env, names)
        self.devices: tuple[str, ...] | None = None
        self.ignored: list[tuple[str, str]] = []
        self.warnings: list[str] = []
        self.found: dict[str, Any] = {}

    def request(self) -> Request:
        """Return the request as read so far."""
        ignored, warnings = tuple(self.ignored), tuple(self.warnings)
        return Request(self.names.NAME, **self.found, ignored=ignored, warnings=warnings)

    def read(self, vendor: "OptionsReader", more: "tuple[str, ...]" = ()) -> None:
        """Read everything; RequestError if it is invalid."""
        source, self.devices = self.chosen_devices()
        if more:
            source = "environment" if self.devices is None else source
            self.devices = tuple(dict.fromkeys((*(self.devices or ()), *more)))
        options = vendor.options()
        self.found.update(source=source, devices=self.devices, options=options)
        if self.devices is not None:
            self.read_names(self.devices)
        vendor.read(self, options)

    def variables(self) -> list[str]:
        """Return the deciding variables, if any is set: the configured ones, or the first.

        A variable that says ``all`` yields to the next one with names: images set it like that.
        """
        general: list[str] = []
        for name in () if self.swarm else self.names.VARIABLES:
            words = [word.lower() for word in sources.items(self.env.get(name, ""))]
            if name in self.env and words != ["all"] and (words or not general):
                return [name]
            general += [name] if words == ["all"] else []
        return [*self.swarm] or general[:1]

    def chosen_devices(self) -> tuple[str, tuple[str, ...] | None]:
        """Return (source, devices) of the most trusted source that names any.

        Less trusted sources are ignored: sources are never combined.
        """
        # protects: sources-order
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
        devices = tuple(names) if source == "annotations" else decided(names)
        return (source, devices) if devices is not None else ("none", None)

    def names_from_annotations(self) -> list[str]:
        """Return the device names in the annotations that count."""
        annotations = self.annotations
        keys = sorted(annotations)
        reason = "" if self.config.reads_annotations else "accept-annotations in [gpuhook] is off"
        reason = reason or self.distrust()  # protects: annotations-distrusted
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
        """Return why the image's environment can't request devices, "" if it can."""
        if self.accepts_env:
            return ""
        return (
            "the container is not privileged and "
            "accept-nvidia-visible-devices-envvar-when-unprivileged is off"
        )

    def hears_environment(self, variables: "Iterable[str]") -> bool:
        """Tell whether variables beyond devices count, as device variables do.

        Variables that don't count are added to the ignored ones.
        """
        reason = self.distrust()
        if reason:
            self.ignored += [("environment", f"{name}: {reason}") for name in variables]
        return not reason

    def counted_annotations(self, names: list[str]) -> list[str]:
        """Drop the annotations' names that are not for this vendor; the mode decides.

        In the modes hook and spec, names of other vendors are dropped: those vendors or the engine
        handle them. All names are dropped if the engine has applied CDI specs already: these set
        the variable to void.
        """
        mode = self.config.mode
        if mode == "cdi":
            return names
        if mode == "auto":
            counted = names if all(cdi_parts(name) for name in names) else []
        elif any(self.env.get(name, "").lower() == "void" for name in self.names.VARIABLES):
            counted = []
        else:
            kinds = (self.kind(), *self.names.AUTOMATIC[:1])
            ours = [kind.partition("/")[0] for kind in kinds]
            counted = [
                name
                for name in names
                if (parts := cdi_parts(name))
                and (parts[0] in ours or f"{parts[0]}/{parts[1]}" in self.names.AUTOMATIC)
            ]
        kept = frozenset(counted)
        for name in names:
            if name not in kept:
                reason = f"{shown(name)} is not for {self.names.TITLE} in mode {mode}"
                self.ignored.append(("annotations", reason))
        return counted

    def names_from_mounts(self) -> list[str]:
        """Return the device names in the mounts, if mounts count."""
        mounts = self.mounts
        if self.config.accept_volume_mounts:
            self.ignored += [("volume-mounts", reason) for reason in mounts.skipped]
            return list(mounts.devices)
        if mounts.devices or mounts.imex:
            reason = "accept-nvidia-visible-devices-as-volume-mounts is off"
            self.ignored.append(("volume-mounts", reason))
            self.check_folder()
        return []

    def check_folder(self) -> None:
        """Refuse a request by a plugin's mounts if the configuration ignores mounts."""
        if any(self.env.get(name) == self.names.MOUNTS for name in self.names.VARIABLES):
            raise RequestError(
                f"The cluster's device plugin asks for {self.names.TITLE}'s devices by mounts, and "
                "accept-nvidia-visible-devices-as-volume-mounts is off on this node",
                "Set it to true in config.toml on the node, or give the plugin another "
                "DEVICE_LIST_STRATEGY",
            )

    def names_from_environment(self) -> list[str]:
        """Return the device names in the environment, if it counts."""
        for name in self.names.VARIABLES:
            if self.swarm and name in self.env and name not in self.swarm:
                reason = f"{name} is overridden by swarm-resource {shown(next(iter(self.swarm)))}"
                self.ignored.append(("environment", reason))
        names = self.names_in(self.variables())
        # protects: distrusted-environment
        if decided(names) is not None and (reason := self.distrust()):
            self.ignored.append(("environment", reason))
            return []
        return names

    def names_in(self, named: list[str]) -> list[str]:
        """Return the names of all variables together; a legacy image without any gets all."""
        there = [name for name in named if name in self.env]
        if not there:
            return ["all"] if self.legacy else []
        each = [self.swarm.get(name, sources.items(self.env[name])) for name in there]
        return [word for words in each for word in words]

    def read_names(self, devices: tuple[str, ...]) -> None:
        """Sort the device names into selectors and CDI names.

        Names of this vendor's own kind are selectors: the host is asked instead of a possibly
        outdated CDI spec. In mode cdi all names are looked up in CDI specs.
        """
        # protects: most-names
        if len(devices) > _MOST_NAMES:
            raise RequestError(
                f"The container names {len(devices)} {self.names.TITLE} devices; the maximum is "
                f"{_MOST_NAMES}",
                "Name fewer, a range such as 0-7, or all",
            )
        selectors = []
        qualified = []
        kinds = {*self.names.AUTOMATIC}
        if self.config.mode != "cdi":
            kinds.add(self.names.KIND)
        for given in devices:
            _check_name(given, devices)
            plain = self.config.mode == "cdi" and not cdi_parts(given)
            name = f"{self.kind()}={given}" if plain else given
            kind, _, device = name.partition("=")
            if kind in kinds and device:
                if kind not in self.names.AUTOMATIC or device != "none":
                    selectors.append(device)
            elif plain or cdi_parts(name):
                qualified.append(name)
            else:
                selectors.append(name)
        self.found["cdi_devices"] = tuple(dict.fromkeys(qualified))
        self.found["selectors"] = tuple(dict.fromkeys(selectors))
        bare = not any("=" in name for name in devices)
        # A plugin's mounts are equivalent to its first variable.
        named = {"environment": self.variables(), "volume-mounts": [*self.names.VARIABLES]}
        if bare and not (self.swarm and self.found["source"] == "environment"):
            spaces = [self.names.VARIABLES[name] for name in named.get(self.found["source"], ())]
            self.found["spaces"] = spaces[0] if spaces else ()
        ours = [name for name in qualified if name.startswith(f"{self.names.KIND}=")]
        if ours and selectors:
            raise RequestError(
                f"The container requests {shown(selectors[0])} and the CDI device "
                f"{shown(ours[0])} together, and in mode cdi that one is in a CDI spec",
                "Name all devices in one way, by CDI names or by ids",
            )

    def is_privileged(self) -> bool:
        """Tell whether the container may have CAP_SYS_ADMIN."""
        return is_privileged(self.spec)

    def kind(self) -> str:
        """Return the CDI kind of names without one."""
        kind: str = self.names.KIND
        return self.config.cdi_default_kind if self.names.DEFAULT_KIND else kind


def is_legacy(env: "dict[str, str]", names: "ModuleType") -> bool:
    """Tell whether the image is older than the vendor's variables."""
    if not names.LEGACY:
        return False
    sets, lacks = names.LEGACY
    return bool(env.get(sets)) and not env.get(lacks)


def is_privileged(spec: "dict[str, Any]") -> bool:
    """Tell whether the container may have CAP_SYS_ADMIN, by its bounding set.

    Specs before 1.0.0-rc5 have one plain list of capabilities instead of five sets.
    """
    sets = _table(spec, "process").get("capabilities") or ()
    if isinstance(sets, dict):
        sets = sets.get("bounding") or ()
    if not isinstance(sets, (list, tuple)):
        raise _misshapen("process.capabilities.bounding", "a list")
    return "CAP_SYS_ADMIN" in sets


def decided(names: list[str]) -> tuple[str, ...] | None:
    """Apply the reserved words: void cancels, else the first one decides.

    Case is ignored.
    """
    words = [name.lower() for name in names]
    if not words or "void" in words:
        return None
    for word in words:
        if word == "all":
            return ("all",)
        if word == "none":
            return ()
    return tuple(dict.fromkeys(names))


def _check_name(name: str, every: tuple[str, ...]) -> None:
    """Refuse an invalid device name before it is used in a path; ``every`` are all names."""
    # protects: device-name
    if _is_name(name):
        return
    from gpuhook.core import suggest  # noqa: PLC0415 - only if a container is refused

    likely = suggest.separated(every)
    question = f"Did you mean {likely}? " if all(map(_is_name, likely.split(","))) else ""
    raise RequestError(
        f"{shown(name)} can't be the name of a device",
        f"{question if likely else ''}Ask for devices by index, by UUID or by PCI bus id, with "
        "commas between them, or for all",
    )


def _is_name(name: str) -> bool:
    return len(name) <= _MAX_NAME and _NAME_CHARACTERS.issuperset(name) and ".." not in name


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


def check_kinds(request: Request, vendors: "Iterable[ModuleType]", config: "Config") -> None:
    """Refuse CDI devices that an image must not request; RequestError, with ``request``.

    A CDI spec may mount any host file and contain hooks that root runs, and may be meant for one
    pod only. So the environment and annotations can name devices of the kinds of ``vendors``, and
    of kinds that the configuration allows. Mounts don't come from images and can name any.
    """
    if request.source == "volume-mounts":
        return
    opened = (config.cdi_default_kind, *config.cdi_kinds_from_environment)
    allowed = {*(names.KIND for names in vendors), *opened}
    for name in request.cdi_devices:
        kind = name.partition("=")[0]
        if kind in allowed:
            continue
        where = "annotations name" if request.source == "annotations" else "environment names"
        error = RequestError(
            f"The container's {where} {shown(name)}, and {shown(kind)} isn't a kind of CDI "
            "devices that gpuhook serves itself or cdi-kinds-from-environment in [gpuhook] lists",
            "Add the kind there if every image may have such devices, or have the engine give the "
            f"device (--device {shown(name)})",
        )
        error.request = request
        raise error


def effective_mode(mode: str, requests: "Iterable[Request]") -> str:
    """Return hook or spec for a container; ``mode`` is the configuration's.

    In mode cdi, names of a vendor's automatic kind mean the host's own devices and are written
    into config.json. CDI devices never get here: ``resolve.resolve`` refuses them.
    """
    if mode == "cdi" and any(request.selectors for request in requests):
        return "spec"
    return "spec" if mode == "spec" else "hook"
