"""What NVML shows a process that a device cgroup keeps from some of the GPUs.

It counts those that the process may open from 0, and so do requests made there: Slurm, whose jobs
are kept so, writes such numbers into CUDA_VISIBLE_DEVICES. Which node is a device's stays as it is.
"""

from gpuhook.ground.cgroup.answers import is_withheld
from gpuhook.vendors.nvidia.model import Gpu, Inventory, Mig, devices_of


def within_reach(inventory: Inventory) -> Inventory:
    """Return the inventory without the GPUs and MIG devices that this process may not open.

    All of it where it may open no GPU: then somebody else gives what is asked for.
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
