"""``nvidia-container-cli info`` and ``list``: the host's devices and files in its formats."""

import os
from collections.abc import Iterator

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import UntrustedPathError
from gpuhook.base.oci.jsontext import Record
from gpuhook.core.inventory.model import SOCKET
from gpuhook.vendors.nvidia.model import (
    CAPS_FOLDER,
    CONTROL_NODES,
    IMEX_FOLDER,
    Gpu,
    NvidiaInventory,
    Selection,
)
from gpuhook.vendors.nvidia.variables import FEATURES

_LABEL_WIDTH = 15
_CAPABILITIES = "/proc/driver/nvidia/capabilities"
_HEADER = "Device Index,Device Minor,Model,Brand,GPU UUID,Bus Location,Architecture"


def info(inventory: NvidiaInventory, *, csv: bool) -> str:
    """Return the text of ``info``."""
    if csv:
        rows = ["NVRM version,CUDA version", f"{inventory.driver_version},{inventory.cuda_version}"]
        rows += ["", _HEADER, *(",".join(_fields(gpu)) for gpu in inventory.gpus)]
        return "\n".join(rows) + "\n"
    lines = [
        _labelled("NVRM version", inventory.driver_version),
        _labelled("CUDA version", inventory.cuda_version),
    ]
    for gpu in inventory.gpus:
        lines.append("")
        lines += map(_labelled, _HEADER.split(","), _fields(gpu))
    return "\n".join(lines) + "\n"


def _labelled(label: str, value: str) -> str:
    return f"{label + ':':<{_LABEL_WIDTH}} {value}"


def _fields(gpu: Gpu) -> tuple[str, ...]:
    bus = gpu.pci_bus_id.lower()
    return (
        str(gpu.index), str(gpu.minor), gpu.name, gpu.brand, gpu.uuid, bus, gpu.architecture
    )  # fmt: skip


class ListSelection(Record):
    """The selection for ``list``: kinds of driver files, and the devices (None: none)."""

    kinds: tuple[str, ...]
    selection: Selection | None
    imex: tuple[int, ...] = ()
    mig: tuple[str, ...] = ()


def listing(inventory: NvidiaInventory, wanted: ListSelection) -> Iterator[str]:
    """Yield the paths, relative to the driver root, in nvidia-container-cli's order.

    Links are resolved, except for firmware, whose folder is always named /lib/firmware.
    """
    if wanted.selection is not None:
        yield from _devices(inventory, wanted.selection, with_migs=not wanted.mig)
    for channel in wanted.imex:
        yield f"{IMEX_FOLDER}/channel{channel}"
    for name in wanted.mig:
        yield from _mig_management(inventory, name)
    for kind in wanted.kinds:
        for file in inventory.files:
            if file.capability in FEATURES:  # protects: list-features
                continue
            if file.kind == kind and (kind != SOCKET or _is_there(inventory.root, file.path)):
                yield file.target if kind == "firmware" else file.path


def _is_there(root: str, socket: str) -> bool:
    try:
        with Rootfs(root) as host:
            os.close(host.open_socket(socket))
    except (OSError, UntrustedPathError):
        return False
    return True


def _devices(inventory: NvidiaInventory, selection: Selection, *, with_migs: bool) -> Iterator[str]:
    yield from (each.path for each in CONTROL_NODES if inventory.node(each.path))
    yield from (f"/dev/nvidia{gpu.minor}" for gpu in selection.gpus)
    for gpu, mig in selection.migs if with_migs else ():
        instance = f"{_CAPABILITIES}/gpu{gpu.minor}/mig/gi{mig.gi}"
        yield from (f"{instance}/access", f"{instance}/ci{mig.ci}/access")
        for cap in (mig.gi_cap, mig.ci_cap):
            if cap is not None:
                yield f"{CAPS_FOLDER}/nvidia-cap{cap}"


def _mig_management(inventory: NvidiaInventory, name: str) -> Iterator[str]:
    """Yield the paths that a container needs to configure or monitor MIG."""
    if not any(gpu.mig_enabled for gpu in inventory.gpus):
        return
    lines = inventory.mig_minors.removesuffix("\n").split("\n")
    minors = {key: minor for key, _, minor in (line.partition(" ") for line in lines) if minor}
    yield f"{_CAPABILITIES}/mig/{name}"
    if name in minors:
        yield f"{CAPS_FOLDER}/nvidia-cap{minors[name]}"
    for gpu in inventory.gpus:
        yield f"{_CAPABILITIES}/gpu{gpu.minor}"
        yield CAPS_FOLDER
        for key, minor in minors.items():
            if key.startswith(f"gpu{gpu.minor}/"):
                yield f"{CAPS_FOLDER}/nvidia-cap{minor}"
