"""Optional modules of vendors for single commands, imported when these run.

Each kind of module is a protocol, and ``tests/unit/vendors/test_parts.py`` compares it with every
vendor's module by mypy. Inventories are of the vendor's own class, so they are Any here.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from gpuhook.ground.config.model import Config
from gpuhook.ground.container.rootfs import Rootfs
from gpuhook.start import contract
from gpuhook.start.inventory.model import Device
from gpuhook.tools.host.child import Work
from gpuhook.tools.vendors.plugin_option import Option

Values = Mapping[str, Any]

# Effects of an error on its device: nothing may be started on it; its applications must be started
# again, and the device is healthy then; none.
FATAL, APPLICATION, IGNORE = ACTIONS = ("fatal", "application", "ignore")


class Doctor(Protocol):
    """``doctor``: checks of ``gpuhook doctor``; tools/doctor/vendors describes their use."""

    @property
    def DRIVER_CHECKS(self) -> tuple[Any, ...]:  # noqa: N802 - these are a module's constants
        """Checks of the driver: functions from a Case to findings, or Steps."""

    @property
    def HOST_CHECKS(self) -> tuple[Any, ...]:  # noqa: N802
        """Checks of the host, done last."""

    @property
    def REPORT_FILES(self) -> tuple[str, ...]:  # noqa: N802
        """Patterns of files for a bug report."""

    @property
    def REPORT_NODES(self) -> tuple[str, ...]:  # noqa: N802
        """Patterns of nodes whose owners and modes a bug report lists."""


class Readings(Protocol):
    """``telemetry`` of a driver with files, which are also read in a child."""

    def read(self, inventory: Any, asking: Callable[[str], bool], /) -> Mapping[str, Values]:
        """Return the current measurements of each device, by its id.

        ``asking`` is called with a device's id before its files are read; False skips it.
        """


class Telemetry(Protocol):
    """``telemetry`` of a driver that is queried in a child; tools/metrics/telemetry runs it."""

    def can_ask(self, inventory: Any, /) -> bool:
        """Tell whether the driver of this inventory can be queried."""

    def facts(self, inventory: Any, /) -> Mapping[str, Values]:
        """Return each device's values that the inventory has, by its id."""

    def worded(self, values: Values, /) -> Values:
        """Return the child's values of a device, with names in place of numeric codes."""

    def begin(self, config: Config, inventory: Any, but: Collection[str], /) -> Work:
        """Return the function of a child that is queried about all devices ``but`` some."""


class Events(Protocol):
    """``events`` of a driver that reports errors as events."""

    def can_listen(self, inventory: Any, /) -> bool:
        """Tell whether the driver of this inventory reports any."""

    def begin(self, config: Config, inventory: Any, but: Collection[str], /) -> Work:
        """Return the function of a child that listens to all devices ``but`` some."""

    def concerned(self, inventory: Any, event: Values, /) -> Iterable[Device]:
        """Return the devices of an event."""

    def is_error(self, line: Values, /) -> bool:
        """Tell whether a line from the child is a valid error; ``gpu`` names a device.

        That is checked because the driver's own code runs in the child.
        """

    def judge(self, event: Values, chosen: Any, /) -> tuple[str, str]:
        """Return the effect of an error, one of ACTIONS, and its name.

        ``chosen`` is the result of ``Plugin.settings``, None for a vendor without.
        """


class Plugin(Protocol):
    """``plugin``: options of the clusters' device plugin for this vendor."""

    @property
    def OPTIONS(self) -> tuple[Option, ...]:  # noqa: N802
        """The options, in the order of the help; no other vendor uses their names."""

    @property
    def VARIABLES(self) -> tuple[str, ...]:  # noqa: N802
        """Variables of the environment that ``settings`` reads itself."""

    @property
    def SETTINGS(self) -> type:  # noqa: N802
        """The class whose fields the options set, with the defaults."""

    def settings(self, values: Values, environ: Mapping[str, str], /) -> Any:
        """Return an instance of SETTINGS with the values that are set, by field."""

    def advice(self, chosen: Any, /, *, by_cdi: bool) -> Iterable[str]:
        """Return advice for the administrator about such settings, a sentence each.

        ``by_cdi`` is whether engines get CDI device names.
        """


@dataclass(frozen=True)
class Share:
    """The sharing of a resource: its replicas, whether it is renamed, and whether MPS is used."""

    replicas: int = 1
    renamed: bool = False
    by_mps: bool = False


class Labels(Protocol):
    """``labels``: the node labels that the vendor's own programs set."""

    def labels(
        self,
        config: Config,
        inventory: Any,
        root: Rootfs,
        chosen: Any,
        shares: Mapping[str, Share],
        /,
    ) -> Mapping[str, str]:
        """Return the labels; DriverError if the driver doesn't answer.

        ``root`` is the driver root, ``chosen`` the result of ``Plugin.settings``, None for a
        vendor without. ``shares`` are by resource.
        """


Sample = tuple[dict[str, str], float]  # labels and a value


class Series(NamedTuple):
    """A Prometheus series with its full name; ``kind`` is gauge or counter."""

    name: str
    kind: str
    about: str
    samples: list[Sample]


class MakersSeries(Protocol):
    """``makers_series``: the series of the vendor's own exporter, if they are requested."""

    def series(self, snapshot: Any, /) -> Iterable[Series]:
        """Return the series of a snapshot (``tools/metrics/model.Snapshot``)."""


class Links(Protocol):
    """``links``: the links between devices."""

    @property
    def PER_LINK(self) -> int:  # noqa: N802
        """The score of one link between two devices."""

    def links(self, config: Config, inventory: Any, /) -> Mapping[str, Mapping[str, int]]:
        """Return the scores of each device with others, by their ids."""


