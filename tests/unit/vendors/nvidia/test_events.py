"""Which devices an event is about, and GPUs that are lost as they were known before."""

from typing import Any

import pytest
from machines import gpu, mig

from gpuhook.start.inventory.model import Node
from gpuhook.tools.vendors.nvidia import events
from gpuhook.vendors.nvidia.model import Gpu, Inventory

MIGS = (mig(0, 1, 12, 13), mig(1, 2, 21, 22))


def inventory(*gpus: Gpu, lost: tuple[int, ...] = (), platform: str = "") -> Inventory:
    nodes = tuple(Node(each.path, 195, each.minor) for each in gpus)
    return Inventory("/", "580.65.06", "13.0", gpus, nodes, (), lost, "", platform)


@pytest.mark.parametrize(
    ("event", "labels"),
    [
        ({}, ["1"]),
        ({"gi": 1, "ci": 0}, ["1:0"]),
        ({"gi": 2, "ci": 0}, ["1:1"]),
        ({"gi": 2}, ["1:1"]),
        ({"gi": 2, "ci": 1}, []),
        ({"gi": 3, "ci": 0}, []),
        ({"gpu": "GPU-of-before"}, []),
        ({"gpu": ""}, []),
    ],
)
def test_what_an_event_is_about(event: dict[str, Any], labels: list[str]) -> None:
    here = inventory(gpu(0, 0), gpu(1, 1, MIGS))
    found = events.concerned(here, {"xid": 79, "gpu": gpu(1, 1).uuid, **event})
    assert [device.label for device in found] == labels


def test_where_there_is_something_to_listen_to() -> None:
    assert events.can_listen(inventory(gpu(0, 0)))
    assert not events.can_listen(inventory())
    assert not events.can_listen(inventory(gpu(0, 0), platform="wsl"))


def test_a_lost_gpu_is_remembered_with_its_instances() -> None:
    before = inventory(gpu(0, 0), gpu(1, 1, MIGS), gpu(2, 2))
    now = inventory(gpu(0, 0), gpu(2, 2), lost=(1,))
    found = now.remembering(before)
    assert (found.gpus, found.devices, found.lost) == (before.gpus, before.devices, ())
    assert set(found.nodes) == set(before.nodes)
    assert now.remembering(now) == now
    assert before.remembering(now) == before


def test_no_gpu_is_remembered_that_is_only_gone() -> None:
    before = inventory(gpu(0, 0), gpu(1, 1))
    now = inventory(gpu(0, 0))
    assert now.remembering(before) == now
    other = inventory(gpu(1, 1), lost=(0, 2))
    assert other.remembering(inventory(gpu(0, 0))).lost == (2,)
