"""Optional modules of vendors for commands and services, imported when these run.

Each package has a module like this one with its contracts: a protocol for each kind of module.
``tests/unit/vendors/test_parts.py`` compares them with every vendor's modules by mypy. Inventories
are of the vendor's own class, so they are Any here.
"""

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from gpuhook.base.config.model import Config
from gpuhook.core import contract
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.host.child import Work

Values = Mapping[str, Any]


# Effects of an error on its device: nothing may be started on it; its applications must be started
# again, and the device is healthy then; none.
FATAL, APPLICATION, IGNORE = ACTIONS = ("fatal", "application", "ignore")


class EventsModule(Protocol):
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

        ``chosen`` is the result of ``PluginModule.settings``, None for a vendor without.
        """


class Links(Protocol):
    """``links``: the links between devices."""

    @property
    def PER_LINK(self) -> int:  # noqa: N802
        """The score of one link between two devices."""

    def links(self, config: Config, inventory: Any, /) -> Mapping[str, Mapping[str, int]]:
        """Return the scores of each device with others, by their ids."""


@dataclass(frozen=True)
class UnchangedSetting:
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
    ) -> Sequence[UnchangedSetting]:
        """Change all settings that can be changed; return the others. DriverError as above."""

    def refusal(self, name: str, value: int, /) -> str:
        """Return why a claim may not change a setting that has this value; "" if it may."""

    def title(self, name: str, /) -> str:
        """Return a setting's name in sentences."""

    def shown(self, name: str, value: int, /) -> str:
        """Return a value as the vendor's tools print it."""


Contract = TypeVar("Contract")


class VendorPart(Generic[Contract]):
    """A finder of a kind of module of vendors; None for vendors without it."""

    def __init__(self, package: str, what: str) -> None:
        self._package = package
        self._what = what

    def __call__(self, names: ModuleType) -> Contract | None:
        """Return the module of the vendor with these names."""
        found: Contract | None = part(self._package, names, self._what)
        return found


settings: VendorPart[DeviceSettings] = VendorPart("monitor", "settings")
events: VendorPart[EventsModule] = VendorPart("monitor", "events")

links: VendorPart[Links] = VendorPart("monitor", "links")


def part(package: str, names: ModuleType, what: str) -> Any:
    """Return the module ``what`` of a vendor's folder in a package, None without one.

    ``names`` is the vendor's module in ``registry.all_vendors``. A module for several vendors has a
    function ``of``, whose result for this vendor is used as the module. Errors that the module
    raises on import are passed on.
    """
    folder = f"gpuhook.{package}.vendors.{contract.package(names).rpartition('.')[2]}"
    whole = f"{folder}.{what}"
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name not in (folder, whole):  # a module that it imports is missing
            raise
        return None
    return module.of(names) if hasattr(module, "of") else module
