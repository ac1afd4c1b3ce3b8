"""Records of files with fixed paths: WSL2's driver store, Tegra's lists."""

import os

from gpuhook.base.errors import ElfError
from gpuhook.base.loader import elf
from gpuhook.base.loader.layout import is_library_name
from gpuhook.core.inventory.model import DriverFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.base.container.rootfs import Rootfs


def driver_file(
    root: "Rootfs", path: str, capability: str = "", target: str = ""
) -> DriverFile | None:
    """Return a regular file below the driver root, None if there is none.

    It goes to ``target`` in a container, by default to the same path. A file that is named like a
    library but can't be loaded is an ordinary file.
    """
    fd = root.open_file(path)
    if fd is None:
        return None
    real, target = root.real_path(path), target or path
    try:
        if is_library_name(target.rpartition("/")[2]):
            library = elf.read(fd, root.path.rstrip("/") + real)
            kind = "library" if library.bits == 64 else "config"
            return DriverFile(kind, real, target, capability, library.soname)
    except ElfError:
        pass  # a list may contain any path
    finally:
        os.close(fd)
    return DriverFile("config", real, target, capability)
