"""What a container asks for, read from its OCI spec and the configuration's policy.

Pure functions of these and of the vendor's names: the runtime, the hook and ``gpuhook explain``
call the same ones and so see the same requests. Whether and from where devices are asked for is
the same for all vendors; what a vendor's variables say besides, the vendor reads itself.
"""

from gpuhook.ground.errors import RequestError, SpecError, shown
from gpuhook.ground.names import cdi_parts
from gpuhook.ground.oci.jsontext import Record
from gpuhook.start.request import sources
from gpuhook.start.request.sources import MountRequests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType
    from typing import Any, Protocol

    from gpuhook.ground.config.model import Config

    class OptionsReader(Protocol):
        """What reads a vendor's further variables: its ``Vendor``."""

        def options(self) -> Record | None:
            """Return what a container gets that asks for nothing in particular."""

        def read(self, reading: "Reading", options: Any) -> None:
            """Fill in what a container asks for beside devices."""


_MOST_NAMES = 1 << 12  # of one vendor's devices; no machine has a tenth of them
_NAME_LIMIT = 256  # characters; the longest real name, an old MIG one, has about 60
_NAME_CHARACTERS = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:/=+@"
)


class Request(Record):
    """What a container asks for of one vendor; never changed once it is made.

    ``source`` is where the devices were named: environment, volume-mounts, annotations or
    none. ``devices`` are the names in order, once each: None if nothing is asked for, ()
    for a container that wants the driver and no device. ``cdi_devices`` are those of them to
    be looked up in CDI specs, as qualified names; ``selectors`` those to be found among the
    machine's devices, in the name spaces ``spaces`` (): in all. ``options`` is what the
    vendor read besides, None for a vendor that reads nothing. ``ignored`` are (source,
    reason) pairs; ``warnings`` say what is understood otherwise than it may be meant.
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
    """An OCI spec, and what it may hold requests in; SpecError for one of the wrong shape."""

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
        """Tell whether a request to this vendor may stand anywhere; most containers have none."""
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
        """Return what the container asks for of a vendor.

        ``more`` are CDI names of this vendor's kind that stood in the environment, where
        another vendor's names stand.
        Raises RequestError or a subclass for what is malformed or not allowed, with
        ``request`` set to what had been understood. A container that asks for no device
        never fails for what else it says to us.
        """
        reading = Reading(self, names)
        try:
            reading.read(vendor, more)
        except RequestError as error:
            error.request = reading.request()
            raise
        return reading.request()

    def annotations_for(self, names: "ModuleType") -> "dict[str, Any]":
        """Return the annotations that may name devices of a vendor's.

        Where documents are asked for what they name, one vendor's reading passes on all names:
        that of the vendor with an automatic kind. Else each has those with its kind in them.
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
        """Return the variables of swarm-resource that are set, and their words for this vendor.

        One that the configuration gives to no vendor is for those whose words are in it.
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


class Reading:
    """One vendor's reading of a spec; ``found`` gathers the fields of the request.

    For the vendor's ``read``: ``env`` is the container's environment, ``config`` the
    configuration, ``devices`` what was asked for (as in Request), ``legacy`` says that the
    image is older than the vendor's variables, ``accepts_env`` that its environment is
    heard on devices.
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
        """Return the request as far as it is read."""
        ignored, warnings = tuple(self.ignored), tuple(self.warnings)
        return Request(self.names.NAME, **self.found, ignored=ignored, warnings=warnings)

    def read(self, vendor: "OptionsReader", more: "tuple[str, ...]" = ()) -> None:
        """Read all of it; RequestError for what is wrong."""
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
        """Return the variables that decide, if any is set: the configuration's, or the first.

        One that says ``all`` gives way to the next that names any: images set it so.
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

        What the less trusted ones name is ignored: never the union of two.
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
        """Return the devices' names in the annotations that count."""
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
        """Return why an image's user is not heard on devices, "" where he is."""
        if self.accepts_env:
            return ""
        return (
            "the container is not privileged and "
            "accept-nvidia-visible-devices-envvar-when-unprivileged is off"
        )

    def hears_environment(self, variables: "Iterable[str]") -> bool:
        """Tell whether variables that ask for more than devices count, as those do that name any.

        What doesn't count is among what is ignored.
        """
        reason = self.distrust()
        if reason:
            self.ignored += [("environment", f"{name}: {reason}") for name in variables]
        return not reason

    def counted_annotations(self, names: list[str]) -> list[str]:
        """Drop the annotations' names that are not for this vendor; the mode decides.

        In the modes hook and spec those are the names of other vendors, which see to theirs
        themselves or the engine does, and all of them where the engine has already done its
        work: CDI specs set the variable to void in the containers that they were applied to.
        """
        mode = self.config.mode
        if mode == "cdi":
            return names
        if mode == "auto":
            counted = names if all(cdi_parts(name) for name in names) else []
        elif any(self.env.get(name, "").lower() == "void" for name in self.names.VARIABLES):
            counted = []
        else:
            kinds = (self.kind(), self.names.AUTOMATIC)
            ours = [kind.partition("/")[0] for kind in kinds]
            counted = [name for name in names if (parts := cdi_parts(name)) and parts[0] in ours]
        kept = frozenset(counted)
        for name in names:
            if name not in kept:
                reason = f"{shown(name)} is not for {self.names.TITLE} in mode {mode}"
                self.ignored.append(("annotations", reason))
        return counted

    def names_from_mounts(self) -> list[str]:
        """Return the devices' names in the mounts, if these are heard."""
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
        """Refuse what names a plugin's folder for its mounts, where those aren't heard."""
        if any(self.env.get(name) == self.names.MOUNTS for name in self.names.VARIABLES):
            raise RequestError(
                f"The cluster's device plugin asks for {self.names.TITLE}'s devices by mounts, and "
                "accept-nvidia-visible-devices-as-volume-mounts is off on this node",
                "Set it to true in config.toml on the node, or give the plugin another "
                "DEVICE_LIST_STRATEGY",
            )

    def names_from_environment(self) -> list[str]:
        """Return the devices' names in the environment, if that is heard."""
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
        """Return what the variables name together; a legacy image without any means all."""
        there = [name for name in named if name in self.env]
        if not there:
            return ["all"] if self.legacy else []
        each = [self.swarm.get(name, sources.items(self.env[name])) for name in there]
        return [word for words in each for word in words]

    def read_names(self, devices: tuple[str, ...]) -> None:
        """Sort the devices' names into selectors and CDI names.

        Names of this vendor's own kind are selectors: the machine itself is asked, and no
        document, which may be old. In mode cdi documents are asked for all.
        """
        # protects: most-names
        if len(devices) > _MOST_NAMES:
            raise RequestError(
                f"The container names {len(devices)} devices of {self.names.TITLE}'s, and "
                f"{_MOST_NAMES} is the most",
                "Name fewer, a range such as 0-7, or all",
            )
        selectors = []
        qualified = []
        kinds = {self.names.AUTOMATIC} if self.names.AUTOMATIC else set()
        if self.config.mode != "cdi":
            kinds.add(self.names.KIND)
        for given in devices:
            _check_name(given, devices)
            plain = self.config.mode == "cdi" and not cdi_parts(given)
            name = f"{self.kind()}={given}" if plain else given
            kind, _, device = name.partition("=")
            if kind in kinds and device:
                if (kind, device) != (self.names.AUTOMATIC, "none"):
                    selectors.append(device)
            elif plain or cdi_parts(name):
                qualified.append(name)
            else:
                selectors.append(name)
        self.found["cdi_devices"] = tuple(dict.fromkeys(qualified))
        self.found["selectors"] = tuple(dict.fromkeys(selectors))
        bare = not any("=" in name for name in devices)
        # A plugin's mounts name what its first variable would.
        named = {"environment": self.variables(), "volume-mounts": [*self.names.VARIABLES]}
        if bare and not (self.swarm and self.found["source"] == "environment"):
            spaces = [self.names.VARIABLES[name] for name in named.get(self.found["source"], ())]
            self.found["spaces"] = spaces[0] if spaces else ()
        ours = [name for name in qualified if name.startswith(f"{self.names.KIND}=")]
        if ours and selectors:
            raise RequestError(
                f"The container asks for {shown(selectors[0])} and for the CDI device "
                f"{shown(ours[0])} at once, and in mode cdi that is in a document",
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
    """Say whether the image is one from before the vendor's variables existed."""
    if not names.LEGACY:
        return False
    sets, lacks = names.LEGACY
    return bool(env.get(sets)) and not env.get(lacks)


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


def decided(names: list[str]) -> tuple[str, ...] | None:
    """Apply the words with a meaning of their own: void cancels, else the first one decides.

    They may be written in letters of either case.
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
    """Refuse what can't name a device before it comes near a path; ``every`` are all names."""
    # protects: device-name
    if _is_name(name):
        return
    from gpuhook.start import meant  # noqa: PLC0415 - where a container is refused

    likely = meant.separated(every)
    question = f"Did you mean {likely}? " if all(map(_is_name, likely.split(","))) else ""
    raise RequestError(
        f"{shown(name)} can't be the name of a device",
        f"{question if likely else ''}Ask for devices by index, by UUID or by PCI bus id, with "
        "commas between them, or for all",
    )


def _is_name(name: str) -> bool:
    return len(name) <= _NAME_LIMIT and _NAME_CHARACTERS.issuperset(name) and ".." not in name


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


def check_kinds(request: Request, known: "Iterable[ModuleType]", config: "Config") -> None:
    """Refuse CDI devices that an image's own words may not name; RequestError, with ``request``.

    A document may bring any file of the host and hooks that root runs, and may have been made
    for one pod alone. So the environment and annotations name devices of the kinds of
    ``known`` vendors, and of those that the configuration opens to them; mounts, which no image
    makes, name any.
    """
    if request.source == "volume-mounts":
        return
    opened = (config.cdi_default_kind, *config.cdi_kinds_from_environment)
    allowed = {*(names.KIND for names in known), *opened}
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

    In mode cdi, names of a vendor's automatic kind stand for the machine's own devices and are
    written into config.json. CDI devices never get here: ``resolve.resolve`` refuses them.
    """
    if mode == "cdi" and any(request.selectors for request in requests):
        return "spec"
    return "spec" if mode == "spec" else "hook"