@dataclass(frozen=True)
class DriverContent:
    """The content of a driver folder, by path in it.

    ``files`` are paths below the driver root ``root`` without symbolic links, ``links`` are link
    targets. ``folders`` exist even if they are empty.
    """

    version: str
    root: str
    folders: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


class DriverFolder(Protocol):
    """``driver_folder`` of a driver that containers can use from one folder."""

    def content_of(
        self, config: Config, inventory: Any, capabilities: Iterable[str] = (), /
    ) -> DriverContent:
        """Return the folder's content; DriverFolderError if this driver doesn't support that.

        ``capabilities`` select parts of the driver, none means all; RequestError for unknown ones.
        """


@dataclass(frozen=True)
class NotSet:
    """A setting of a device that couldn't be changed, and why.

    ``lost`` says that the device can't be reached: after a reset or a reboot it has its defaults.
    ``final`` says that the device doesn't support this setting, so there is nothing to retry.
    """

    device: str
    name: str
    cause: str
    remedy: str
    lost: bool = False
    final: bool = False


class DeviceSettings(Protocol):
    """``settings``: the settings of a vendor's devices, which apply to all their users.

    Devices are the inventory's ids, values are by the names of settings.
    """

    @property
    def READABLE(self) -> tuple[str, ...]:  # noqa: N802
        """The settings that every reachable device can report."""

    def read(
        self, config: Config, inventory: Any, wanted: Mapping[str, Mapping[str, int]], /
    ) -> Mapping[str, Mapping[str, int]]:
        """Return the current values of the named settings, as far as they can be read.

        DriverError if the driver can't be queried.
        """

    def write(
        self, config: Config, inventory: Any, wanted: Mapping[str, Mapping[str, int]], /
    ) -> Sequence[NotSet]:
        """Change all settings that can be changed; return the others. DriverError as above."""

    def refusal(self, name: str, value: int, /) -> str:
        """Return why a claim may not change a setting that has this value; "" if it may."""

    def title(self, name: str, /) -> str:
        """Return a setting's name in sentences."""

    def shown(self, name: str, value: int, /) -> str:
        """Return a value as the vendor's tools print it."""


class ClaimConfig(Protocol):
    """``claim_config``: the vendor's own configuration of devices in claims.

    ``read`` returns a plan of plain values. It changes ``settings`` of its device, and may start
    programs: an effect is a plain dict with ``devices``, the inventory's ids, which is recorded
    before it is started.
    """

    @property
    def APIS(self) -> tuple[str, ...]:  # noqa: N802
        """The apiVersions of the parameters that it reads."""

    def read(self, parameters: Values, /, *, is_part: bool) -> Values | None:
        """Return a device's plan, None if the kind is for other devices; RequestError."""

    def settings(self, plan: Values, /) -> Mapping[str, int]:
        """Return the settings of its device that a plan needs, by their names."""

    def effects(
        self,
        config: Config,
        inventory: Any,
        wanted: Sequence[tuple[Device, Values]],
        folder: str,
        /,
    ) -> list[dict[str, Any]]:
        """Return the programs to start for a claim, which has its own ``folder``.

        All checks of the plans are done here, before any change; a GpuhookError.
        """

    def begin(self, config: Config, inventory: Any, effect: Values, /) -> dict[str, list[Any]]:
        """Start an effect; return CDI edits for the devices. It is idempotent."""

    def look_after(self, config: Config, inventory: Any, effect: Values, /) -> bool:
        """Start programs again that have ended by themselves; tell whether there were any."""

    def undo(self, config: Config, inventory: Any, effect: Values, /) -> None:
        """Stop an effect; the inventory is None without a driver.

        A GpuhookError if that has to be tried again: until then no other claim gets the devices.
        """


class Programs(Protocol):
    """``programs``: variables that applications of a vendor's devices read."""

    @property
    def VARIABLES(self) -> tuple[str, ...]:  # noqa: N802
        """Variables that choose among a container's devices, and add none."""


Contract = TypeVar("Contract")


class Part(Generic[Contract]):
    """A finder of a kind of module of vendors; None for vendors without it."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, names: ModuleType) -> Contract | None:
        """Return the module of the vendor with these names."""
        found: Contract | None = part(names, self._what)
        return found


doctor: Part[Doctor] = Part("doctor")
telemetry: Part[Readings | Telemetry] = Part("telemetry")
events: Part[Events] = Part("events")
links: Part[Links] = Part("links")
driver_folder: Part[DriverFolder] = Part("driver_folder")
makers_series: Part[MakersSeries] = Part("makers_series")
plugin: Part[Plugin] = Part("plugin")
labels: Part[Labels] = Part("labels")
claim_config: Part[ClaimConfig] = Part("claim_config")
settings: Part[DeviceSettings] = Part("settings")


def programs(names: ModuleType) -> tuple[str, ...]:
    """Return the variables with which programs choose among their devices of a vendor."""
    found: Programs | None = part(names, "programs")
    return found.VARIABLES if found is not None else ()


def part(names: ModuleType, what: str) -> Any:
    """Return the module ``what`` of a vendor's folder here, None without one.

    ``names`` is the vendor's module in ``registry.known``. A module for several vendors has a
    function ``of``, whose result for this vendor is used as the module. Errors that the module
    raises on import are passed on.
    """
    folder = f"gpuhook.tools.vendors.{contract.package(names).rpartition('.')[2]}"
    whole = f"{folder}.{what}"
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name not in (folder, whole):  # a module that it imports is missing
            raise
        return None
    return module.of(names) if hasattr(module, "of") else module
