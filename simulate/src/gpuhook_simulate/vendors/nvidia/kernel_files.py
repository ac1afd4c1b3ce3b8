"""The /proc and /sys files of the loaded kernel module, as plain files below the root."""

import os

from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia.machine import (
    CAP_CONFIG,
    CAP_MONITOR,
    COMPUTE_INSTANCES,
    GPU_INSTANCES,
    SimulatedGpu,
    SimulatedMachine,
    SimulatedMig,
    cap_minor,
)

_PROC = "proc/driver/nvidia"
_FIRST_OPEN_BRANCH = 560  # the first branch that installs the open kernel module by default
_OPEN_ARCHITECTURE = 6  # Turing: the oldest that the open module supports
_MIG_MINORS_GPUS = 32

_PARAMS = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
KMallocHeapMaxSize: 0
VMallocHeapMaxSize: 0
IgnoreMMIOCheck: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
NvLinkDisable: 0
RmProfilingAdminOnly: 1
PreserveVideoMemoryAllocations: 0
EnableS0ixPowerManagement: 0
S0ixPowerManagementVideoMemoryThreshold: 256
DynamicPowerManagement: 3
DynamicPowerManagementVideoMemoryThreshold: 200
RegisterPCIDriver: 1
EnablePCIERelaxedOrderingMode: 0
EnableResizableBar: 0
EnableGpuFirmware: 18
EnableGpuFirmwareLogs: 2
EnableDbgBreakpoint: 0
OpenRmEnableUnsupportedGpus: 1
DmaRemapPeerMmio: 1
ImexChannelCount: 2048
CreateImexChannel0: 0
GrdmaPciTopoCheckOverride: 0
RegistryDwords: ""
RegistryDwordsPerDevice: ""
RmMsg: ""
GpuBlacklist: ""
TemporaryFilePath: ""
ExcludedGpus: ""
"""

_INFORMATION = """\
Model: \t\t {name}
IRQ:   \t\t {irq}
GPU UUID: \t {uuid}
Video BIOS: \t {vbios}
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {bus_id}
Device Minor: \t {minor}
GPU Firmware: \t {firmware}
GPU Excluded:\t No
"""


def make_proc(tree: Tree, machine: SimulatedMachine) -> None:
    """Write /proc/driver/nvidia."""
    tree.text(f"{_PROC}/version", version_text(machine), 0o444)
    tree.text(f"{_PROC}/params", _PARAMS, 0o444)
    tree.text(f"{_PROC}/registry", 'Binary: ""\n', 0o644)
    tree.text(f"{_PROC}/suspend", "suspend hibernate resume\n", 0o644)
    tree.folder(f"{_PROC}/warnings")
    tree.folder(f"{_PROC}/patches")
    for gpu in machine.gpus:
        _make_gpu(tree, machine, gpu)
    if machine.mig_capable:
        _make_capabilities(tree, machine)


def version_text(machine: SimulatedMachine) -> str:
    """Return /proc/driver/nvidia/version in the open or the proprietary module's form."""
    version, kind = machine.module_version, os.uname().machine
    branch = int(version.partition(".")[0])
    newest_only = all(gpu.model.architecture >= _OPEN_ARCHITECTURE for gpu in machine.gpus)
    if branch >= _FIRST_OPEN_BRANCH and newest_only:
        module = f"NVIDIA UNIX Open Kernel Module for {kind}  {version}  Release Build"
        module += "  (simulated@gpuhook)  "
    else:
        module = f"NVIDIA UNIX {kind} Kernel Module  {version}  "
    return (
        f"NVRM version: {module}Sun Jul 27 07:14:14 UTC 2025\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)\n"
    )


