"""The driver's files in one folder, for containers whose runtime has no GPU support.

Mounted read-only where CUDA images look for programs and libraries, it provides the driver, like
the driver volume of nvidia-docker 1. The folder's path doesn't depend on the driver's version,
because a cluster stores that path for the lifetime of a pod.

A vendor defines the content (``DriverFolder``, currently only NVIDIA). ``keep`` creates the
folder, and ``place`` installs it atomically.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuhook.base.config.model import Config
from gpuhook.monitor.vendor_parts import VendorPart


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


PART: VendorPart[DriverFolder] = VendorPart("tools", "driver_folder")
