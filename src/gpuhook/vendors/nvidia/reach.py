"""NVML's view in a process whose device cgroup denies it some of the GPUs.

NVML numbers the permitted GPUs from 0, and so do requests made there: Slurm, whose jobs are
restricted like this, writes such numbers into CUDA_VISIBLE_DEVICES. Device nodes keep their
numbers.
"""

from gpuhook.base.cgroup import answers
from gpuhook.core.inventory.fingerprint import names as listed
from gpuhook.vendors.nvidia.model import CAPS_FOLDER, Gpu, Mig, NvidiaInventory, devices_of

_GPU = "nvidia"  # a number follows


def withheld(root: str) -> list[str]:
    """Return the nodes below a driver root, of GPUs and capabilities, that it may not open."""
    below = root.rstrip("/")
    nodes = [name for name in listed(f"{below}/dev") if name.startswith(_GPU)]
    paths = [f"/dev/{name}" for name in nodes if name.removeprefix(_GPU).isdecimal()]
    paths += [f"{CAPS_FOLDER}/{name}" for name in listed(below + CAPS_FOLDER)]
    return [path for path in paths if answers.is_withheld(below + path)]


def within_reach(inventory: NvidiaInventory) -> NvidiaInventory:
    """Return the inventory without the GPUs and MIG devices that this process may not open.

    Unchanged if it may open no GPU: then another program grants the devices.
    """
    root = inventory.root.rstrip("/")
    away = [gpu.index for gpu in inventory.gpus if answers.is_withheld(root + gpu.path)]
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
    here = [
        mig for mig in gpu.mig if not any(answers.is_withheld(root + path) for path in mig.paths)
    ]
    return tuple(mig.but(index=number) for number, mig in enumerate(here))
