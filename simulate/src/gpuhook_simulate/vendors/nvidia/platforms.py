"""Roots of NVIDIA's other platforms, WSL2 and Tegra, which consist only of files and nodes.

They also contain decoys: an older driver and another vendor's driver in the Windows driver store,
and invalid lines and names of missing files in Tegra's lists.
"""

import os
import tempfile

from gpuhook_simulate.majors import devices_text, free_majors, machines_devices
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia import driver
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine
from gpuhook_simulate.vendors.nvidia.options import Options
from gpuhook_simulate.vendors.nvidia.tables import generated_header, generated_source

_STORES = "/usr/lib/wsl/drivers"
_STORE = f"{_STORES}/nv_dispi.inf_amd64_5e5e0d4b7c1f2a90"
_OLDER = f"{_STORES}/nv_dispi.inf_amd64_ffb3c6a8d2e41770"
_OTHERS = f"{_STORES}/iigd_dch.inf_amd64_0a9b8c7d6e5f4031"
LIBRARY_DIRS = {"wsl": _STORE, "tegra": f"/usr/lib/{os.uname().machine}-linux-gnu/nvidia"}
# The node that the simulated libraries need in order to work.
NODES = {"wsl": "/dev/dxg", "tegra": "/dev/nvhost-gpu"}
_DXG_MINOR = 127
_OLD = 1_500_000_000  # modification time of the older driver, in seconds since 1970

# Empty libraries in the driver store -> SONAME.
_FILLERS = {
    "libcuda_loader.so": "libcuda_loader.so",
    "libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml_loader.so": "libnvidia-ml_loader.so",
    "libnvdxgdmal.so.1": "libnvdxgdmal.so.1",
    "libnvoptix.so.1": "libnvoptix.so.1",
}


def fill(tree: Tree, options: Options, machine: SimulatedMachine, library_dir: str) -> None:
    """Write the platform's files into a tree."""
    with tempfile.TemporaryDirectory(dir=tree.root) as compiled:
        node = NODES[options.platform]
        header = generated_header(machine, options.failure, library_dir, node)
        Tree(compiled).text("generated.h", header)
        Tree(compiled).text("generated.c", generated_source(machine))
        driver.compile_driver(compiled, compat32=False)
        if options.platform == "wsl":
            _fill_wsl(tree, compiled)
        else:
            _fill_tegra(tree, compiled, library_dir)


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _fill_wsl(tree: Tree, compiled: str) -> None:
    known = machines_devices()
    major = free_majors(("dxgkrnl",), known)["dxgkrnl"]
    tree.node("dev/dxg", major, _DXG_MINOR)
    tree.text("proc/devices", devices_text({"dxgkrnl": major}, known), 0o444)
    filler = _bytes(f"{compiled}/filler")
    built = {name: driver.with_soname(filler, soname) for name, soname in _FILLERS.items()}
    built["libcuda.so.1.1"] = _bytes(f"{compiled}/cuda")
    built["libnvidia-ml.so.1"] = _bytes(f"{compiled}/nvml")
    for store in (_STORE, _OLDER):
        for name, data in built.items():
            tree.data(f"{store}/{name}", data, 0o555)
        tree.data(f"{store}/nvidia-smi", _bytes(f"{compiled}/nvidia-smi"), 0o555)
        tree.text(f"{store}/nvcubins.bin", "simulated by gpuhook\n", 0o444)
        tree.text(f"{store}/nvdispi.inf", "of Windows alone\n", 0o444)
    os.utime(tree.path(f"{_OLDER}/libcuda.so.1.1"), (_OLD, _OLD))
    tree.data(f"{_OTHERS}/libigdgmm_w.so.12", filler, 0o555)
    shown = "usr/lib/wsl/lib"
    tree.data(f"{shown}/libdxcore.so", driver.with_soname(filler, "libdxcore.so"), 0o555)
    tree.data(f"{shown}/libd3d12.so", driver.with_soname(filler, "libd3d12.so"), 0o555)
    tree.data(f"{shown}/libnvidia-ml.so.1", _bytes(f"{compiled}/nvml"), 0o555)
    tree.text("etc/ld.so.conf", f"/{shown}\n")


