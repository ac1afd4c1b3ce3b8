"""NVML's view in a process whose device cgroup denies it some of the GPUs.

NVML numbers the permitted GPUs from 0, and so do requests made there: Slurm, whose jobs are
restricted like this, writes such numbers into CUDA_VISIBLE_DEVICES. Device nodes keep their
numbers.
"""

from gpuhook.base.cgroup.answers import is_withheld
from gpuhook.vendors.nvidia.model import Gpu, Inventory, Mig, devices_of


def within_reach(inventory: Inventory) -> Inventory:
    """Return the inventory without the GPUs and MIG devices that this process may not open.

    Unchanged if it may open no GPU: then another program grants the devices.
    """
    root = inventory.root.rstrip("/")
    away = [gpu.index for gpu in inventory.gpus if is_withheld(root + gpu.path)]
    if len(away) == len(inventory.gpus):
        return inventory

    def counted(index: int) -> int:
        return index - sum(each < index for each in away)

    gpus = tuple(
        gpu.but(index=counted(gpu.index), mig=_parts(root, gpu))
        for gpu in inventory.gpus
        if gpu.index not in away
    )
    lost = tuple(map(counted, inventory.lost))
    return inventory.but(gpus=gpus, devices=tuple(devices_of(gpus)), lost=lost)


def _parts(root: str, gpu: Gpu) -> tuple[Mig, ...]:
    here = [mig for mig in gpu.mig if not any(is_withheld(root + path) for path in mig.paths)]
    return tuple(mig.but(index=number) for number, mig in enumerate(here))
