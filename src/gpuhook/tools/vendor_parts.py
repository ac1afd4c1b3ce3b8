"""Contracts of the vendors' optional modules for the command line (``monitor.vendor_parts``)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuhook.base.config.model import Config
from gpuhook.monitor.vendor_parts import Part


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


doctor: Part[Doctor] = Part("tools", "doctor")

driver_folder: Part[DriverFolder] = Part("tools", "driver_folder")
