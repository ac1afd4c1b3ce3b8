"""Discovery of a host's NVIDIA devices and driver (below a driver root): the inventory.

The order matters: NVML reports the driver's version, which determines the files that belong to
the driver. WSL2 and Tegra have modules of their own.
"""

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, NoDriverError, listed
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.vendors.nvidia import (  # fmt: skip
    device_nodes,
    driver_files,
    kernel_modules,
    names,
    nvml,
    tegra,
    wsl,
)
from gpuhook.vendors.nvidia.locations import Locations
from gpuhook.vendors.nvidia.model import (
    CAPS_FOLDER,
    CONTROL_NODES,
    IMEX_FOLDER,
    Gpu,
    Mig,
    NvidiaInventory,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.base.config.model import Config

MIG_MINORS = "/proc/driver/nvidia-caps/mig-minors"
_SMALL_FILE = 1 << 20


def discover(config: "Config") -> NvidiaInventory:
    """Return the inventory of the configured driver root; DriverError if there's no driver."""
    path = config.driver_root_of(names.NAME)
    try:
        root = Rootfs(path)
    except OSError as error:
        kind = NoDriverError if isinstance(error, FileNotFoundError) else DriverError
        raise kind(
            f"The driver root {path} can't be opened: {error.strerror}",
            f"Start the driver container, or correct [nvidia-container-cli] root in {config.file}",
        ) from None
    with root:
        return _discover(root, config)


def library(config: "Config") -> str:
    """Return the path of NVML's library below the driver root; NoDriverError if there's none."""
    with Rootfs(config.driver_root_of(names.NAME)) as root:
        index = driver_files.LibraryIndex(root, config.ldcache, config.library_search_paths)
        return driver_files.find_nvml(root, index, config.file)


def _discover(root: Rootfs, config: "Config") -> NvidiaInventory:
    if wsl.is_here(root):
        return wsl.discover(root, config)
    index = driver_files.LibraryIndex(root, config.ldcache, config.library_search_paths)
    try:
        library = driver_files.find_nvml(root, index, config.file)
    except NoDriverError:
        if tegra.is_here(root):
            return tegra.discover(root, config)
        raise
    locations = Locations(root, config)
    if config.load_kmods:
        kernel_modules.prepare(root, locations, config.environment)
    answer = nvml.ask(root.path, library, config.user, config.nvml_timeout)
    if any(map(tegra.is_own, answer.gpus)):
        return tegra.discover(root, config, answer)
    _check_minors(answer.gpus)
    caps = _mig_caps(root)
    gpus = tuple(_completed(root, gpu, caps) for gpu in answer.gpus)
    return NvidiaInventory(
        root=root.path,
        driver_version=answer.driver_version,
        cuda_version=answer.cuda_version,
        gpus=gpus,
        nodes=tuple(_nodes(root, gpus)),
        files=(
            *driver_files.find_all(root, index, answer.driver_version, locations),
            *driver_files.sockets(),
        ),
        lost=answer.lost,
        mig_minors=_mig_lines(caps, gpus),
        refused=tuple(locations.refused),
    )


def _check_minors(gpus: tuple[Gpu, ...]) -> None:
    unknown = [str(gpu.index) for gpu in gpus if gpu.minor < 0]
    if unknown:
        raise DriverError(
            f"NVML can't say which device nodes the GPUs {listed(unknown)} have",
            "Make nvidia-smi work on the host first",
        )


def _nodes(root: Rootfs, gpus: tuple[Gpu, ...]) -> "Iterator[DeviceNode]":
    paths = [node.path for node in CONTROL_NODES] + [gpu.path for gpu in gpus]
    for folder in (CAPS_FOLDER, IMEX_FOLDER):
        paths += [f"{folder}/{name}" for name in root.list_folder(folder)]
    paths += [path for gpu in gpus for path in gpu.drm]
    paths += device_nodes.feature_node_paths(root)
    for path in paths:
        node = DeviceNode.of(path, root.stat(path))
        if node is not None:
            yield node


def _mig_caps(root: Rootfs) -> dict[str, int]:
    """Return the minors of nvidia-caps by what they guard: {"gpu0/gi1/access": 12, ...}."""
    data = root.read_file(MIG_MINORS, _SMALL_FILE) or b""
    caps = {}
    for line in data.decode("ascii", "replace").split("\n"):
        key, _, minor = line.strip(" ").partition(" ")
        if minor.isascii() and minor.isdecimal():
            caps[key] = int(minor)
    return caps


def _mig_lines(caps: dict[str, int], gpus: tuple[Gpu, ...]) -> str:
    """Return the lines for these GPUs: the driver always lists 32 GPUs."""
    prefixes = ("config", "monitor", *(f"gpu{gpu.minor}/" for gpu in gpus))
    return "".join(f"{key} {minor}\n" for key, minor in caps.items() if key.startswith(prefixes))


def _completed(root: Rootfs, gpu: Gpu, caps: dict[str, int]) -> Gpu:
    """Return the GPU with what NVML doesn't report: capability minors and DRM nodes."""
    mig = []
    for one in gpu.mig:
        instance = f"gpu{gpu.minor}/gi{one.gi}"
        gi_cap = caps.get(f"{instance}/access")
        ci_cap = caps.get(f"{instance}/ci{one.ci}/access")
        mig.append(Mig(one.index, one.uuid, one.gi, one.ci, one.name, gi_cap, ci_cap))
    nodes = root.list_folder(f"/sys/bus/pci/devices/{gpu.kernel_bus_id}/drm")
    drm = tuple(path for name in nodes if root.exists(path := f"/dev/dri/{name}"))
    return gpu.but(mig=tuple(mig), drm=drm)
