"""Tegra: its integrated GPU, whose nodes and files are in the lists of its packages.

A list is a CSV file, each line a type and an absolute path: ``dev`` a node, ``dir`` a folder,
``lib`` a file, ``sym`` a link. A path may be a pattern (``/dev/dri/card*``). Paths are relative to
the driver root, and missing ones are left out: lists are for several boards.
"""

import copy
import fnmatch
import os
import stat

from gpuhook.base.container.rootfs import read_link
from gpuhook.base.errors import DriverError, UntrustedPathError
from gpuhook.core.inventory.model import DeviceNode, DriverFile
from gpuhook.vendors import path_policy
from gpuhook.vendors.nvidia.driver_files import driver_file
from gpuhook.vendors.nvidia.model import TEGRA, Gpu, NvidiaInventory
from gpuhook.vendors.nvidia.variables import CSV_MOUNTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.vendors.nvidia.nvml import NvmlResponse

RELEASE = "/etc/nv_tegra_release"
FAMILY = "/sys/devices/soc0/family"
# The lists for every container; others count if an image requests all.
ORDINARY = ("devices.csv", "drivers.csv", "l4t.csv")
TYPES = ("dev", "dir", "lib", "sym")
_OWN_GPUS = ("(nvgpu)", "NVIDIA Thor")  # in NVML's names of integrated GPUs
_MAX_LIST = 1 << 20
_MOST_LINKS = 40  # the kernel's limit
_ANYWHERE = "**/"
_MAGIC = frozenset("*?[")


def is_here(root: "Rootfs") -> bool:
    """Tell whether the files of Tegra's packages, or of its kernel, exist."""
    family = root.read_file(FAMILY, 1 << 12) or b""
    return root.exists(RELEASE) or family.lower().startswith(b"tegra")


def is_own(gpu: Gpu) -> bool:
    """Tell whether a GPU in NVML is Tegra's integrated one."""
    return any(word in gpu.name for word in _OWN_GPUS)


# Lists ---------------------------------------------------------------------------------------


class ListEntry:
    """A line of a list: its place (file and number), its path and its type.

    ``problem`` is its error, "" for a valid line.
    """

    __slots__ = ("kind", "list", "number", "path", "problem")

    def __init__(self, name: str, number: int, line: str) -> None:
        self.list = name
        self.number = number
        self.kind, self.path, self.problem = read_line(line)

    @property
    def capability(self) -> str:
        """Return the capability that a container must request for it, "" for none."""
        return "" if self.list.rpartition("/")[2] in ORDINARY else CSV_MOUNTS


def read_line(line: str) -> tuple[str, str, str]:
    """Return the type and the path of a line, and its error ("": none)."""
    kind, comma, path = (part.strip() for part in line.partition(","))
    problem = ""
    if not comma or not path:
        problem = "isn't a type and a path with a comma between them"
    elif kind not in TYPES:
        problem = "has another type than dev, dir, lib and sym"
    elif not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        problem = "has no absolute path without .."
    return kind, path_policy.plain(path), problem


def lists(root: "Rootfs", folder: str) -> list[str]:
    """Return the paths of the lists in a folder."""
    names = [name for name in root.list_folder(folder) if name.lower().endswith(".csv")]
    return [f"{folder.rstrip('/')}/{name}" for name in names if name.lower() != ".csv"]


def is_trusted(root: "Rootfs", path: str) -> bool:
    """Tell whether only root (or this user) can have written a list."""
    status = root.stat(path)
    return status is not None and not (
        status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid())
    )


def _text(root: "Rootfs", path: str) -> str:
    try:
        data = root.read_file(path, _MAX_LIST) if is_trusted(root, path) else None
    except OSError as error:
        raise DriverError(
            f"Tegra's list {path} can't be read: {error.strerror}",
            "Install its package again, or remove it",
        ) from None
    return (data or b"").decode("utf-8", "replace")


def entries(root: "Rootfs", folder: str) -> "Iterator[ListEntry]":
    """Yield the lines of all lists except empty ones and comments; DriverError if unreadable.

    A line with a pattern is repeated for each matching path, or kept if there are none.
    """
    for path in lists(root, folder):
        for number, line in enumerate(_text(root, path).split("\n"), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                entry = ListEntry(path, number, line)
                for fitting in _fitting(root, entry) or [entry.path]:
                    entry.path = fitting
                    yield copy.copy(entry)


def _fitting(root: "Rootfs", entry: ListEntry) -> list[str]:
    """Return the paths that match an entry's pattern, as Go's filepath.Glob; [] for none."""
    if entry.problem or _MAGIC.isdisjoint(entry.path):
        return []
    found = [""]
    for part in entry.path.lstrip("/").split("/"):
        if _MAGIC.isdisjoint(part):
            found = [f"{folder}/{part}" for folder in found]
        else:
            found = [
                f"{folder}/{name}"
                for folder in found
                for name in root.list_folder(folder or "/")
                if _fits(name, part)
            ]
    return [each for each in found if root.exists(each)]


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.replace("[^", "[!"))


