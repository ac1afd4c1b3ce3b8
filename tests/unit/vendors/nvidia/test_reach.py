"""GPUs of a process whose device cgroup denies some of them, numbered as NVML does there."""

import os

import pytest
from machines import gpu, machine, mig

from gpuhook.base.cgroup import answers
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.vendor import VENDOR

MIGS = (mig(0, 1, 12, 13), mig(1, 2, 21, 22))
MACHINE = machine(gpu(0, 2), gpu(1, 0), gpu(2, 1), gpu(3, 3, MIGS))


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the nodes that this process may not access."""
    kept: list[str] = []
    monkeypatch.setattr(os, "access", lambda path, _: path not in kept)
    monkeypatch.setattr(answers, "is_withheld", lambda path: path in kept)
    return kept


def seen(inventory: NvidiaInventory) -> dict[str, str]:
    """Return each device's label, with its node or capability."""
    found = VENDOR.within_reach(inventory)
    assert [each.id for each in found.devices if not each.parent] == [g.id for g in found.gpus]
    return {each.label: each.nodes[-1] for each in found.devices}


def test_a_process_allowed_all_or_no_gpus_keeps_the_numbers(keep: list[str]) -> None:
    assert VENDOR.within_reach(MACHINE) is MACHINE
    keep += [each.path for each in MACHINE.gpus]
    assert VENDOR.within_reach(MACHINE) is MACHINE  # another program provides the requested GPUs


@pytest.mark.protects(
    "counted-here",
    "device numbers in a job count only the job's devices",
    instead="return inventory",
)
def test_only_reachable_gpus_are_counted(keep: list[str]) -> None:
    keep += ["/dev/nvidia2", "/dev/nvidia1"]
    assert seen(MACHINE) == {
        "0": "/dev/nvidia0",
        "1": "/dev/nvidia3",
        "1:0": "/dev/nvidia-caps/nvidia-cap13",
        "1:1": "/dev/nvidia-caps/nvidia-cap22",
    }


@pytest.mark.protects(
    "counted-here",
    "device numbers in a job count only the job's devices",
    instead="return inventory",
)
def test_only_reachable_mig_devices_are_counted(keep: list[str]) -> None:
    keep.append("/dev/nvidia-caps/nvidia-cap12")
    assert seen(MACHINE)["3:0"] == "/dev/nvidia-caps/nvidia-cap22"
    assert "3:1" not in seen(MACHINE)


def test_a_lost_gpu_keeps_its_place_among_reachable_gpus(keep: list[str]) -> None:
    inventory = machine(gpu(0, 2), gpu(1, 0), gpu(3, 3)).but(lost=(2,))
    keep.append("/dev/nvidia0")
    assert seen(inventory) == {"0": "/dev/nvidia2", "2": "/dev/nvidia3"}
    assert VENDOR.within_reach(inventory).lost == (1,)


def test_gpus_denied_only_by_file_permissions_are_still_counted(
    keep: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep.append("/dev/nvidia2")
    monkeypatch.setattr(answers, "is_withheld", lambda _: False)
    assert seen(MACHINE)["0"] == "/dev/nvidia2"
