"""Contracts of the vendors' optional modules for measurements (``monitor.vendor_parts``)."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from gpuhook.base.config.model import Config
from gpuhook.monitor.host.child import Work
from gpuhook.monitor.vendor_parts import Values, VendorPart
from gpuhook.monitor.vendors import sensors


class Readings(Protocol):
    """``telemetry`` of a driver with files, which are also read in a child."""

    def read(self, inventory: Any, asking: Callable[[str], bool], /) -> Mapping[str, Values]:
        """Return the current measurements of each device, by its id.

        ``asking`` is called with a device's id before its files are read; False skips it.
        """


class TelemetryModule(Protocol):
    """``telemetry`` of a driver that is queried in a child; monitor/telemetry runs it."""

    def can_ask(self, inventory: Any, /) -> bool:
        """Tell whether the driver of this inventory can be queried."""

    def facts(self, inventory: Any, /) -> Mapping[str, Values]:
        """Return each device's values that the inventory has, by its id."""

    def worded(self, values: Values, /) -> Values:
        """Return the child's values of a device, with names in place of numeric codes."""

    def begin(self, config: Config, inventory: Any, but: Collection[str], /) -> Work:
        """Return the function of a child that is queried about all devices ``but`` some."""


Sample = tuple[dict[str, str], float]  # labels and a value


class Series(NamedTuple):
    """A Prometheus series with its full name; ``kind`` is gauge or counter."""

    name: str
    kind: str
    about: str
    samples: list[Sample]


class ExporterSeries(Protocol):
    """``exporter_series``: the series of the vendor's own exporter, if they are requested."""

    def series(self, snapshot: Any, /) -> Iterable[Series]:
        """Return the series of a snapshot (``metrics/model.Snapshot``)."""


exporter_series: VendorPart[ExporterSeries] = VendorPart("metrics", "exporter_series")

_own_telemetry: VendorPart[Readings | TelemetryModule] = VendorPart("metrics", "telemetry")
_DRM = 226  # the major of its nodes (Documentation/admin-guide/devices.txt)


def telemetry(names: ModuleType) -> Readings | TelemetryModule | None:
    """Return the telemetry of the vendor with these names, None if it has none.

    DRM drivers without a module have the kernel's sensors.
    """
    kernels: Readings | None = sensors if _DRM in names.FIXED_MAJORS else None
    return _own_telemetry(names) or kernels
