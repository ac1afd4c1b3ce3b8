"""The device nodes of the simulated driver, and their numbers."""

import os

from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia.machine import (
    CAP_CONFIG,
    CAP_MONITOR,
    SimulatedMachine,
    SimulatedMig,
)
from gpuhook_simulate.vendors.nvidia.options import Options

NVIDIA_MAJOR = 195
_DRM_MAJOR = 226
_MINOR_MODESET, _MINOR_CONTROL = 254, 255

# Drivers with dynamic majors.
DRIVERS = (
    "nvidia-uvm",
    "nvidia-caps",
    "nvidia-caps-imex-channels",
    "nvidia-nvswitch",
    "nvidia-fs",
    "gdrdrv",
    "infiniband",
)

# Feature -> its nodes: path, driver, minor. The features are those that a container can request.
FEATURE_NODES = {
    "gds": (("dev/nvidia-fs0", "nvidia-fs", 0),),
    "gdrcopy": (("dev/gdrdrv", "gdrdrv", 0),),
    "mofed": (
        ("dev/infiniband/uverbs0", "infiniband", 192),
        ("dev/infiniband/rdma_cm", "infiniband", 58),
    ),
    "nvswitch": (
        ("dev/nvidia-nvswitch0", "nvidia-nvswitch", 0),
        ("dev/nvidia-nvswitch1", "nvidia-nvswitch", 1),
        ("dev/nvidia-nvswitchctl", "nvidia-nvswitch", 255),
    ),
}


def used_majors(
    options: Options, machine: SimulatedMachine, majors: dict[str, int]
) -> dict[str, int]:
    """Return the majors of the drivers of this machine."""
    names = {"nvidia-uvm"}
    if machine.mig_capable:
        names.add("nvidia-caps")
    if options.imex_channels:
        names.add("nvidia-caps-imex-channels")
    for feature in options.features:
        names |= {driver for _, driver, _ in FEATURE_NODES[feature]}
    return {name: major for name, major in majors.items() if name in names}


def make_nodes(
    tree: Tree, options: Options, machine: SimulatedMachine, majors: dict[str, int]
) -> None:
    """Create the nodes of a loaded driver in /dev."""
    tree.node("dev/nvidiactl", NVIDIA_MAJOR, _MINOR_CONTROL)
    tree.node("dev/nvidia-modeset", NVIDIA_MAJOR, _MINOR_MODESET)
    tree.node("dev/nvidia-uvm", majors["nvidia-uvm"], 0)
    tree.node("dev/nvidia-uvm-tools", majors["nvidia-uvm"], 1)
    for gpu in machine.gpus:
        tree.node(f"dev/nvidia{gpu.minor}", NVIDIA_MAJOR, gpu.minor)
        if options.drm:
            _make_drm(tree, gpu.index, gpu.proc_bus_id)
    if machine.mig_capable:
        _make_caps(tree, machine, majors["nvidia-caps"])
    for channel in range(options.imex_channels):
        path = f"dev/nvidia-caps-imex-channels/channel{channel}"
        tree.node(path, majors["nvidia-caps-imex-channels"], channel)
    for feature in sorted(options.features):
        for path, driver, minor in FEATURE_NODES[feature]:
            tree.node(path, majors[driver], minor)
    if "gds" in options.features:
        tree.text("etc/cufile.json", "{}\n")


def _make_drm(tree: Tree, index: int, bus_id: str) -> None:
    tree.node(f"dev/dri/card{index}", _DRM_MAJOR, index, 0o660)
    tree.node(f"dev/dri/renderD{128 + index}", _DRM_MAJOR, 128 + index)
    tree.link(f"dev/dri/by-path/pci-{bus_id}-card", f"../card{index}")
    tree.link(f"dev/dri/by-path/pci-{bus_id}-render", f"../renderD{128 + index}")


def _make_caps(tree: Tree, machine: SimulatedMachine, major: int) -> None:
    for minor, mode in ((CAP_CONFIG, 0o400), (CAP_MONITOR, 0o444)):
        tree.node(_cap_path(minor), major, minor, mode)
    for gpu in machine.gpus:
        for mig in gpu.migs:
            make_instance(tree, mig)


def make_instance(tree: Tree, mig: SimulatedMig) -> None:
    """Create the capability nodes of a MIG device, in a tree with those of MIG as a whole."""
    major = os.major(os.stat(tree.path(_cap_path(CAP_CONFIG))).st_rdev)
    for minor in (mig.gi_cap, mig.ci_cap):
        tree.node(_cap_path(minor), major, minor, 0o444)


def instance_nodes(mig: SimulatedMig) -> tuple[str, str]:
    """Return the paths of a MIG device's capability nodes."""
    return _cap_path(mig.gi_cap), _cap_path(mig.ci_cap)


def _cap_path(minor: int) -> str:
    return f"dev/nvidia-caps/nvidia-cap{minor}"
