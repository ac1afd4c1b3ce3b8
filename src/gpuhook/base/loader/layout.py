"""Folders for libraries in a container, and the names that its loader finds them by.

A few files of the image determine the folders. The names, SONAME links and cache entries, are
those that ldconfig makes for a folder. Sources: ldconfig(8), glibc's elf/ldconfig.c.
"""

import os

from gpuhook.base.loader.ldcache import order_key
from gpuhook.base.names import machine_name
from gpuhook.base.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.base.container.rootfs import Rootfs

# uname -m -> Debian's multiarch folder names, native and 32-bit (None: doesn't exist).
_TRIPLETS = {
    "x86_64": ("x86_64-linux-gnu", "i386-linux-gnu"),
    "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf"),
    "ppc64le": ("powerpc64le-linux-gnu", None),
    "riscv64": ("riscv64-linux-gnu", None),
}


# uname -m -> ld.so.cache flags of native libraries, and of 32-bit ones.
_CACHE_FLAGS = {
    "x86_64": (0x0303, 0x0003),
    "aarch64": (0x0A03, 0x0903),
    "ppc64le": (0x0503, None),
    "riscv64": (0x1003, None),
}


class Layout(Record):
    """Folders for driver files in a container.

    ``uses_cache`` is False if the loader (musl's) reads no ld.so.cache.
    """

    libraries: str
    libraries32: str | None
    uses_cache: bool

    def folder_of(self, path: str, *, bits32: bool) -> str | None:  # noqa: ARG002 - see HostLayout
        """Return the folder for a library with this path on the host, None if there is none."""
        return self.libraries32 if bits32 else self.libraries


class HostLayout(Layout):
    """Layout with each library in its folder below the driver root: for CDI, with any image."""

    def __init__(self, *, uses_cache: bool = True) -> None:
        super().__init__("", None, uses_cache=uses_cache)

    def folder_of(self, path: str, *, bits32: bool) -> str | None:  # noqa: ARG002 - same folder
        """Return the library's own folder."""
        return path.rpartition("/")[0]


def cache_flags(machine: str, *, bits32: bool) -> int | None:
    """Return the ld.so.cache flags of this machine's libraries, None if there are none."""
    return _CACHE_FLAGS.get(machine, (None, None))[1 if bits32 else 0]


def triplet(machine: str) -> str:
    """Return Debian's folder name for native libraries of this machine (uname -m)."""
    return _triplets(machine)[0]


def triplet32(machine: str) -> str | None:
    """Return Debian's folder name for 32-bit libraries of this machine, None for none."""
    return _triplets(machine)[1]


def _triplets(machine: str) -> tuple[str, str | None]:
    return _TRIPLETS.get(machine, (f"{machine}-linux-gnu", None))


def debian(machine: str) -> Layout:
    """Return the layout of Debian and its relatives (multiarch)."""
    folder, folder32 = _triplets(machine)
    return Layout(
        f"/usr/lib/{folder}",
        f"/usr/lib/{folder32}" if folder32 else None,
        uses_cache=True,
    )


def of_image(root: "Rootfs") -> Layout:
    """Determine a container's layout from its root filesystem."""
    machine = machine_name()
    if _is_debian(root, machine):
        return debian(machine)
    if root.exists(f"/lib/ld-musl-{machine}.so.1") and not root.exists("/usr/lib64"):
        return Layout("/usr/lib", None, uses_cache=False)
    folder32 = "/usr/lib32"
    if not root.exists(folder32) and _is_other_folder(root, "/usr/lib", "/usr/lib64"):
        folder32 = "/usr/lib"
    return Layout("/usr/lib64", folder32, uses_cache=True)


def _is_debian(root: "Rootfs", machine: str) -> bool:
    """Tell whether the loader searches Debian's folders, even if /etc is a volume."""
    if root.exists("/etc/debian_version"):
        return True
    folder = triplet(machine)
    return root.exists(f"/lib/{folder}/libc.so.6") or root.exists(f"/usr/lib/{folder}/libc.so.6")


def _is_other_folder(root: "Rootfs", path: str, other: str) -> bool:
    """Tell whether a folder exists and is not the same as another one."""
    found, compared = root.stat(path), root.stat(other)
    if found is None:
        return False
    if compared is None:
        return True
    return (found.st_dev, found.st_ino) != (compared.st_dev, compared.st_ino)


def is_library_name(name: str) -> bool:
    """Tell whether ldconfig considers a file of that name: lib*.so* or ld-*.so*."""
    return name.startswith(("lib", "ld-")) and ".so" in name and "/" not in name


def winners(libraries: "Iterable[tuple[str, str | None]]") -> dict[str, str]:
    """Return the file for each SONAME in one folder, sorted by SONAME.

    ``libraries`` are file names with their SONAMEs, of one ABI. Of several files with the same
    SONAME the highest version wins (numbers compare as numbers). A file without a SONAME counts
    under its own name. SONAMEs that aren't plain file names are left out.
    """
    chosen: dict[str, str] = {}
    for name, soname in libraries:
        key = soname or name
        if not is_library_name(name) or "/" in key or key in {".", ".."}:
            continue
        rival = chosen.get(key)
        if rival is None or _order(rival) < _order(name):
            chosen[key] = name
    return dict(sorted(chosen.items()))


def links(libraries: "Iterable[tuple[str, str | None]]") -> dict[str, str]:
    """Return the SONAME links that ldconfig makes in one folder: link name to file name.

    ``libraries`` as for ``winners``. No link takes the name of one of the files.
    """
    given = list(libraries)
    names = {name for name, _soname in given}
    return {link: name for link, name in winners(given).items() if link not in names}


def cache_entries(
    folder: str,
    libraries: "Iterable[tuple[str, str | None]]",
    flags: int,
    development_links: "Iterable[str]" = (),
) -> list[tuple[str, str, int]]:
    """Return the cache entries that ldconfig writes for one folder, for ``ldcache.merge``.

    ``libraries`` are as for ``winners``, ``flags`` their common ABI. ``development_links`` are
    further links in the folder; ldconfig adds only those that end in .so and begin a SONAME
    (libcuda.so, for libcuda.so.1).
    """
    sonames = list(winners(libraries))
    for link in development_links:
        if link.endswith(".so") and any(name.startswith(link) for name in sonames):
            sonames.append(link)
    return [(name, f"{folder}/{name}", flags) for name in dict.fromkeys(sonames)]


def _order(name: str) -> "tuple[bytes | int, ...]":
    return order_key(os.fsencode(name))
