"""Roots of NVIDIA's other platforms: WSL2 and Tegra, of files and nodes alone.

Beside what is meant to be found there are decoys: an older driver and another maker's in Windows'
driver store; in Tegra's lists lines that are none, and names of what isn't there.
"""

import os
import tempfile

from gpuhook.simulate.majors import devices_text, free_majors, machines_devices
from gpuhook.simulate.tree import Tree
from gpuhook.vendors.nvidia.simulate import driver
from gpuhook.vendors.nvidia.simulate.machine import Machine
from gpuhook.vendors.nvidia.simulate.options import Options
from gpuhook.vendors.nvidia.simulate.tables import generated_header, generated_source

_STORES = "/usr/lib/wsl/drivers"
_STORE = f"{_STORES}/nv_dispi.inf_amd64_5e5e0d4b7c1f2a90"
_OLDER = f"{_STORES}/nv_dispi.inf_amd64_ffb3c6a8d2e41770"
_OTHERS = f"{_STORES}/iigd_dch.inf_amd64_0a9b8c7d6e5f4031"
LIBRARY_DIRS = {"wsl": _STORE}
_DXG_MINOR = 127
_OLD = 1_500_000_000  # seconds: when the older driver was made

# Libraries of the store with nothing in them -> SONAME.
_FILLERS = {
    "libcuda_loader.so": "libcuda_loader.so",
    "libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml_loader.so": "libnvidia-ml_loader.so",
    "libnvdxgdmal.so.1": "libnvdxgdmal.so.1",
    "libnvoptix.so.1": "libnvoptix.so.1",
}


def fill(tree: Tree, options: Options, machine: Machine, library_dir: str) -> None:
    """Write the platform's files into a tree."""
    with tempfile.TemporaryDirectory(dir=tree.root) as compiled:
        node = "/dev/dxg" if options.platform == "wsl" else ""
        header = generated_header(machine, options.failure, library_dir, node)
        Tree(compiled).text("generated.h", header)
        Tree(compiled).text("generated.c", generated_source(machine))
        driver.compile_driver(compiled, compat32=False)
        _fill_wsl(tree, compiled)


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
