"""Data model of NVIDIA's GPUs, from NVML and the driver root.

Other packages see these records as devices with names (``inventory.model``); this module is for
NVIDIA's own modules.
"""

from gpuhook.base.oci.jsontext import Record
from gpuhook.core.inventory import model
from gpuhook.core.inventory.model import Device, DeviceNode, DriverFile
from gpuhook.vendors.nvidia.names import NAME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, Self


class ControlNode(Record):
    """A node of the driver that isn't a GPU's: ``module`` names its major in /proc/devices.

    ``capabilities`` are the parts of the driver that need it, () for all.
    """

    path: str
    module: str
    minor: int
    capabilities: tuple[str, ...] = ()


CONTROL = ControlNode("/dev/nvidiactl", "nvidia", 255)
UVM = ControlNode("/dev/nvidia-uvm", "nvidia-uvm", 0, ("compute", "video"))
UVM_TOOLS = ControlNode("/dev/nvidia-uvm-tools", "nvidia-uvm", 1, ("compute", "video"))
MODESET = ControlNode("/dev/nvidia-modeset", "nvidia", 254, ("display",))
CONTROL_NODES = (CONTROL, UVM, UVM_TOOLS, MODESET)
# Folders of nodes that come and go: MIG capabilities, IMEX channels.
CAPS_FOLDER = "/dev/nvidia-caps"
IMEX_FOLDER = "/dev/nvidia-caps-imex-channels"

# Kinds of files in addition to those of every vendor: a manifest, one only for 32-bit programs, a
# library path in manifests (``path``), and a path where programs search for a library.
MANIFEST, MANIFEST32, ALIAS, LINKED = "manifest", "manifest32", "alias", "linked"
KINDS32 = ("library32", MANIFEST32)

# The capability of unlisted libraries that have the driver's version: a newer driver may have more
# than the lists. A container gets them with all capabilities.
EVERYTHING = "all"

# Platforms without NVIDIA's driver for Linux, and their common names.
WSL, TEGRA = "wsl", "tegra"
TITLES = {WSL: "WSL2", TEGRA: "Tegra"}


class Mig(Record):
    """One MIG device: a compute instance (``ci``) of a GPU instance (``gi``).

    ``index`` counts within its GPU; ``gi_cap`` and ``ci_cap`` are the minors of
    /dev/nvidia-caps/nvidia-capN that guard the two instances (None if the driver
    guards them only by the files in /proc).
    """

    index: int
    uuid: str
    gi: int
    ci: int
    name: str
    gi_cap: int | None
    ci_cap: int | None

    @property
    def has_graphics(self) -> bool:
        """True if it supports graphics, by the last word of its profile's name (1g.24gb+gfx)."""
        attributes = self.name.rpartition(" ")[2].partition("+")[2]
        return "gfx" in attributes.replace("+", ".").split(".")

    @property
    def paths(self) -> tuple[str, ...]:
        """The nodes that guard it."""
        caps = (self.gi_cap, self.ci_cap)
        return tuple(f"{CAPS_FOLDER}/nvidia-cap{cap}" for cap in caps if cap is not None)


class Gpu(Record, mig=Mig):
    """One GPU as in NVML.

    ``index`` is NVML's enumeration order, ``minor`` the N of /dev/nvidiaN (they may
    differ). ``pci_bus_id`` has the 8-digit domain and upper-case hex (00000000:1B:00.0).
    ``architecture`` is the CUDA compute capability (9.0), ``drm`` the paths of its nodes
    below /dev/dri. ``nodes`` are its nodes if they aren't /dev/nvidiaN; on such platforms
    the UUID and other unknown fields are "". ``memory`` is in bytes, 0 if unknown.
    """

    index: int
    minor: int
    uuid: str
    pci_bus_id: str
    name: str
    architecture: str
    brand: str
    mig_enabled: bool
    mig: tuple[Mig, ...]
    drm: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    memory: int = 0

    @property
    def id(self) -> str:
        """The unique id on the host."""
        return self.uuid or str(self.index)

    @property
    def path(self) -> str:
        """The GPU's node."""
        return f"/dev/nvidia{self.minor}"

    @property
    def kernel_bus_id(self) -> str:
        """The bus id as in /sys and /proc: 0000:1b:00.0, and 10000:1b:00.0.

        A domain has four digits there, or more if necessary: those of Intel's VMD have five,
        those of Hyper-V up to eight.
        """
        if not self.pci_bus_id:
            return ""
        domain, _, rest = self.pci_bus_id.lower().partition(":")
        return f"{domain.lstrip('0').zfill(4)}:{rest}"


