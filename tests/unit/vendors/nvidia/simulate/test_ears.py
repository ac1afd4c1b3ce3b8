"""Listeners to NVML's events, on a simulated NVML: lost GPUs, drivers without events."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nvml_program import Program

from gpuhook_simulate.vendors.nvidia import change, report_xid
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine

# Runs in the program: the listener appends its lines to ``said``; an exception ends it after
# enough lines.
EARS = """
from gpuhook.monitor.vendors.nvidia import events
from gpuhook_simulate.vendors.nvidia import report_xid
events.BEAT, said = 0.1, []

class Enough(Exception):
    pass

def say(line):
    said.append(line)
    if sum("beat" in each for each in said) > beats or sum("xid" in each for each in said) >= 5:
        raise Enough

def listen(uuids):
    try:
        ears.listen(uuids)
    except Enough:
        pass

beats = 5
ears = events.EventSet(n, say)
"""
# Reports XID 31 of GPU 0 during the search for the lost GPU, and XID 45 as soon as the new event
# set exists.
MEANWHILE = """
find, register = ears._find_lost, ears._register

def find_slowly():
    found = find()
    report_xid({root!r}, 31, "0")
    return found

def register_slowly(uuids):
    made = register(uuids)
    report_xid({root!r}, 45, "0")
    return made

ears._find_lost, ears._register = find_slowly, register_slowly
"""

Made = tuple[str, list[str]]


@pytest.fixture
def made(make_root: Callable[..., tuple[Path, SimulatedMachine]]) -> Made:
    root, machine = make_root(gpus=3)
    return str(root), [gpu.uuid for gpu in machine.gpus]


@pytest.fixture
def program(made: Made) -> Iterator[Program]:
    with Program(Path(made[0])) as program:
        program.ask(EARS)
        yield program


def errors(lines: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(line["xid"], line["gpu"]) for line in lines if "xid" in line]


def lose(root: str) -> None:
    """Report XID 79 of GPU 1, and mark this GPU as lost."""
    report_xid(root, 79, "1")
    change(root, lost=frozenset({1}))


def test_no_xid_of_other_gpus_is_missed_while_one_gpu_is_lost(made: Made, program: Program) -> None:
    root, uuids = made
    program.ask(f"ears.register({uuids!r})")
    lose(root)
    program.ask(MEANWHILE.format(root=root))
    program.ask("ears.poll()")
    report_xid(root, 48, "2")
    program.ask("ears.poll()")
    lines = program.ask("said")
    assert sorted(errors(lines)) == [
        (31, uuids[0]), (45, uuids[0]), (48, uuids[2]), (79, uuids[1]),
    ]  # fmt: skip
    assert [line["lost"] for line in lines if "lost" in line] == [uuids[1]]
    watched = [line["watched"] for line in lines if "watched" in line]
    assert watched == [3, 2]


def test_no_error_is_missed_by_a_waiting_listener_while_a_gpu_is_lost(
    made: Made, program: Program
) -> None:
    root, uuids = made
    program.ask(MEANWHILE.format(root=root))
    program.ask("beats = 600")
    program.begin(f"listen({uuids!r})")
    end = time.monotonic() + 60
    while not program.is_sleeping() and time.monotonic() < end:
        time.sleep(0.01)
    lose(root)
    report_xid(root, 48, "2")
    program.answer()
    found = errors(program.ask("said"))
    # XID 45 is also reported by the first event set, which existed before the loss.
    assert found.count((45, uuids[0])) == 2
    assert {*found} == {(31, uuids[0]), (45, uuids[0]), (48, uuids[2]), (79, uuids[1])}
    assert len(found) == 5


@pytest.fixture
def without_events(made: Made) -> None:
    (Path(made[0]) / "simulate/no-events").touch()


@pytest.mark.usefixtures("without_events")
def test_a_driver_without_events_is_reported_once(made: Made, program: Program) -> None:
    uuids = made[1]
    program.ask(f"ears.register({uuids!r})")
    for _ in range(2):
        program.ask("ears.poll()")
    why = dict.fromkeys(uuids, "Not Supported")
    assert program.ask("said") == [{"watched": 0, "unwatched": why}]


@pytest.mark.usefixtures("without_events")
def test_a_listener_without_supported_events_shuts_nvml_down(made: Made, program: Program) -> None:
    program.ask(f"listen({made[1]!r})")
    first, *rest = program.ask("said")
    assert first["unwatched"] == dict.fromkeys(made[1], "Not Supported")
    assert rest == [{"beat": 1}] * 6
    assert program.ask("n.nvmlDeviceGetCount()") == "error 1"  # NVML is no longer initialized


def test_a_failed_event_set_is_retried(made: Made, program: Program) -> None:
    root, uuids = made
    program.ask("create, n.nvmlEventSetCreate = n.nvmlEventSetCreate, lambda: fail()")
    program.ask("def fail(): raise n.NVMLError(n.NVML_ERROR_UNKNOWN)")
    program.ask(f"ears.register({uuids!r})")
    program.ask("ears.poll()")
    assert set(program.ask("said[-1]")["unwatched"].values()) == {"Unknown Error"}
    program.ask("n.nvmlEventSetCreate = create")
    program.ask("ears.poll()")
    assert program.ask("said[-1]") == {"watched": 3, "unwatched": {}}
    report_xid(root, 48, "2")
    program.ask("ears.poll()")
    assert errors(program.ask("said")) == [(48, uuids[2])]


def test_unsupported_event_waits_are_reported_once(made: Made, program: Program) -> None:
    program.ask("n.nvmlEventSetWait_v2 = lambda *_: fail()")
    program.ask("def fail(): raise n.NVMLError(n.NVML_ERROR_NOT_SUPPORTED)")
    program.ask(f"ears.register({made[1]!r})")
    for _ in range(3):
        program.ask("ears.poll()")
    lines = [line for line in program.ask("said") if "watched" in line]
    assert [line["watched"] for line in lines] == [3, 0]
    assert lines[1]["unwatched"] == dict.fromkeys(made[1], "Not Supported")
