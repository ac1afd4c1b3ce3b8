"""What a host has to give: GPUs, MIG devices, driver files and device numbers, as plain data.

Nothing here looks at the host; ``discover`` fills these classes in and ``planner`` reads them.
They go to JSON and back without loss, so an inventory can be saved.

They are plain classes, because importing dataclasses costs two interpreter starts.
"""

from gpuhook.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self


class Mig(Record):
    """One MIG device: a compute instance (``ci``) of a GPU instance (``gi``).

    ``index`` counts within its GPU; ``gi_cap`` and ``ci_cap`` are the minors of
    /dev/nvidia-caps/nvidia-capN that guard the two instances (None where the driver
    guards them by the files in /proc alone).
    """

    __slots__ = ("ci", "ci_cap", "gi", "gi_cap", "index", "name", "uuid")

    def __init__(
        self,
        index: int,
        uuid: str,
        gi: int,
        ci: int,
        name: str,
        gi_cap: int | None,
        ci_cap: int | None,
    ) -> None:
        self.index = index
        self.uuid = uuid
        self.gi = gi
        self.ci = ci
        self.name = name
        self.gi_cap = gi_cap
        self.ci_cap = ci_cap

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from what ``to_json`` returned; KeyError or TypeError if it is not that."""
        return cls(**data)


class Gpu(Record):
    """One GPU as NVML sees it.

    ``index`` is NVML's enumeration order, ``minor`` the N of /dev/nvidiaN (they may
    differ), ``pci_bus_id`` has the 8-digit domain and upper-case hex (00000000:1B:00.0),
    ``architecture`` is the CUDA compute capability (9.0), ``drm`` the paths of its nodes
    below /dev/dri.
    """

    __slots__ = (
        "architecture",
        "brand",
        "drm",
        "index",
        "mig",
        "mig_enabled",
        "minor",
        "name",
        "pci_bus_id",
        "uuid",
    )

    def __init__(
        self,
        index: int,
        minor: int,
        uuid: str,
        pci_bus_id: str,
        name: str,
        architecture: str,
        brand: str,
        mig_enabled: bool,
        mig: tuple[Mig, ...],
        drm: tuple[str, ...] = (),
    ) -> None:
        self.drm = drm
        self.index = index
        self.minor = minor
        self.uuid = uuid
        self.pci_bus_id = pci_bus_id
        self.name = name
        self.architecture = architecture
        self.brand = brand
        self.mig_enabled = mig_enabled
        self.mig = mig

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from what ``to_json`` returned; KeyError or TypeError if it is not that."""
        mig = tuple(Mig.from_json(item) for item in data["mig"])
        return cls(**{**data, "mig": mig, "drm": tuple(data["drm"])})

    @property
    def kernel_bus_id(self) -> str:
        """The bus id as /sys and /proc spell it (0000:1b:00.0)."""
        domain, _, rest = self.pci_bus_id.lower().partition(":")
        return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}"


class Node(Record):
    """A character device of the driver: its path below the driver root and its numbers."""

    __slots__ = ("major", "minor", "path")

    def __init__(self, path: str, major: int, minor: int) -> None:
        self.path = path
        self.major = major
        self.minor = minor

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from what ``to_json`` returned; KeyError or TypeError if it is not that."""
        return cls(**data)


class DriverFile(Record):
    """A file of the driver, found below the driver root.

    ``kind`` is one of library, library32, binary, firmware, ipc, config. ``path`` is where
    it is: absolute below the driver root, every symbolic link resolved. ``target`` is where
    it goes in a container: an absolute path, for libraries the bare file name (their folder
    is the container's choice). ``capability`` is the driver capability it belongs to (the
    empty string: always), ``soname`` a library's DT_SONAME, else None.
    """

    __slots__ = ("capability", "kind", "path", "soname", "target")

    def __init__(
        self, kind: str, path: str, target: str, capability: str, soname: str | None = None
    ) -> None:
        self.kind = kind
        self.path = path
        self.target = target
        self.capability = capability
        self.soname = soname

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from what ``to_json`` returned; KeyError or TypeError if it is not that."""
        return cls(**data)


class Inventory(Record):
    """One host's driver and GPUs.

    ``root`` is the driver root as a host path (/ or for instance /run/nvidia/driver),
    ``cuda_version`` the newest CUDA the driver serves (12.2), ``nodes`` the driver's
    control nodes, GPU nodes and capability nodes that exist, ``lost`` the indices of GPUs
    that NVML counts but can't reach any more (fallen off the bus), ``mig_minors`` the lines
    of /proc/driver/nvidia-caps/mig-minors that concern these GPUs.
    """

    __slots__ = (
        "cuda_version",
        "driver_version",
        "files",
        "gpus",
        "lost",
        "mig_minors",
        "nodes",
        "root",
    )

    def __init__(
        self,
        root: str,
        driver_version: str,
        cuda_version: str,
        gpus: tuple[Gpu, ...],
        nodes: tuple[Node, ...],
        files: tuple[DriverFile, ...],
        lost: tuple[int, ...] = (),
        mig_minors: str = "",
    ) -> None:
        self.mig_minors = mig_minors
        self.root = root
        self.lost = lost
        self.driver_version = driver_version
        self.cuda_version = cuda_version
        self.gpus = gpus
        self.nodes = nodes
        self.files = files

    @classmethod
    def from_json(cls, data: "dict[str, Any]") -> "Self":
        """Rebuild from what ``to_json`` returned; KeyError or TypeError if it is not that."""
        return cls(
            root=data["root"],
            driver_version=data["driver_version"],
            cuda_version=data["cuda_version"],
            gpus=tuple(Gpu.from_json(item) for item in data["gpus"]),
            nodes=tuple(Node.from_json(item) for item in data["nodes"]),
            files=tuple(DriverFile.from_json(item) for item in data["files"]),
            lost=tuple(data["lost"]),
            mig_minors=data["mig_minors"],
        )

    def node(self, path: str) -> Node | None:
        """Return the node with that path below the driver root, if it exists."""
        for node in self.nodes:
            if node.path == path:
                return node
        return None
