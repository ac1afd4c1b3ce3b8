"""What a vendor may have for one command: a module of its folder here, imported when that runs.

Each kind of module is a contract, which ``tests/unit/vendors/test_parts.py`` has mypy compare with
every vendor's. Inventories are of the vendor's own class, so they are Any here.
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

# What an error does to the device that it is about: nothing may be started on it; what runs there
# must be started again, and the device is as good as before; nothing at all.
FATAL, APPLICATION, IGNORE = ACTIONS = ("fatal", "application", "ignore")


class Doctor(Protocol):
    """``doctor``: what the doctor looks at; tools/doctor/vendors says how it is used."""

    @property
    def DRIVER_CHECKS(self) -> tuple[Any, ...]:  # noqa: N802 - these are a module's constants
        """Checks of the driver: functions from a Case to findings, or Steps."""

    @property
    def HOST_CHECKS(self) -> tuple[Any, ...]:  # noqa: N802
        """Checks of the host, which come last."""

    @property
    def REPORT_FILES(self) -> tuple[str, ...]:  # noqa: N802
        """Patterns of files that a report for a bug holds."""

    @property
    def REPORT_NODES(self) -> tuple[str, ...]:  # noqa: N802
        """Patterns of nodes whose owners and modes it says."""


class Readings(Protocol):
    """``telemetry`` of a driver that has files; they are read in a child as well."""

    def read(self, inventory: Any, asking: Callable[[str], bool], /) -> Mapping[str, Values]:
        """Return what is measured of each device now, by its id.

        ``asking`` is called with the id before a device's files are read, and says whether to.
        """


class Telemetry(Protocol):
    """``telemetry`` of a driver that is asked in a child; tools/metrics/telemetry says how."""

    def can_ask(self, inventory: Any, /) -> bool:
        """Tell whether the driver of this inventory can be asked."""

    def facts(self, inventory: Any, /) -> Mapping[str, Values]:
        """Return what the inventory itself says of each device, by its id."""

    def worded(self, values: Values, /) -> Values:
        """Return what the child says of a device with words for what is a number there."""

    def begin(self, config: Config, inventory: Any, but: Collection[str], /) -> Work:
        """Return what a child does that is asked about all devices ``but`` some."""


class Events(Protocol):
    """``events`` of a driver that reports errors to whoever listens."""

    def can_listen(self, inventory: Any, /) -> bool:
        """Tell whether the driver of this inventory reports any."""

    def begin(self, config: Config, inventory: Any, but: Collection[str], /) -> Work:
        """Return what a child does that listens to all devices ``but`` some."""

    def concerned(self, inventory: Any, event: Values, /) -> Iterable[Device]:
        """Return the devices that an event is about."""

    def is_error(self, line: Values, /) -> bool:
        """Tell whether what the child says is an error as it should be; ``gpu`` names a device.

        The driver's own code runs in that child.
        """

    def judge(self, event: Values, chosen: Any, /) -> tuple[str, str]:
        """Return what an error does, one of ACTIONS, and what it is called.

        ``chosen`` is what ``Plugin.settings`` returned, None for a vendor without.
        """


class Plugin(Protocol):
    """``plugin``: options that the device plugin of clusters has for this vendor."""

    @property
    def OPTIONS(self) -> tuple[Option, ...]:  # noqa: N802
        """The options, in the order of the help; no other vendor has one of their names."""

    @property
    def VARIABLES(self) -> tuple[str, ...]:  # noqa: N802
        """Variables of the environment that ``settings`` reads itself."""

    @property
    def SETTINGS(self) -> type:  # noqa: N802
        """The class whose fields they set, with the defaults."""

    def settings(self, values: Values, environ: Mapping[str, str], /) -> Any:
        """Return an object of it, with the values that are set, by fields."""

    def advice(self, chosen: Any, /, *, by_cdi: bool) -> Iterable[str]:
        """Return what a person should know of such an object, a sentence each.

        ``by_cdi`` is whether engines are given names of CDI devices.
        """


@dataclass(frozen=True)
class Share:
    """How often a resource is offered, whether under another name then, and whether by MPS."""

    replicas: int = 1
    renamed: bool = False
    by_mps: bool = False


class Labels(Protocol):
    """``labels``: what the maker's own programs say of a node in its labels."""

    def labels(
        self,
        config: Config,
        inventory: Any,
        root: Rootfs,
        chosen: Any,
        shares: Mapping[str, Share],
        /,
    ) -> Mapping[str, str]:
        """Return the labels; DriverError where the driver doesn't answer.

        ``root`` is the driver root, ``chosen`` what ``Plugin.settings`` returned, None for a
        vendor without. ``shares`` are by resource.
        """


Sample = tuple[dict[str, str], float]  # labels and a value


class Series(NamedTuple):
    """A series of Prometheus', under its whole name; ``kind`` is gauge or counter."""

    name: str
    kind: str
    about: str
    samples: list[Sample]


