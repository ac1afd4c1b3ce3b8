"""Forward compatibility: the newer CUDA that an image contains for older drivers.

NVIDIA's images hold /usr/local/cuda/compat/libcuda.so.<driver version>, built to run on drivers
older than itself. Its ELF section .note.cuda.fwd_compatibility may list the driver branches.
"""

import os
import stat

from gpuhook.base.errors import ElfError
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.jsontext import Record
from gpuhook.vendors.nvidia import requirements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs

SECTION = ".note.cuda.fwd_compatibility"
OWNER = "NVIDIA Corporation"
_LIBRARY = "libcuda.so."
_FORMAT = 1
_KEYS = ("format", "CUDA version", "driver")
_MAX_NOTE = 1 << 16  # bytes; real notes have about a hundred

# NVIDIA's folders have a dozen files; reading an image's thousands would cost the host time.
_MOST_FILES = 64


def wanted(config: "Config") -> bool:
    """Tell whether the configuration enables the search."""
    off = config.cuda_compat_mode == "disabled"
    return not off and not config.feature("disable-cuda-compat-lib-hook")


class Note(Record):
    """A library's own note: its CUDA version and the driver branches it runs on."""

    cuda: str
    branches: tuple[int, ...]


class CudaCompat(Record):
    """The CUDA compatibility libraries of an image.

    ``folder`` is their folder in the image, links resolved. It is added to the loader's search
    path, and never opened again or mounted. ``libraries`` are the SONAMEs in it.
    """

    folder: str
    version: str
    note: Note | None
    libraries: tuple[str, ...]


def parse_note(content: bytes) -> Note | None:
    """Return a note's content, None if it is invalid: it comes from an image.

    NVIDIA's programs read it with Go's encoding/json: keys in any case, null like a missing key.
    """
    if len(content) > _MAX_NOTE:
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
    if any(type(branch) is not int for branch in branches):  # in Python, true is an int
        return None
    return Note(cuda, tuple(branches))


def compat_version(names: "Iterable[str]") -> str | None:
    """Return the version of the only libcuda.so.<version> among a folder's regular files.

    None without such a file, and for several, because the right one is unknown. A version has at
    least two parts, so the link libcuda.so.1 doesn't count.
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
    """Tell whether to use the image's library instead of the driver's.

    ``library_version`` is from its file name, ``driver_version`` and ``cuda_version`` are the
    host's ("" if unknown). Versions are compared number by number. With a note, it must list the
    driver's branch, and the library must be newer than the driver. If the driver versions can't
    be compared, the library's CUDA must be newer. Without a note, the library must have a newer
    major version, which is what such libraries are made for.
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
    """Return an image's libraries, read through its confined root; None if none are usable."""
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
    """Tell whether a text from the image is safe in the loader's configuration."""
    return text.isascii() and text.isprintable() and " " not in text


def _is_regular(root: "Rootfs", place: str, name: str) -> bool:
    """Tell whether a name in the folder is a regular file and not a link."""
    fd = root.folder(place)
    try:
        mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode)


def _soname(root: "Rootfs", path: str) -> str | None:
    from gpuhook.base.loader import elf  # noqa: PLC0415 - only if the image has such libraries

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
    from gpuhook.base.loader import elf  # noqa: PLC0415 - as above

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