class NvidiaInventory(model.Inventory, gpus=Gpu):
    """One host's driver and GPUs.

    ``cuda_version`` is the newest CUDA that the driver supports (12.2), ``nodes`` the driver's
    existing control nodes, GPU nodes and capability nodes. ``lost`` are the indices of GPUs
    that NVML counts but can't reach any more (fallen off the bus). ``mig_minors`` are the lines
    of /proc/driver/nvidia-caps/mig-minors about these GPUs. ``platform`` is "" for
    NVIDIA's driver for Linux, else one of TITLES.
    """

    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    mig_minors: str = ""
    platform: str = ""

    def __init__(
        self,
        root: str,
        driver_version: str,
        cuda_version: str,
        gpus: tuple[Gpu, ...],
        nodes: tuple[DeviceNode, ...],
        files: tuple[DriverFile, ...],
        lost: tuple[int, ...] = (),
        mig_minors: str = "",
        platform: str = "",
        refused: tuple[str, ...] = (),
    ) -> None:
        devices = tuple(devices_of(gpus))
        super().__init__(NAME, root, driver_version, devices, nodes, (), files, lost, refused)
        self.cuda_version = cuda_version
        self.gpus = gpus
        self.mig_minors = mig_minors
        self.platform = platform

    def remembering(self, before: "Self") -> "Self":
        """Return the inventory with details of its lost GPUs from an older one."""
        here = {gpu.uuid for gpu in self.gpus}
        again = tuple(gpu for gpu in before.gpus if gpu.index in self.lost and gpu.uuid not in here)
        if not again:
            return self
        gpus = tuple(sorted((*self.gpus, *again), key=lambda gpu: gpu.index))
        there = {node.path for node in self.nodes}
        paths = {gpu.path for gpu in again}
        nodes = [node for node in before.nodes if node.path in paths - there]
        lost = tuple(index for index in self.lost if index not in {gpu.index for gpu in again})
        return self.but(
            gpus=gpus, devices=tuple(devices_of(gpus)), nodes=(*self.nodes, *nodes), lost=lost
        )

    def nodes_of(self, device: Device) -> tuple[str, ...]:
        """Return a device's nodes, including those for graphics."""
        gpu = next((each for each in self.gpus if each.id == device.id), None)
        return (*device.nodes, *gpu.drm) if gpu is not None else device.nodes

    @property
    def driver_version(self) -> str:
        """The driver's version."""
        return self.version

    def to_json(self) -> "dict[str, Any]":
        """Return the inventory's own data, without derived fields."""
        names = (
            "root", "driver_version", "cuda_version", "lost", "mig_minors", "platform", "refused",
        )  # fmt: skip
        lists = ("gpus", "nodes", "files")
        return {
            **{name: getattr(self, name) for name in names},
            **{name: [each.to_json() for each in getattr(self, name)] for name in lists},
        }

    def summary(self) -> "dict[str, Any]":
        """Return the "inventory" object of `gpuhook explain --format json`."""
        return {
            "vendor": self.vendor,
            "driver_version": self.driver_version,
            "cuda_version": self.cuda_version,
            "platform": self.platform,
            "gpus": [gpu.to_json() for gpu in self.gpus],
        }

    def sentence(self) -> str:
        """Return a short summary."""
        migs = sum(len(gpu.mig) for gpu in self.gpus)
        if self.platform:
            version = f", driver {self.driver_version}" if self.driver_version else ""
            return f"Platform {self.platform}{version}, {len(self.gpus)} GPUs"
        facts = f"Driver {self.driver_version}, CUDA {self.cuda_version}"
        return f"{facts}, {len(self.gpus)} GPUs, {migs} MIG devices"

    def facts(self) -> list[tuple[str, str]]:
        """Return further facts for display, each with its title."""
        lost = [(f"GPU {index}", "lost (fallen off the bus)") for index in self.lost]
        platform = [("Platform", self.platform)] if self.platform else []
        return [("CUDA version", self.cuda_version), *platform, *lost]

    def table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        """Return the GPUs and MIG devices as a table for display: header and rows."""
        rows: list[tuple[object, ...]] = []
        for gpu in self.gpus:
            facts = (gpu.name, gpu.architecture, gpu.pci_bus_id, gpu.uuid)
            rows.append((gpu.index, gpu.minor, *facts))
            rows += [(f"{gpu.index}:{m.index}", "", m.name, "", "", m.uuid) for m in gpu.mig]
        return ("INDEX", "MINOR", "NAME", "ARCH", "BUS ID", "UUID"), rows

    def details(self) -> "dict[str, dict[str, Any]]":
        """Return further values of devices by their ids, under the keys of docs/json.md."""
        found: dict[str, dict[str, Any]] = {}
        for gpu in self.gpus:
            minor = gpu.minor if gpu.minor >= 0 else None
            found[gpu.id] = {"minor": minor, "memory_total_bytes": gpu.memory or None}
            for mig in gpu.mig:
                profile = mig.name.rpartition("MIG ")[2]
                found[mig.uuid] = {"minor": minor, "mig_profile": profile}
        return found

    def listing(self, users: "Mapping[str, list[str]]") -> "dict[str, list[Any]]":
        """Return the GPUs for `gpuhook list --format json`, each with its ``users`` by UUID."""
        gpus = []
        for gpu in self.gpus:
            entry = {**gpu.to_json(), "containers": users[gpu.id]}
            for mig, found in zip(gpu.mig, entry["mig"], strict=True):
                found["containers"] = users[mig.uuid]
            gpus.append(entry)
        return {"gpus": gpus}


