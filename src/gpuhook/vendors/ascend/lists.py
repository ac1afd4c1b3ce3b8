"""Root's lists of files for containers: /etc/ascend-docker-runtime.d/*.list.

A line is the path of a file or a folder, which is the same in a container. Missing paths are
skipped: a list is written for several products. Lists are trusted, except for paths that no
container gets (``vendors.path_policy``).
"""

import os
import stat

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import ElfError
from gpuhook.base.host.files import is_roots
from gpuhook.base.loader import elf, layout
from gpuhook.core.inventory.model import DriverFile
from gpuhook.vendors import path_policy
from gpuhook.vendors.ascend.model import DRIVER, FILE, LIBRARY, LIBRARY_FOLDERS, LISTS, MountList
from gpuhook.vendors.ascend.variables import BASE

# The content of base.list in Huawei's packages, for hosts that have only the driver, and files
# that programs read.
DEFAULT = (
    f"{DRIVER}/lib64", f"{DRIVER}/include", "/usr/local/dcmi", "/usr/local/bin/npu-smi",
    "/var/queue_schedule", f"{DRIVER}/version.info", "/etc/ascend_install.info",
)  # fmt: skip
# The interconnect of the NPUs, for jobs on several of them: added to every list.
TOPOLOGY = ("/etc/hccl_rootinfo.json", f"{DRIVER}/topo")

_ENDING = ".list"
_MOST_LINES, _LONGEST_LINE = 128, 4096
_MAX_BYTES = 1 << 20  # bytes


class ListContent:
    """Lists, the files in them, and the paths in them that don't exist."""

    def __init__(self) -> None:
        self.lists: tuple[MountList, ...] = ()
        self.files: tuple[DriverFile, ...] = ()
        self.absent: list[str] = []


def find(root: Rootfs) -> ListContent:
    """Read every list below the driver root; a bad one is recorded and affects no other."""
    found = ListContent()
    names = [name.removesuffix(_ENDING) for name in root.list_folder(LISTS) if _is_list(name)]
    for name in names:
        _add(root, found, name, *_read(root, f"{LISTS}/{name}{_ENDING}"))
    if BASE not in names:
        _add(root, found, BASE, list(DEFAULT), "")
        found.absent.append(f"{LISTS}/{BASE}{_ENDING}")
    if any(file.kind == FILE for file in found.files):
        found.files += tuple(_libraries(root))
    return found


def _is_list(name: str) -> bool:
    return name.endswith(_ENDING) and name != _ENDING


def _read(root: Rootfs, path: str) -> tuple[list[str], str]:
    """Return the valid lines of a list, and why it can't be used ("": it can)."""
    status = root.stat(path)
    folder = root.stat(LISTS)
    if status is None or folder is None or not stat.S_ISREG(status.st_mode):
        return [], "it isn't a file"
    for each in (status, folder):
        ours = is_roots(each.st_uid) or each.st_uid == os.geteuid()
        if not ours or each.st_mode & 0o022:
            return [], "non-root users may write to it"
    try:
        text = (root.read_file(path, _MAX_BYTES) or b"").decode()
    except (OSError, UnicodeDecodeError) as error:
        return [], f"it can't be read ({type(error).__name__})"
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) > _MOST_LINES:
        return [], f"it has {len(lines)} lines; the maximum is {_MOST_LINES}"
    if any(len(line) > _LONGEST_LINE for line in lines):
        return [], f"it has a line of more than {_LONGEST_LINE} characters"
    return lines, ""


def _add(root: Rootfs, found: ListContent, name: str, lines: list[str], problem: str) -> None:
    """Add a list with its files; the host's topology is added to each."""
    files, refused = [], []
    for line in dict.fromkeys((*lines, *(() if problem else TOPOLOGY))):
        if not line.startswith("/") or ".." in line.split("/"):
            refused.append(_refusal(name, line, "which is not an absolute path"))
            continue
        path = path_policy.plain(line)
        listed = path_policy.ListedPath(root, path)
        if listed.refusal:
            refused.append(_refusal(name, path, listed.refusal))
        elif listed.real:
            files.append(DriverFile(FILE, listed.real, path, name))
        else:
            found.absent.append(path)
    found.lists += (MountList(name, problem, tuple(refused)),)
    found.files += tuple(files)


def _refusal(name: str, path: str, why: str) -> str:
    return f"The list {name} has {path}, {why}: containers don't get it"


def _libraries(root: Rootfs) -> list[DriverFile]:
    """Return the libraries for the loader; of one SONAME, the first folder's."""
    found: dict[str, DriverFile] = {}
    for folder in LIBRARY_FOLDERS:
        for name in filter(layout.is_library_name, root.list_folder(folder)):
            soname = _soname(root, f"{folder}/{name}")
            if soname is None or soname in found:
                continue
            # The file itself: a link out of the folder is dangling in a container.
            path = root.real_path(f"{folder}/{name}")
            if os.path.dirname(path) == root.real_path(folder):
                target = f"{folder}/{os.path.basename(path)}"
                found[soname] = DriverFile(LIBRARY, path, target, "", soname)
    return list(found.values())


def _soname(root: Rootfs, path: str) -> str | None:
    """Return a 64-bit library's DT_SONAME or, without one, its name; None for anything else."""
    try:
        fd = root.open_file(path)
        if fd is None:
            return None
        try:
            library = elf.read(fd, path)
        finally:
            os.close(fd)
    except (OSError, ElfError):
        return None
    return (library.soname or os.path.basename(path)) if library.bits == 64 else None
