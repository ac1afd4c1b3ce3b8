"""Contracts of the vendors' optional modules for the command line (``monitor.vendor_parts``)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuhook.base.config.model import Config
from gpuhook.monitor.vendor_parts import Part


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


driver_folder: Part[DriverFolder] = Part("tools", "driver_folder")