def devices_of(gpus: "Iterable[Gpu]") -> "Iterable[Device]":
    """Yield every GPU as a device, each followed by its MIG devices."""
    for gpu in gpus:
        names: dict[str, tuple[str, ...]] = {
            "index": (str(gpu.index),),
            "uuid": (gpu.uuid,) if gpu.uuid else (),
            "bus_id": (gpu.pci_bus_id,) if gpu.pci_bus_id else (),
        }
        bus_id = gpu.kernel_bus_id
        nodes = gpu.nodes or (gpu.path,)
        yield Device(gpu.id, str(gpu.index), names, nodes, bus_id, gpu.name)
        for mig in gpu.mig:
            label = f"{gpu.index}:{mig.index}"
            # The second name is from drivers before 470.
            others = (label, f"MIG-{gpu.uuid}/{mig.gi}/{mig.ci}")
            names = {"uuid": (mig.uuid,), "mig": others}
            yield Device(mig.uuid, label, names, mig.paths, bus_id, mig.name, gpu.uuid)


class Selection(Record):
    """Selected devices, as NVIDIA's records, in the request's order, without duplicates.

    ``gpus`` are the GPUs whose nodes are needed, including a MIG device's GPU. ``migs`` are
    (GPU, MIG device) pairs. ``uuids`` are the ids of the requested devices.
    """

    gpus: "tuple[Gpu, ...]" = ()
    migs: "tuple[tuple[Gpu, Mig], ...]" = ()
    uuids: tuple[str, ...] = ()


def selection(inventory: NvidiaInventory, devices: "Iterable[Device]") -> Selection:
    """Return the records of devices of an inventory."""
    by_id = {gpu.id: gpu for gpu in inventory.gpus}
    gpus: dict[str, Gpu] = {}
    migs: list[tuple[Gpu, Mig]] = []
    uuids = []
    for device in devices:
        uuids.append(device.id)
        gpu = by_id[device.parent or device.id]
        gpus.setdefault(gpu.id, gpu)
        if device.parent:
            migs.append((gpu, next(mig for mig in gpu.mig if mig.uuid == device.id)))
    return Selection(tuple(gpus.values()), tuple(migs), tuple(uuids))
