"""The device nodes of the simulated driver and the numbers they get."""

from gpuhook.simulate.machine import CAP_CONFIG, CAP_MONITOR, Machine
from gpuhook.simulate.tree import Tree

NVIDIA_MAJOR = 195
DRM_MAJOR = 226
_MINOR_MODESET, _MINOR_CONTROL = 254, 255
_DYNAMIC_MAJORS = range(511, 383, -1)  # Documentation/admin-guide/devices.txt


def free_majors(proc_devices: str, count: int) -> list[int]:
    """Return character majors that no driver in the text of /proc/devices uses."""
    used = set()
    for line in proc_devices.partition("Block devices:")[0].splitlines():
        number = line.split()[:1]
        if number and number[0].isdecimal():
            used.add(int(number[0]))
    return [major for major in _DYNAMIC_MAJORS if major not in used][:count]


def host_majors() -> tuple[int, int]:
    """Return majors for nvidia-uvm and nvidia-caps that mean nothing else on this machine."""
    with open("/proc/devices", encoding="ascii") as file:
        uvm, caps = free_majors(file.read(), 2)
    return uvm, caps


def make_nodes(tree: Tree, machine: Machine, majors: tuple[int, int], drm: bool) -> None:
    """Make what the loaded driver has in /dev."""
    uvm, caps = majors
    tree.node("dev/nvidiactl", NVIDIA_MAJOR, _MINOR_CONTROL)
    tree.node("dev/nvidia-modeset", NVIDIA_MAJOR, _MINOR_MODESET)
    tree.node("dev/nvidia-uvm", uvm, 0)
    tree.node("dev/nvidia-uvm-tools", uvm, 1)
    for gpu in machine.gpus:
        tree.node(f"dev/nvidia{gpu.minor}", NVIDIA_MAJOR, gpu.minor)
        if drm:
            _make_drm(tree, gpu.index, gpu.proc_bus_id)
    if machine.mig_capable:
        _make_caps(tree, machine, caps)


def _make_drm(tree: Tree, index: int, bus_id: str) -> None:
    tree.node(f"dev/dri/card{index}", DRM_MAJOR, index, 0o660)
    tree.node(f"dev/dri/renderD{128 + index}", DRM_MAJOR, 128 + index)
    tree.link(f"dev/dri/by-path/pci-{bus_id}-card", f"../card{index}")
    tree.link(f"dev/dri/by-path/pci-{bus_id}-render", f"../renderD{128 + index}")


def _make_caps(tree: Tree, machine: Machine, major: int) -> None:
    minors = {CAP_CONFIG: 0o400, CAP_MONITOR: 0o444}
    for gpu in machine.gpus:
        for mig in gpu.migs:
            minors[mig.gi_cap] = minors[mig.ci_cap] = 0o444
    for minor, mode in minors.items():
        tree.node(f"dev/nvidia-caps/nvidia-cap{minor}", major, minor, mode)
