"""Events of simulated GPUs: XIDs that come while programs wait for them."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nvml_program import Program

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.vendors.nvidia import change, report_xid
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine

MakeRoot = Callable[..., tuple[Path, SimulatedMachine]]

WHOLE = 0xFFFFFFFF
XID = 8
PATIENCE = 300_000  # milliseconds that a test waits for an expected event
REGISTER = "n.nvmlDeviceRegisterEvents(gpu({}), 8, events)"


@pytest.fixture
def root(make_root: MakeRoot) -> Path:
    return make_root(gpus=3, mig={2: ("3g.71gb", "1g.18gb")})[0]


@pytest.fixture
def program(root: Path) -> Iterator[Program]:
    """A program with an event set ``events`` that has GPUs 0 and 2."""
    with Program(root) as program:
        program.ask("events = n.nvmlEventSetCreate()")
        program.ask(REGISTER.format(0))
        program.ask(REGISTER.format(2))
        yield program


def uuid(program: Program, index: int) -> str:
    return str(program.ask(f"n.nvmlDeviceGetUUID(gpu({index}))"))


def wait_until_it_sleeps(program: Program) -> None:
    end = time.monotonic() + PATIENCE / 1000
    while not program.is_sleeping():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_event_wakes_a_waiting_program(root: Path, program: Program) -> None:
    first = uuid(program, 0)
    program.begin(f"wait(events, {PATIENCE})")
    wait_until_it_sleeps(program)
    report_xid(str(root), 79, "0")
    assert program.answer() == [first, XID, 79, WHOLE, WHOLE]


def test_every_set_gets_every_event_since_its_registration(root: Path, program: Program) -> None:
    report_xid(str(root), 31, "0")
    with Program(root) as later:
        later.ask("events = n.nvmlEventSetCreate()")
        later.ask(REGISTER.format(0))
        report_xid(str(root), 48, "0")
        assert later.ask("wait(events, 0)")[2] == 48
        assert later.ask("wait(events, 0)") == "error 10"
    assert program.ask("[wait(events, 0)[2] for _ in range(2)]") == [31, 48]
    assert program.ask("wait(events, 0)") == "error 10"


def test_events_before_a_gpus_registration_are_not_delivered(root: Path, program: Program) -> None:
    report_xid(str(root), 13, "1")
    program.ask(REGISTER.format(1))
    report_xid(str(root), 62, "1")
    assert program.ask("wait(events, 0)")[2] == 62


def test_an_event_of_a_mig_device_names_its_instance(root: Path, program: Program) -> None:
    mig = program.ask("n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(gpu(2), 1))")
    third = uuid(program, 2)
    report_xid(str(root), 94, mig)
    report_xid(str(root), 95, third)
    assert program.ask("wait(events, 0)") == [third, XID, 94, 7, 0]
    assert program.ask("wait(events, 0)") == [third, XID, 95, WHOLE, WHOLE]


def test_waiting_uses_no_processor_time_and_times_out(program: Program) -> None:
    before = program.processor_ticks()
    started = time.monotonic()
    assert program.ask("wait(events, 700)") == "error 10"
    assert time.monotonic() - started >= 0.7
    assert program.processor_ticks() - before <= 0.2 * os.sysconf("SC_CLK_TCK")


def test_changes_that_are_not_events_do_not_end_a_wait(root: Path, program: Program) -> None:
    started = time.monotonic()
    program.begin("wait(events, 1000)")
    wait_until_it_sleeps(program)
    report_xid(str(root), 79, "1")  # isn't registered
    change(str(root), lost=frozenset({1}))
    assert program.answer() == "error 10"
    assert time.monotonic() - started >= 1


def test_a_lost_gpu_ends_the_wait_after_earlier_events(root: Path, program: Program) -> None:
    program.begin(f"[wait(events, {PATIENCE}), wait(events, {PATIENCE})]")
    wait_until_it_sleeps(program)
    report_xid(str(root), 79, "0")
    change(str(root), lost=frozenset({0}))
    event, then = program.answer()
    assert (event[2], then) == (79, "error 15")
    change(str(root), found=frozenset({0}))
    assert program.ask("wait(events, 0)") == "error 10"


def test_a_replaced_event_file_is_read_from_its_beginning(root: Path, program: Program) -> None:
    events = root / "simulate/events"
    report_xid(str(root), 1, "0")
    assert program.ask("wait(events, 0)")[2] == 1
    events.write_text("0 2\n")  # not longer, so only a program that looks right now would see it
    (root / "simulate/other").write_text("0 3\n")
    os.replace(root / "simulate/other", events)
    assert program.ask("wait(events, 0)")[2] == 3
    events.unlink()
    assert program.ask("wait(events, 0)") == "error 10"
    report_xid(str(root), 4, "0")
    assert program.ask("wait(events, 0)")[2] == 4


def test_waiting_continues_when_the_machine_is_rebuilt(root: Path, program: Program) -> None:
    program.begin(f"wait(events, {PATIENCE})")
    wait_until_it_sleeps(program)
    old = root.with_name("old")
    shutil.copytree(root, root.with_name("new"), symlinks=True)
    os.rename(root, old)
    os.rename(root.with_name("new"), root)
    shutil.rmtree(old)
    wait_until_it_sleeps(program)
    report_xid(str(root), 119, "0")
    assert program.answer()[2] == 119


def test_an_incomplete_event_line_is_not_read(root: Path, program: Program) -> None:
    with (root / "simulate/events").open("a", buffering=1) as file:
        file.write("0 7")
        file.flush()
        assert program.ask("wait(events, 0)") == "error 10"
        file.write("9\n")
        file.flush()
        assert program.ask("wait(events, 0)")[2] == 79


GARBAGE = [
    "", "# comment", "0", "0 x", "9 79", "0 99999999999999999999", "0 79 1", "0 79 1 2 3",
    "0 79 -1 0", "GPU-x 79", "x" * 5000 + " 0 79", "0 79" + " " * 300 + "1 1", "0 \x00 79",
]  # fmt: skip


def test_malformed_event_lines_are_ignored(root: Path, program: Program) -> None:
    with (root / "simulate/events").open("a") as file:
        file.writelines(f"{line}\n" for line in GARBAGE)
    assert program.ask("wait(events, 0)") == "error 10"
    report_xid(str(root), 109, "2")
    assert program.ask("wait(events, 0)")[2] == 109


def test_invalid_event_arguments_are_refused(program: Program) -> None:
    assert program.ask("n.nvmlDeviceGetSupportedEventTypes(gpu(0))") == 1 | 2 | 8
    register = "attempt(n.nvmlDeviceRegisterEvents, gpu(0), {}, {})"
    assert program.ask(register.format(0, "events")) == "error 2"
    assert program.ask(register.format(4, "events")) == "error 3"
    assert program.ask(register.format(8, "None")) == "error 2"
    assert program.ask(register.format(8, "ctypes.c_void_p(4096)")) == "error 2"
    mig = "n.nvmlDeviceGetMigDeviceHandleByIndex(gpu(2), 0)"
    assert program.ask(register.format(8, "events").replace("gpu(0)", mig)) == "error 3"
    assert program.ask("wait(ctypes.c_void_p(4096), 0)") == "error 2"
    assert program.ask("n.nvmlLib.nvmlEventSetWait_v2(events, None, 0)") == 2
    assert program.ask("n.nvmlEventSetFree(events)") is None
    assert program.ask("n.nvmlEventSetFree(events)") == "error 2"
    assert program.ask("wait(events, 0)") == "error 2"


def test_the_v1_event_structure_has_no_instance_fields(root: Path, program: Program) -> None:
    report_xid(str(root), 79, "0")
    program.ask("buffer = ctypes.create_string_buffer(b'\\xaa' * 32, 32)")
    assert program.ask("n.nvmlLib.nvmlEventSetWait(events, buffer, 0)") == 0
    assert program.ask("buffer.raw[8]") == XID
    assert program.ask("buffer.raw[16]") == 79
    assert program.ask("buffer.raw[24:].hex()") == "aa" * 8


def test_a_gpu_without_ecc_supports_only_xid_events(make_root: MakeRoot) -> None:
    with Program(make_root(models=("RTX4090",))[0]) as program:
        assert program.ask("n.nvmlDeviceGetSupportedEventTypes(gpu(0))") == XID


@pytest.mark.parametrize(
    ("xid", "device", "words"),
    [
        (79, "3", "no device '3'"),
        (79, "GPU-x", "no device 'GPU-x'"),
        (-1, "0", "-1 is not the number of an XID"),
        (1 << 32, "0", "is not the number of an XID"),
    ],
)
def test_invalid_xids_and_unknown_devices_are_refused(
    root: Path, xid: int, device: str, words: str
) -> None:
    with pytest.raises(SimulateError, match=words):
        report_xid(str(root), xid, device)
    assert (root / "simulate/events").read_text() == ""


def test_reporting_an_xid_without_a_simulated_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SimulateError, match="has no simulated NVIDIA machine"):
        report_xid(str(tmp_path), 79, "0")


def test_an_unwritable_event_file_is_an_error(root: Path) -> None:
    (root / "simulate/events").unlink()
    (root / "simulate/events").mkdir()
    with pytest.raises(SimulateError, match="can't be changed"):
        report_xid(str(root), 79, "0")