class MakersSeries(Protocol):
    """``makers_series``: what the maker's own exporter shows, for those who ask for it."""

    def series(self, snapshot: Any, /) -> Iterable[Series]:
        """Return the series of a look (``tools/metrics/model.Snapshot``)."""


class Links(Protocol):
    """``links``: how near devices are to each other."""

    @property
    def PER_LINK(self) -> int:  # noqa: N802
        """What one link between two devices counts."""

    def links(self, config: Config, inventory: Any, /) -> Mapping[str, Mapping[str, int]]:
        """Return the scores of each device with others, by their ids."""


@dataclass(frozen=True)
class DriverContent:
    """What a driver folder holds, by path in it.

    ``files`` are paths below the driver root ``root``, without a symbolic link on the way;
    ``links`` is what links say. ``folders`` are there whether they hold anything or not.
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
        """Return what belongs there; DriverFolderError where this driver can't be used so.

        ``capabilities`` are its parts to put there, none stand for all; RequestError for others.
        """


@dataclass(frozen=True)
class NotSet:
    """A setting of a device that couldn't be changed, and why.

    ``lost`` says that the device can't be reached: it comes back as new, by a reset or a reboot.
    ``final`` says that the device never has this setting, so there is nothing to try again.
    """

    device: str
    name: str
    cause: str
    remedy: str
    lost: bool = False
    final: bool = False


class DeviceSettings(Protocol):
    """``settings``: what can be set of a vendor's devices, for whatever runs on them.

    Devices are the inventory's ids, values are by the names of settings.
    """

    @property
    def READABLE(self) -> tuple[str, ...]:  # noqa: N802
        """The settings that can be read of every device that can be reached."""

    def read(
        self, config: Config, inventory: Any, wanted: Mapping[str, Mapping[str, int]], /
    ) -> Mapping[str, Mapping[str, int]]:
        """Return the values now of the settings that are named, of those that can be read.

        DriverError where the driver can't be asked.
        """

    def write(
        self, config: Config, inventory: Any, wanted: Mapping[str, Mapping[str, int]], /
    ) -> Sequence[NotSet]:
        """Set all that can be set; return the others. DriverError as above."""

    def refusal(self, name: str, value: int, /) -> str:
        """Return why a claim may not change a setting that has this value; "" if it may."""

    def title(self, name: str, /) -> str:
        """Return what a sentence calls a setting."""

    def shown(self, name: str, value: int, /) -> str:
        """Return a value as the vendor's tools print it."""


class ClaimConfig(Protocol):
    """``claim_config``: what a cluster's claims may ask of devices in the vendor's own words.

    A plan is what ``read`` returns: plain values. It changes ``settings`` of its device, and may
    have programs started: an effect is a plain dict with ``devices``, the inventory's ids, which is
    written down before it is begun.
    """

    @property
    def APIS(self) -> tuple[str, ...]:  # noqa: N802
        """The apiVersions of the parameters that it reads."""

    def read(self, parameters: Values, /, *, is_part: bool) -> Values | None:
        """Return what is asked for a device, None where the kind is for others; RequestError."""

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
        """Return the programs to start for a claim, which has a ``folder`` of its own.

        Whatever can refuse the plans does so here, before anything is done; a GpuhookError.
        """

    def begin(self, config: Config, inventory: Any, effect: Values, /) -> dict[str, list[Any]]:
        """Do it, whether it was done before or not; return CDI edits for the devices."""

    def look_after(self, config: Config, inventory: Any, effect: Values, /) -> bool:
        """Start again what has ended by itself; tell whether anything had."""

    def undo(self, config: Config, inventory: Any, effect: Values, /) -> None:
        """End it; the inventory is None without a driver.

        A GpuhookError where it is to be tried again: until then nobody else gets the devices.
        """


class Programs(Protocol):
    """``programs``: what those that use a vendor's devices read."""

    @property
    def VARIABLES(self) -> tuple[str, ...]:  # noqa: N802
        """Variables that choose among the devices of a container, and give none."""


Contract = TypeVar("Contract")


class Part(Generic[Contract]):
    """What finds one module of a vendor, None where it has none."""

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
    """Return by which variables programs choose among a vendor's devices that they were given."""
    found: Programs | None = part(names, "programs")
    return found.VARIABLES if found is not None else ()


def part(names: ModuleType, what: str) -> Any:
    """Return the module ``what`` of a vendor's folder here, None without one.

    ``names`` is the vendor's of ``registry.known``. Where one module serves several vendors, it
    has a function ``of``, and what that returns for this one stands for the module. What the
    module itself raises is passed on.
    """
    folder = f"gpuhook.tools.vendors.{contract.package(names).rpartition('.')[2]}"
    whole = f"{folder}.{what}"
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name not in (folder, whole):  # it is there, and lacks a module that it imports
            raise
        return None
    return module.of(names) if hasattr(module, "of") else module