def _make_gpu(tree: Tree, machine: SimulatedMachine, gpu: SimulatedGpu) -> None:
    folder = f"{_PROC}/gpus/{gpu.proc_bus_id}"
    information = _INFORMATION.format(
        name=gpu.model.name,
        irq=128 + gpu.minor,
        uuid=gpu.uuid,
        vbios=gpu.model.vbios,
        bus_id=gpu.proc_bus_id,
        minor=gpu.minor,
        firmware=machine.module_version,
    )
    tree.text(f"{folder}/information", information, 0o444)
    tree.text(f"{folder}/registry", 'Binary: ""\n', 0o644)
    tree.text(f"{folder}/power", "Runtime D3 status:          Not supported\n", 0o444)


def _access(tree: Tree, folder: str, minor: int, mode: int) -> None:
    content = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
    tree.text(folder, content, mode)


def _make_capabilities(tree: Tree, machine: SimulatedMachine) -> None:
    top = f"{_PROC}/capabilities"
    _access(tree, f"{top}/mig/config", CAP_CONFIG, 0o400)
    _access(tree, f"{top}/mig/monitor", CAP_MONITOR, 0o444)
    for gpu in machine.gpus:
        if gpu.model.mig:
            tree.folder(f"{top}/gpu{gpu.minor}/mig")
        for mig in gpu.migs:
            make_instance(tree, gpu, mig)
    tree.text("proc/driver/nvidia-caps/mig-minors", mig_minors_text(), 0o444)


def instance_folder(gpu: SimulatedGpu, mig: SimulatedMig) -> str:
    """Return the folder of a MIG device's GPU instance in /proc."""
    return f"{_PROC}/capabilities/gpu{gpu.minor}/mig/gi{mig.gi}"


def make_instance(tree: Tree, gpu: SimulatedGpu, mig: SimulatedMig) -> None:
    """Write the /proc files of a MIG device."""
    instance = instance_folder(gpu, mig)
    _access(tree, f"{instance}/access", mig.gi_cap, 0o444)
    _access(tree, f"{instance}/ci{mig.ci}/access", mig.ci_cap, 0o444)


def mig_minors_text() -> str:
    """Return the driver's fixed table of capability minors, which covers 32 GPUs."""
    lines = [f"config {CAP_CONFIG}\nmonitor {CAP_MONITOR}\n"]
    for gpu in range(_MIG_MINORS_GPUS):
        for gi in range(GPU_INSTANCES):
            lines.append(f"gpu{gpu}/gi{gi}/access {cap_minor(gpu, gi)}\n")
            lines += [
                f"gpu{gpu}/gi{gi}/ci{ci}/access {cap_minor(gpu, gi, ci)}\n"
                for ci in range(COMPUTE_INSTANCES)
            ]
    return "".join(lines)


def make_sys(tree: Tree, machine: SimulatedMachine, drm: bool) -> None:
    """Write /sys/module/nvidia*, the GPUs' PCI devices, and the mount point of cgroups."""
    tree.folder("sys/fs/cgroup")
    for module in ("nvidia", "nvidia_uvm", "nvidia_modeset"):
        tree.text(f"sys/module/{module}/initstate", "live\n", 0o444)
    tree.text("sys/module/nvidia/version", f"{machine.module_version}\n", 0o444)
    for gpu in machine.gpus:
        model = gpu.model
        place = f"devices/pci{gpu.domain:04x}:{64 * gpu.numa_node:02x}/{gpu.proc_bus_id}"
        folder = f"sys/{place}"
        tree.link(f"sys/bus/pci/devices/{gpu.proc_bus_id}", f"../../../{place}")
        values = {
            "vendor": f"0x{model.pci_id & 0xFFFF:04x}",
            "device": f"0x{model.device:04x}",
            "subsystem_vendor": f"0x{model.pci_subsystem & 0xFFFF:04x}",
            "subsystem_device": f"0x{model.subsystem:04x}",
            "class": "0x030200",
            "revision": "0xa1",
            "numa_node": str(gpu.numa_node),
        }
        for name, value in values.items():
            tree.text(f"{folder}/{name}", f"{value}\n", 0o444)
        if drm:
            tree.folder(f"{folder}/drm/card{gpu.index}")
            tree.folder(f"{folder}/drm/renderD{128 + gpu.index}")