# Tegra ---------------------------------------------------------------------------------------

_LISTS = "etc/nvidia-container-runtime/host-files-for-container.d"
_VIDEO = 44
# Node -> its mode, as in L4T's udev rules; only their group may open nodes with 0660.
_TEGRA_NODES = {
    "dev/nvhost-gpu": 0o660,
    "dev/nvmap": 0o660,
    "dev/nvhost-ctrl-gpu": 0o666,
    "dev/nvgpu/igpu0/ctrl": 0o666,
    "dev/dri/card0": 0o660,
    "dev/dri/renderD128": 0o666,
    "dev/nvhost-other": 0o666,
}
_RELEASE = "# R36 (release), REVISION: 4.0, GCID: 0, BOARD: simulated\n"


def _fill_tegra(tree: Tree, compiled: str, library_dir: str) -> None:
    known = machines_devices()
    major = free_majors(("nvhost",), known)["nvhost"]
    for minor, (path, mode) in enumerate(_TEGRA_NODES.items()):
        tree.node(path, major, minor, mode, _VIDEO if mode == 0o660 else 0)
    tree.link("dev/dri/by-path/platform-13e00000.host1x-card", "../card0")
    tree.text("proc/devices", devices_text({"nvhost": major}, known), 0o444)
    tree.text("etc/nv_tegra_release", _RELEASE)
    tree.text("sys/devices/soc0/family", "Tegra\n", 0o444)
    filler = _bytes(f"{compiled}/filler")
    fillers = {"libnvrm_gpu.so": filler, "libcudnn.so.9": filler}
    libraries = {"libcuda.so.1.1": _bytes(f"{compiled}/cuda"), **fillers}
    for name, data in libraries.items():
        kept = driver.with_soname(data, name) if data is filler else data
        tree.data(f"{library_dir}/{name}", kept)
    tree.link(f"{library_dir}/libcuda.so", "libcuda.so.1.1")
    tree.link("usr/lib/libcuda.so", f"{library_dir.removeprefix('/usr/lib/')}/libcuda.so")
    tree.text("usr/share/nvpmodel/one.conf", "simulated by gpuhook\n")
    tree.text("etc/nvpmodel.conf", "simulated by gpuhook\n")
    for name, lines in _tegra_lists(library_dir).items():
        tree.text(f"{_LISTS}/{name}", "".join(f"{line}\n" for line in lines))
    tree.text("etc/ld.so.conf", f"{library_dir}\n")


def _tegra_lists(folder: str) -> dict[str, list[str]]:
    """Return the lists' lines: valid ones, invalid ones, and names of missing files."""
    nodes = [f"dev, /{path}" for path in _TEGRA_NODES if "other" not in path and "dri" not in path]
    drawing = ["dev, /dev/dri/card*", "dev, /dev/dri/renderD*", "dir, /dev/dri/by-path"]
    return {
        "devices.csv": [
            *nodes,
            *drawing,
            "dev, /dev/nvhost-absent",
            "",
            "# other boards",
            "dev /dev/nvmap",
        ],
        "drivers.csv": [
            f"lib, {folder}/libcuda.so.1.1",
            f"lib,{folder}/libnvrm_gpu.so",
            "lib , /etc/nvpmodel.conf",
            "dir, /usr/share/nvpmodel",
            "sym, /usr/lib/libcuda.so",
            "lib, /usr/lib/../../etc/shadow",
            "block, /dev/nvme0",
            f"lib, {folder}/libabsent.so",
        ],
        "cudnn.csv": [f"lib, {folder}/libcudnn.so.9", "dev, /dev/nvhost-other"],
        ".csv": ["dev, /dev/zero"],
        "read.me": ["dev, /dev/zero"],
    }
