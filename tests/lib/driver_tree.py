"""A driver root under construction, for tests of the files that are found in one."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import own

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.core.inventory.model import DriverFile
from gpuhook.vendors.nvidia import driver_files
from gpuhook.vendors.nvidia.locations import Locations

LibraryBuilder = Callable[..., bytes]
VERSION = "535.261.03"
LIBS = own.FOLDER[1:]


class Root:
    """A driver root below ``path``, with a driver of one version."""

    def __init__(self, path: Path, library: LibraryBuilder, version: str = VERSION) -> None:
        self.path = path
        self.library = library
        self.version = version
        self.config = Config()
        self.config.driver_root = str(path)

    def put(self, path: str, content: bytes | str = b"") -> None:
        """Write a file."""
        place = self.path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)

    def add(self, name: str, soname: str, folder: str = LIBS, version: str = "") -> None:
        """Add a library and its SONAME link."""
        file = f"{name}.{version or self.version}"
        self.put(f"{folder}/{file}", self.library(soname))
        if soname != file:
            (self.path / folder / soname).symlink_to(file)

    def add_file(self, path: str, soname: str | None = None, *, bits: int = 64) -> None:
        """Add a library under a name of its own; its SONAME is that name unless given."""
        name = soname or path.rpartition("/")[2]
        machine, flags = own.ELF if bits == 64 else own.ELF32
        self.put(path, self.library(name, bits=bits, machine=machine, flags=flags))

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        place = self.path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def make_cache(self, *folders: str) -> None:
        """Write the root's cache with the real ldconfig."""
        conf = "".join(f"/{folder}\n" for folder in folders or (LIBS,))
        self.put("etc/ld.so.conf", conf.encode())
        command = ["/sbin/ldconfig", "-r", str(self.path), "-X"]
        subprocess.run(command, check=True, capture_output=True)

    def find(self, *folders: str) -> tuple[DriverFile, ...]:
        """Return the driver's files; ``folders`` are searched first for libraries."""
        with Rootfs(str(self.path)) as root:
            index = driver_files.LibraryIndex(root, "", folders)
            return driver_files.find_all(root, index, self.version, Locations(root, self.config))

    def refused(self) -> list[str]:
        """Return a sentence for each configured folder that isn't searched."""
        with Rootfs(str(self.path)) as root:
            return Locations(root, self.config).refused

    def nvml(self) -> str:
        """Return the path of NVML's library."""
        with Rootfs(str(self.path)) as root:
            index = driver_files.LibraryIndex(root, "", ())
            return driver_files.find_nvml(root, index, "/srv/gpuhook.toml")


def targets(found: tuple[DriverFile, ...]) -> dict[str, str]:
    """Return the path of each file by its target in the container."""
    return {file.target: file.path for file in found}
