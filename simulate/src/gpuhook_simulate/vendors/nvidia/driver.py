"""Installation of the simulated driver's files: libraries, programs, firmware, sockets."""

import os

from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia import compiler, stock

NVML_SOURCES = (
    "reach.c",
    "state.c",
    "nvml_system.c",
    "nvml_lookup.c",
    "nvml_identity.c",
    "activity.c",
    "nvml_telemetry.c",
    "nvml_compute.c",
    "nvml_processes.c",
    "nvml_links.c",
    "nvml_fields.c",
    "nvml_gpm.c",
    "nvml_events.c",
    "nvml_mig.c",
    "nvml_instances.c",
    "memory_limits.c",
    "nvml_limits.c",
    "nvml_private.c",
    "nvml_unsupported.c",
)
CUDA_SOURCES = (
    "reach.c",
    "state.c",
    "memory_limits.c",
    "cuda_system.c",
    "cuda_device.c",
    "cuda_mps.c",
    "cuda_context.c",
    "cuda_memory.c",
)

# Long enough to be replaced by any library's SONAME.
_PLACEHOLDER = "gpuhook-placeholder-for-a-soname-of-a-driver-library.so.000.000.00"


def compile_driver(folder: str, *, compat32: bool) -> None:
    """Compile the driver into ``folder``, which has generated.h and generated.c."""
    jobs = [
        *_libraries(folder),
        compiler.program(f"{folder}/nvidia-smi", "nvidia_smi.c"),
        compiler.program(f"{folder}/stand-in", "stand_in.c"),
        compiler.program(f"{folder}/gpuhook-cuda-probe", "cuda_probe.c"),
        compiler.program(f"{folder}/{stock.MPS_CONTROL}", "mps_control.c"),
        compiler.shared(f"{folder}/filler", _PLACEHOLDER, "filler.c", flags=("-nostartfiles",)),
    ]
    compiler.compile_all(jobs, folder)
    if compat32:
        _compile_filler32(folder)


def compile_libraries(folder: str) -> None:
    """Compile only our NVML and CUDA libraries, as ``compile_driver`` does."""
    compiler.compile_all(_libraries(folder), folder)


def _libraries(folder: str) -> list[compiler.CompileJob]:
    return [
        compiler.shared(f"{folder}/nvml", "libnvidia-ml.so.1", *NVML_SOURCES, "generated.c"),
        compiler.shared(f"{folder}/cuda", "libcuda.so.1", *CUDA_SOURCES, "generated.c"),
    ]


def _compile_filler32(folder: str) -> None:
    """Compile the 32-bit filler, against a stub with the 32-bit C library's name."""
    libc = f"{folder}/libc32"
    flags = ("-m32", "-nostdlib")
    compiler.compile_all([compiler.shared(libc, "libc.so.6", "filler.c", flags=flags)], folder)
    linked = (*flags, libc)
    job = compiler.shared(f"{folder}/filler32", _PLACEHOLDER, "filler.c", flags=linked)
    compiler.compile_all([job], folder)


def install_main_libraries(tree: Tree, compiled: str, version: str, library_dir: str) -> None:
    """Install our NVML and CUDA libraries into the library folder."""
    for built, path in main_libraries(version, library_dir).items():
        with open(f"{compiled}/{built}", "rb") as file:
            tree.data(path, file.read())
        name = os.path.basename(path)
        tree.link(f"{library_dir}/{name.removesuffix(version)}1", name)
    tree.link(f"{library_dir}/libcuda.so", "libcuda.so.1")


def main_libraries(version: str, library_dir: str) -> dict[str, str]:
    """Return the paths of our libraries: compiled name -> path below the root."""
    return {
        "nvml": f"{library_dir}/libnvidia-ml.so.{version}",
        "cuda": f"{library_dir}/libcuda.so.{version}",
    }


def install_stock(tree: Tree, compiled: str, version: str, library_dir: str) -> None:
    """Install the rest of the driver: other libraries, programs, configuration."""
    _install_fillers(tree, f"{compiled}/filler", version, library_dir, stock.LIBRARIES)
    tree.link(f"{library_dir}/libvdpau_nvidia.so", f"vdpau/libvdpau_nvidia.so.{version}")
    tree.link(f"{library_dir}/gbm/nvidia-drm_gbm.so", f"../libnvidia-allocator.so.{version}")
    for relative, content in stock.text_files(version, library_dir).items():
        tree.text(relative, content)
    with open(f"{compiled}/stand-in", "rb") as file:
        stand_in = file.read()
    for program in stock.PROGRAMS:
        tree.data(f"usr/bin/{program}", stand_in, 0o755)
    with open(f"{compiled}/{stock.MPS_CONTROL}", "rb") as file:
        tree.data(f"usr/bin/{stock.MPS_CONTROL}", file.read(), 0o755)


def compat32_dir(library_dir: str) -> str:
    """Return the folder of 32-bit libraries that corresponds to a library folder."""
    return "/usr/lib" if library_dir == "/usr/lib64" else "/usr/lib/i386-linux-gnu"


def install_compat32(tree: Tree, compiled: str, version: str, library_dir: str) -> None:
    """Install 32-bit libraries, which have no functions."""
    main = (stock.StockLibrary("libcuda", "1"), stock.StockLibrary("libnvidia-ml", "1"))
    folder = compat32_dir(library_dir)
    _install_fillers(tree, f"{compiled}/filler32", version, folder, (*stock.LIBRARIES, *main))


def _install_fillers(
    tree: Tree, filler: str, version: str, folder: str, libraries: tuple[stock.StockLibrary, ...]
) -> None:
    with open(filler, "rb") as file:
        content = file.read()
    for library in libraries:
        place = os.path.join(folder, library.folder).rstrip("/")
        name, soname = library.file_name(version), library.soname_of(version)
        tree.data(f"{place}/{name}", with_soname(content, soname))
        if soname != name:
            tree.link(f"{place}/{soname}", name)


def with_soname(library: bytes, soname: str) -> bytes:
    """Return the filler library with another SONAME: its string table has room for it."""
    old = _PLACEHOLDER.encode() + b"\0"
    return library.replace(old, soname.encode().ljust(len(old), b"\0"), 1)


def install_probes(tree: Tree, compiled: str) -> None:
    """Install gpuhook-cuda-probe and our nvidia-smi, unless the tree has real ones."""
    for name in ("nvidia-smi", "gpuhook-cuda-probe"):
        if not os.path.lexists(tree.path(f"usr/bin/{name}")):
            with open(f"{compiled}/{name}", "rb") as file:
                tree.data(f"usr/bin/{name}", file.read(), 0o755)


def install_firmware(tree: Tree, version: str) -> None:
    """Create the driver's GPU firmware, unless it exists."""
    folder = f"usr/lib/firmware/nvidia/{version}"
    for chip in ("ga10x", "tu10x"):
        path = f"{folder}/gsp_{chip}.bin"
        if not os.path.lexists(tree.path(path)):
            tree.data(path, b"simulated by gpuhook\n", 0o444)


def install_sockets(tree: Tree) -> None:
    """Create the sockets of the driver's daemons."""
    for daemon in ("persistenced", "fabricmanager"):
        tree.socket(f"run/nvidia-{daemon}/socket")
