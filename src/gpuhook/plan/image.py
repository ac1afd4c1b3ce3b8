"""What an image itself brings that changes the plan: its library folders, a newer CUDA."""

import os
import stat

from gpuhook.errors import ElfError
from gpuhook.loader import layout
from gpuhook.vendors.nvidia import cuda_compat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.config import Config
    from gpuhook.container.rootfs import Rootfs

# NVIDIA's have a dozen files; reading thousands would cost the host's time, not the image's.
_MOST_FILES = 64


class CudaCompat:
    """The CUDA compatibility libraries of an image.

    ``folder`` is their folder in the image, links resolved: it goes into the loader's
    search, is never opened again and never mounted. ``libraries`` are the SONAMEs in it.
    """

    __slots__ = ("folder", "libraries", "note", "version")

    def __init__(
        self,
        folder: str,
        version: str,
        note: "cuda_compat.Note | None",
        libraries: tuple[str, ...],
    ) -> None:
        self.folder = folder
        self.version = version
        self.note = note
        self.libraries = libraries


class Image:
    """The facts about an image that a plan depends on.

    ``ldconfig`` is the host's program that may make a cache where the image's own is
    damaged, "" if none may.
    """

    __slots__ = ("compat", "layout", "ldconfig")

    def __init__(
        self, folders: layout.Layout, compat: CudaCompat | None = None, ldconfig: str = ""
    ) -> None:
        self.layout = folders
        self.compat = compat
        self.ldconfig = ldconfig


def same(one: Image, other: Image) -> bool:
    """Tell whether two images make the same plan."""
    return _facts(one) == _facts(other)


def _facts(image: Image) -> "tuple[object, ...]":
    layout, compat = image.layout, image.compat
    folders = (layout.libraries, layout.libraries32, layout.uses_cache)
    if compat is None:
        return folders
    note = (compat.note.cuda, compat.note.branches) if compat.note else None
    return (*folders, compat.folder, compat.version, compat.libraries, note)


def unknown() -> Image:
    """Return what to assume where there is no image to look at: Debian, without CUDA."""
    return Image(layout.debian(os.uname().machine))


def look(root: "Rootfs", config: "Config") -> Image:
    """Look at an image through its confined root."""
    compat = _compat(root) if cuda_compat.wanted(config) else None
    ldconfig = config.host_ldconfig() if config.ldconfig_fallback else ""
    return Image(layout.of_image(root), compat, ldconfig)


def _compat(root: "Rootfs") -> CudaCompat | None:
    names = root.list_folder(cuda_compat.FOLDER)
    if not names or len(names) > _MOST_FILES:
        return None
    regular = [name for name in names if _is_regular(root, name)]
    version = cuda_compat.compat_version(regular)
    if version is None:
        return None
    folder = root.real_path(cuda_compat.FOLDER)
    if not _is_plain(folder):
        return None
    sonames = [_soname(root, name) for name in regular]
    return CudaCompat(
        folder,
        version,
        _note(root, f"{cuda_compat.FOLDER}/libcuda.so.{version}"),
        tuple(dict.fromkeys(name for name in sonames if name and _is_plain(name))),
    )


def _is_plain(text: str) -> bool:
    """Tell whether a text from the image can stand in the loader's configuration as it is."""
    return text.isascii() and text.isprintable() and " " not in text


def _is_regular(root: "Rootfs", name: str) -> bool:
    """Tell whether a name in the folder is a file and no link."""
    fd = root.folder(cuda_compat.FOLDER)
    try:
        mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode)


def _soname(root: "Rootfs", name: str) -> str | None:
    from gpuhook.loader import elf  # noqa: PLC0415 - only where the image has such libraries

    fd = root.open_file(f"{cuda_compat.FOLDER}/{name}")
    if fd is None:
        return None
    try:
        return elf.read(fd, name).soname
    except ElfError:
        return None
    finally:
        os.close(fd)


def _note(root: "Rootfs", path: str) -> "cuda_compat.Note | None":
    from gpuhook.loader import elf  # noqa: PLC0415 - as above

    fd = root.open_file(path)
    if fd is None:
        return None
    try:
        name, owner = cuda_compat.SECTION.encode(), cuda_compat.OWNER.encode()
        content = elf.note(fd, name, owner, path)
    except ElfError:
        return None
    finally:
        os.close(fd)
    return cuda_compat.parse_note(content) if content else None
