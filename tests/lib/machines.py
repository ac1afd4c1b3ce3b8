"""Machines for tests of the pure steps: inventories built by hand."""

from typing import Any

import own

from gpuhook.base.config.model import Config
from gpuhook.core.contract import Grant
from gpuhook.core.inventory.model import DeviceNode, DriverFile
from gpuhook.core.inventory.selection import select
from gpuhook.core.plan import image
from gpuhook.core.plan.image import Image
from gpuhook.core.plan.operations import Plan
from gpuhook.core.planner import make_plan
from gpuhook.core.request.reader import Request, SpecReader
from gpuhook.vendors.nvidia import names
from gpuhook.vendors.nvidia.model import Gpu, Mig, NvidiaInventory
from gpuhook.vendors.nvidia.variables import NvidiaOptions
from gpuhook.vendors.nvidia.vendor import VENDOR

VERSION = "580.65.06"
MIG_MINORS = """config 1
monitor 2
gpu3/gi1/access 12
gpu3/gi1/ci0/access 13
gpu3/gi2/access 21
gpu3/gi2/ci0/access 22
"""


def gpu(index: int, minor: int, mig: tuple[Mig, ...] = ()) -> Gpu:
    return Gpu(
        index=index,
        minor=minor,
        uuid=f"GPU-{index:08d}-0000-0000-0000-000000000000",
        pci_bus_id=f"00000000:{0x1B + index:02X}:00.0",
        name="NVIDIA H200",
        architecture="9.0",
        brand="Nvidia",
        mig_enabled=bool(mig),
        mig=mig,
        drm=(f"/dev/dri/card{minor}", f"/dev/dri/renderD{128 + minor}"),
    )


def mig(index: int, gi: int, gi_cap: int, ci_cap: int) -> Mig:
    return Mig(index, f"MIG-{index:08d}-0000", gi, 0, "NVIDIA H200 MIG 1g.18gb", gi_cap, ci_cap)


def library(name: str, capability: str, soname: str | None, kind: str = "library") -> DriverFile:
    folder = own.FOLDER32 if kind == "library32" else own.FOLDER
    return DriverFile(kind, f"{folder}/{name}", name, capability, soname)


FILES = (
    library(f"libnvidia-ml.so.{VERSION}", "utility", "libnvidia-ml.so.1"),
    library(f"libcuda.so.{VERSION}", "compute", "libcuda.so.1"),
    library(f"libcuda.so.{VERSION}", "compute", "libcuda.so.1", "library32"),
    library(f"libnvidia-gpucomp.so.{VERSION}", "compute", f"libnvidia-gpucomp.so.{VERSION}"),
    library(f"libnvidia-allocator.so.{VERSION}", "compute", "libnvidia-allocator.so.1"),
    library(f"libnvidia-encode.so.{VERSION}", "video", "libnvidia-encode.so.1"),
    library(f"libGLX_nvidia.so.{VERSION}", "graphics", "libGLX_nvidia.so.0"),
    library(f"libnvidia-gpucomp.so.{VERSION}", "graphics", f"libnvidia-gpucomp.so.{VERSION}"),
    library(f"libnvidia-ngx.so.{VERSION}", "ngx", "libnvidia-ngx.so.1"),
    DriverFile("binary", "/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", "utility"),
    DriverFile("binary", "/usr/bin/nvidia-cuda-mps-server", "/usr/bin/x", "compute"),
    DriverFile("firmware", "/lib/firmware/nvidia/g.bin", "/lib/firmware/nvidia/g.bin", ""),
    DriverFile("ipc", "/run/nvidia-persistenced/socket", "/run/p/socket", "utility"),
    DriverFile("manifest", "/usr/share/i.json", "/etc/vulkan/icd.d/nvidia_icd.json", "graphics"),
    DriverFile("config", "/etc/cufile.json", "/etc/cufile.json", "gds"),
)


def machine(*gpus: Gpu) -> NvidiaInventory:
    nodes = [
        DeviceNode("/dev/nvidiactl", 195, 255),
        DeviceNode("/dev/nvidia-modeset", 195, 254),
        DeviceNode("/dev/nvidia-uvm", 511, 0),
        DeviceNode("/dev/nvidia-uvm-tools", 511, 1),
        DeviceNode("/dev/nvidia-fs0", 510, 0),
        DeviceNode("/dev/nvidia-caps-imex-channels/channel7", 509, 7),
    ]
    for one in gpus:
        nodes.append(DeviceNode(f"/dev/nvidia{one.minor}", 195, one.minor))
        nodes.append(DeviceNode(one.drm[0], 226, one.minor))
        nodes.append(DeviceNode(one.drm[1], 226, 128 + one.minor))
    nodes += [DeviceNode(f"/dev/nvidia-caps/nvidia-cap{n}", 508, n) for n in (1, 2, 12, 13, 21, 22)]
    return NvidiaInventory("/", VERSION, "13.0", gpus, tuple(nodes), FILES, (), MIG_MINORS)


def read_request(spec: Any, config: Config) -> Request:
    """Return a container's request for NVIDIA devices."""
    return SpecReader(spec, config).read(names, VENDOR)


def asked(*selectors: str, **options: Any) -> Request:
    """Return a request for NVIDIA devices, with these options."""
    filled = NvidiaOptions(**options)
    return Request(names.NAME, "environment", selectors, selectors=selectors, options=filled)


def granted(request: Request, inventory: NvidiaInventory) -> Grant:
    """Return a machine's grant for a request; raise an error if it can't satisfy the request."""
    devices = select(request.selectors, inventory, names, request.spaces)
    return Grant(VENDOR, request, inventory, devices)


def planned(request: Request, inventory: NvidiaInventory, what: Image | None = None) -> Plan:
    """Return the plan for a request."""
    return make_plan([granted(request, inventory)], what or image.unknown())