def is_ignored(path: str, patterns: "Iterable[str]") -> bool:
    """Tell whether a link matches a pattern: by its path, or by its name for **/ patterns.

    In a pattern, * and ? don't match slashes.
    """
    for pattern in patterns:
        if pattern.startswith(_ANYWHERE):
            text, wanted = os.path.basename(path), pattern.removeprefix(_ANYWHERE)
        else:
            text, wanted = path, pattern
        parts, wanted_parts = text.split("/"), wanted.split("/")
        pairs = zip(parts, wanted_parts, strict=False)
        if len(parts) == len(wanted_parts) and all(_fits(*pair) for pair in pairs):
            return True
    return False


# Inventory -----------------------------------------------------------------------------------


def discover(
    root: "Rootfs", config: "Config", answer: "NvmlResponse | None" = None
) -> NvidiaInventory:
    """Return the inventory from the lists; ``answer`` is NVML's, if there is one.

    DriverError if there are other GPUs than Tegra's own, or if no list names a node.
    """
    gpus = answer.gpus if answer else ()
    if len(gpus) > 1:
        raise DriverError(
            f"This is Tegra with {len(gpus)} GPUs, and gpuhook supports only its own one",
            "Use NVIDIA's toolkit, or the driver root of only one of the GPUs",
        )
    found = list(entries(root, config.csv_mount_spec_path))
    good = [entry for entry in found if not entry.problem]
    nodes = {node.path: (node, entry) for entry in good if (node := _node(root, entry))}
    ordinary = tuple(path for path, (_, entry) in nodes.items() if not entry.capability)
    if not ordinary:
        raise DriverError(
            f"This is Tegra, and no list in {config.csv_mount_spec_path} names a device node "
            "that exists",
            "Install nvidia-l4t-init and nvidia-container-csv, or correct mount-spec-path",
        )
    refused: dict[str, None] = {}
    files = tuple(_files(root, good, config.csv_ignore, refused))
    name = gpus[0].name if gpus else "NVIDIA Tegra"
    gpu = Gpu(0, 0, "", "", name, "", "", False, (), (), ordinary)
    return NvidiaInventory(
        root=root.path,
        driver_version=answer.driver_version if answer else "",
        cuda_version=answer.cuda_version if answer else "",
        gpus=(gpu,),
        nodes=tuple(node for node, _ in nodes.values()),
        files=files,
        platform=TEGRA,
        refused=tuple(refused),
    )


def _node(root: "Rootfs", entry: ListEntry) -> DeviceNode | None:
    if entry.kind != "dev":
        return None
    try:
        real = root.own_path(entry.path)
    except (OSError, UntrustedPathError):
        return None
    return DeviceNode.of(entry.path, root.stat(real))


def _files(
    root: "Rootfs", found: list[ListEntry], ignored: "Iterable[str]", refused: dict[str, None]
) -> "Iterator[DriverFile]":
    """Yield the lists' files, folders and links, except those inside a listed folder.

    Listed paths that no container gets go to ``refused``, a sentence each.
    """
    real = {}
    for entry in found:
        if entry.kind == "dev" or (entry.kind == "sym" and is_ignored(entry.path, ignored)):
            continue
        listed = path_policy.ListedPath(root, entry.path)
        if entry.kind == "dir" and listed.real.startswith("/dev/"):
            inside = list(_links_in(root, listed.real, entry))
            yield from inside
            if inside:
                continue
        if listed.refusal:
            what = f"Tegra's list {entry.list} has {entry.path}, {listed.refusal}"
            refused[f"{what}: containers don't get it"] = None
        elif listed.real and stat.S_ISDIR(listed.mode) == (entry.kind == "dir"):
            real[entry] = listed.real
    folders = [
        DriverFile("folder", real[entry], entry.path, entry.capability)
        for entry in real
        if entry.kind == "dir"
    ]
    yield from folders
    release = driver_file(root, RELEASE)
    files = [release] if release else []
    for entry, path in real.items():
        if entry.kind != "dir":
            file = driver_file(root, path, entry.capability)
            files += _links(root, entry) if entry.kind == "sym" else []
            files += [file] if file else []
    covered = tuple(f"{folder.target}/" for folder in folders)
    for file in files:
        place = file.path if file.kind == "link" else file.target
        if not place.startswith(covered):
            yield file


def _links_in(root: "Rootfs", folder: str, entry: ListEntry) -> "Iterator[DriverFile]":
    """Yield the links in a folder of /dev, which udev makes and programs use to find nodes."""
    for name in root.list_folder(folder):
        content = read_link(root.folder(folder), name)
        if content is not None:
            yield DriverFile("link", f"{folder}/{name}", content, entry.capability)


def _links(root: "Rootfs", entry: ListEntry) -> "Iterator[DriverFile]":
    """Yield every link from a path to its final target, unchanged."""
    path = entry.path
    for _ in range(_MOST_LINKS):
        folder, name = root.real_path(os.path.dirname(path)), os.path.basename(path)
        content = read_link(root.folder(folder), name)
        if content is None:
            return
        place = f"{folder.rstrip('/')}/{name}"
        yield DriverFile("link", place, content, entry.capability)
        path = os.path.join(folder, content.rstrip("/"))
