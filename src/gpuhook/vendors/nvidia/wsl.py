"""WSL2: the driver belongs to Windows, which provides one node and folders of libraries.

Nothing is opened and dxcore isn't loaded, which could identify the running driver's folder in
Windows' driver store. Instead, the folder with CUDA's library is used; of several, the one with
the newest library.
"""

from gpuhook.base.errors import NoDriverError
from gpuhook.core.inventory.model import DeviceNode, DriverFile
from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.driver_files import driver_file
from gpuhook.vendors.nvidia.model import WSL, Gpu, NvidiaInventory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs

NODE = "/dev/dxg"
LIBRARIES = "/usr/lib/wsl/lib"
STORES = "/usr/lib/wsl/drivers"
DXCORE = f"{LIBRARIES}/libdxcore.so"
CUDA = "libcuda.so.1.1"
SMI = "nvidia-smi"
# The expected content of a store with NVIDIA's driver for Windows.
PARTS = (
    CUDA, "libcuda_loader.so", "libnvidia-ptxjitcompiler.so.1", "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so", "libnvdxgdmal.so.1", "nvcubins.bin", SMI,
)  # fmt: skip
_NVML = "libnvidia-ml.so.1"
_ENDINGS = (".so", ".bin", ".dll")
# Without NVML, the GPUs are unknown: Windows provides whichever it has.
_UNKNOWN = Gpu(0, 0, "", "", "NVIDIA GPU of WSL2", "", "", False, (), (), (NODE,))


def is_here(root: "Rootfs") -> bool:
    """Tell whether WSL2's node exists, and the library for it."""
    return DeviceNode.of(NODE, root.stat(NODE)) is not None and root.exists(DXCORE)


def stores(root: "Rootfs") -> list[str]:
    """Return the folders with NVIDIA's driver, the one with the newest CUDA first."""
    found = []
    for name in root.list_folder(STORES):
        status = root.stat(f"{STORES}/{name}/{CUDA}")
        if status is not None:
            found.append((status.st_mtime_ns, f"{STORES}/{name}"))
    return [path for _, path in sorted(found, reverse=True)]


def discover(root: "Rootfs", config: "Config") -> NvidiaInventory:
    """Return the inventory on WSL2; NoDriverError without NVIDIA's driver, DriverError of NVML."""
    found = stores(root)
    if not found:
        raise NoDriverError(
            f"This is WSL2, and no folder in {STORES} has NVIDIA's {CUDA}",
            "Install NVIDIA's driver for Windows, and run wsl --shutdown there",
        )
    store, node = found[0], DeviceNode.of(NODE, root.stat(NODE))
    answer = _ask(root, store, config)
    gpus = (_UNKNOWN,) if answer is None else tuple(_on_wsl(gpu) for gpu in answer.gpus)
    return NvidiaInventory(
        root=root.path,
        driver_version=answer.driver_version if answer else "",
        cuda_version=answer.cuda_version if answer else "",
        gpus=gpus,
        nodes=() if node is None else (node,),
        files=tuple(_files(root, store)),
        lost=answer.lost if answer else (),
        platform=WSL,
    )


def _ask(root: "Rootfs", store: str, config: "Config") -> nvml.NvmlResponse | None:
    """Return NVML's answer, None without NVML."""
    for folder in (store, LIBRARIES):
        if root.exists(f"{folder}/{_NVML}"):
            library = root.real_path(f"{folder}/{_NVML}")
            return nvml.ask(root.path, library, config.user, config.nvml_timeout)
    return None


def _on_wsl(gpu: Gpu) -> Gpu:
    return gpu.but(minor=0, mig_enabled=False, mig=(), nodes=(NODE,))


def _files(root: "Rootfs", store: str) -> "Iterator[DriverFile]":
    """Yield the files for dxcore and CUDA, each with its path."""
    found = [
        f"{store}/{name}"
        for name in root.list_folder(store)
        if name == SMI or name.endswith(_ENDINGS) or ".so." in name
    ]
    for path in (DXCORE, *found):
        file = driver_file(root, path)
        if file is not None and path.endswith(f"/{SMI}"):
            yield DriverFile("binary", file.path, file.target)
        elif file is not None:
            yield file
