"""Whether the newer CUDA that an image brings for older drivers should be used.

NVIDIA's images hold /usr/local/cuda/compat/libcuda.so.<driver version>, built to run on
drivers older than itself. Its ELF section .note.cuda.fwd_compatibility may say exactly which.
"""

import os
import stat

from gpuhook.ground.errors import ElfError
from gpuhook.ground.oci import jsontext
from gpuhook.ground.oci.jsontext import Record
from gpuhook.vendors.nvidia import requirements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.container.rootfs import Rootfs

SECTION = ".note.cuda.fwd_compatibility"
OWNER = "NVIDIA Corporation"
_LIBRARY = "libcuda.so."
_FORMAT = 1
_KEYS = ("format", "CUDA version", "driver")
_NOTE_LIMIT = 1 << 16  # bytes; real notes have about a hundred

# NVIDIA's have a dozen files; reading thousands would cost the host's time, not the image's.
_MOST_FILES = 64


def wanted(config: "Config") -> bool:
    """Say whether the configuration lets us look for it at all."""
    off = config.cuda_compat_mode == "disabled"
    return not off and not config.feature("disable-cuda-compat-lib-hook")


class Note(Record):
    """What a library says about itself: its CUDA version and the driver branches it runs on."""

    cuda: str
    branches: tuple[int, ...]


class CudaCompat(Record):
    """The CUDA compatibility libraries of an image.

    ``folder`` is their folder in the image, links resolved: it goes into the loader's
    search, is never opened again and never mounted. ``libraries`` are the SONAMEs in it.
    """

    folder: str
    version: str
    note: Note | None
    libraries: tuple[str, ...]


def parse_note(content: bytes) -> Note | None:
    """Return a note's content, None for one that can't be understood: it comes from an image.

    NVIDIA's programs read it by Go's encoding/json: keys in any case, null as if it weren't there.
    """
    if len(content) > _NOTE_LIMIT:
        return None
    try:
        data = jsontext.loads(content.strip(b"\0").decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    form, cuda, branches = (
        jsontext.field(data, key) for key in ("format", "CUDA version", "driver")
    )
    cuda, branches = "" if cuda is None else cuda, [] if branches is None else branches
    if type(form) is not int or form != _FORMAT:
        return None
    if not isinstance(cuda, str) or not isinstance(branches, list):
        return None
    if any(type(branch) is not int for branch in branches):  # true is an int to Python
        return None
    return Note(cuda, tuple(branches))


def compat_version(names: "Iterable[str]") -> str | None:
    """Return the version of the one libcuda.so.<version> among a folder's regular files.

    None without such a file, and with several, of which none can be told to be meant. A
    version has at least two parts, so that the link libcuda.so.1 is not one.
    """
    found = [
        name.removeprefix(_LIBRARY)
        for name in names
        if name.startswith(_LIBRARY) and "." in name.removeprefix(_LIBRARY)
    ]
    return found[0] if len(found) == 1 else None


def decide(
    library_version: str, driver_version: str, cuda_version: str = "", note: Note | None = None
) -> bool:
    """Say whether to use the image's library instead of the driver's own.

    ``library_version`` is from its file name, ``driver_version`` and ``cuda_version`` are the
    host's ("" where unknown). Versions are compared number by number. With a note: the
    driver's branch must be in it and the library newer than the driver; where the drivers
    can't be compared the library's CUDA must be newer. Without one: only a library of a newer
    major version, which is what such libraries were made for.
    """
    library, driver = (
        requirements.parse_version(library_version),
        requirements.parse_version(driver_version),
    )
    if note is not None:
        if library and driver:
            return driver[0] in note.branches and library > driver
        theirs, ours = (
            requirements.parse_version(note.cuda),
            requirements.parse_version(cuda_version),
        )
        return bool(theirs and ours and theirs > ours)
    return bool(library and driver and library[0] > driver[0])


def find_newer(root: "Rootfs", config: "Config") -> CudaCompat | None:
    """Return what an image brings, read through its confined root; None if it is nothing usable."""
    place = config.cuda_compat_root
    names = root.list_folder(place, _MOST_FILES + 1)  # protects: compat-names
    if not names or len(names) > _MOST_FILES:  # protects: compat-files
        return None
    regular = [name for name in names if _is_regular(root, place, name)]
    version = compat_version(regular)
    if version is None:
        return None
    folder = root.real_path(place)
    if not _is_plain(folder):
        return None
    sonames = [_soname(root, f"{place}/{name}") for name in regular]
    return CudaCompat(
        folder,
        version,
        _note(root, f"{place}/libcuda.so.{version}"),
        tuple(dict.fromkeys(name for name in sonames if name and _is_plain(name))),
    )


def _is_plain(text: str) -> bool:
    """Tell whether a text from the image can stand in the loader's configuration as it is."""
    return text.isascii() and text.isprintable() and " " not in text


def _is_regular(root: "Rootfs", place: str, name: str) -> bool:
    """Tell whether a name in the folder is a file and no link."""
    fd = root.folder(place)
    try:
        mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode)


def _soname(root: "Rootfs", path: str) -> str | None:
    from gpuhook.ground.loader import elf  # noqa: PLC0415 - only where the image has such libraries

    fd = root.open_file(path)
    if fd is None:
        return None
    try:
        return elf.read(fd, path).soname
    except ElfError:
        return None
    finally:
        os.close(fd)


def _note(root: "Rootfs", path: str) -> "Note | None":
    from gpuhook.ground.loader import elf  # noqa: PLC0415 - as above

    fd = root.open_file(path)
    if fd is None:
        return None
    try:
        name, owner = SECTION.encode(), OWNER.encode()
        content = elf.note(fd, name, owner, path)
    except ElfError:
        return None
    finally:
        os.close(fd)
    return parse_note(content) if content else None
