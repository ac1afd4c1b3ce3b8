"""A simulated machine that changes while programs use it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvml_program import LIBRARY_DIR, Program

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.vendors.nvidia import SimulatedProcess, change, report_xid, run_process, state
from gpuhook_simulate.vendors.nvidia.check import skipped_lines
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine, make_machine

MakeRoot = Callable[..., tuple[Path, SimulatedMachine]]

MIGS = "[n.nvmlDeviceGetUUID(mig) for mig in migs({})]"
LIST = """
def migs(index):
    found = []
    for at in range(7):
        try:
            found.append(n.nvmlDeviceGetMigDeviceHandleByIndex(gpu(index), at))
        except n.NVMLError:
            break
    return found
"""


@pytest.fixture
def root(make_root: MakeRoot) -> Path:
    return make_root(gpus=3, mig={1: ("3g.71gb", "1g.18gb")})[0]


@pytest.fixture
def program(root: Path) -> Iterator[Program]:
    with Program(root) as program:
        program.ask(LIST)
        yield program


def set_mig(root: Path, mig: dict[int, tuple[str, ...]]) -> SimulatedMachine:
    """Replace the MIG devices of GPUs, with plain files as nodes."""
    old = state.load(str(root))
    new = replace(old, options=replace(old.options, mig=mig))
    machine = make_machine(new.options, new.driver_version)
    for gpu in machine.gpus:
        for device in gpu.migs:
            for cap in (device.gi_cap, device.ci_cap):
                (root / f"dev/nvidia-caps/nvidia-cap{cap}").touch()
    state.save(str(root), new, machine)
    return machine


def test_a_running_program_loses_a_gpu_and_finds_it_again(root: Path, program: Program) -> None:
    program.ask("first, second = gpu(0), gpu(1)")
    program.ask("mig = n.nvmlDeviceGetMigDeviceHandleByIndex(second, 0)")
    machine = change(str(root), lost=frozenset({1}))
    assert [gpu.lost for gpu in machine.gpus] == [False, True, False]
    assert program.ask("n.nvmlDeviceGetName(second)") == "error 15"
    assert program.ask("n.nvmlDeviceGetName(mig)") == "error 15"
    assert program.ask("gpu(1)") == "error 15"
    assert program.ask("n.nvmlDeviceGetName(first)") == "NVIDIA H200"
    assert program.ask("n.nvmlDeviceGetCount()") == 3
    change(str(root), found=frozenset({1}))
    assert program.ask("n.nvmlDeviceGetName(second)") == "NVIDIA H200"


def test_hand_written_lost_gpus_are_lost_by_uuid_or_number(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=3, unplugged=frozenset({0}))
    with Program(root) as program:
        (root / "simulate/lost").write_text(f"{machine.gpus[0].uuid}\n")
        assert program.ask("gpu(0)") == "error 15"
        (root / "simulate/lost").write_text("# none\n\n0\n7\n")
        assert program.ask("attempt(gpu, 0) is None or 1") == 1
        (root / "simulate/lost").write_text("2")
        assert program.ask("gpu(1)") == "error 15"  # the file counts unplugged GPUs, NVML doesn't


def test_lost_gpus_are_compiled_into_the_library_for_containers(root: Path) -> None:
    change(str(root), lost=frozenset({2}))
    (root / "simulate/lost").unlink()  # then the compiled-in list counts, as in a container
    with Program(root) as program:
        assert program.ask("n.nvmlDeviceGetName(gpu(1))") == "NVIDIA H200"
        assert program.ask("gpu(2)") == "error 15"
    for library in (root / LIBRARY_DIR.lstrip("/")).glob("lib*.so.5*"):
        assert library.stat().st_mode & 0o777 == 0o644


def test_a_running_program_sees_another_mig_layout(root: Path, program: Program) -> None:
    before = program.ask(MIGS.format(1))
    program.ask("big, small = migs(1)")
    machine = set_mig(root, {1: ("1g.18gb", "2g.35gb"), 2: ()})
    expected = [mig.uuid for mig in machine.gpus[1].migs]
    assert program.ask(MIGS.format(1)) == expected
    assert expected[0] == before[1]  # an unchanged instance keeps its UUID
    assert program.ask("n.nvmlDeviceGetUUID(small)") == before[1]
    assert program.ask("n.nvmlDeviceGetUUID(big)") == "error 2"
    assert program.ask(f"n.nvmlDeviceGetHandleByUUID({before[0]!r})") == "error 6"
    assert program.ask("[n.nvmlDeviceGetMigMode(gpu(i))[0] for i in range(3)]") == [0, 1, 1]
    set_mig(root, {1: ("3g.71gb",)})
    assert program.ask("n.nvmlDeviceGetUUID(big)") == before[0]
    assert program.ask("n.nvmlDeviceGetMigMode(gpu(2))[0]") == 0


def test_waiting_for_events_continues_across_a_mig_change(root: Path, program: Program) -> None:
    program.ask("events = n.nvmlEventSetCreate()")
    program.ask("n.nvmlDeviceRegisterEvents(gpu(1), 8, events)")
    program.begin("wait(events, 60000)")
    set_mig(root, {1: ("7g.141gb",)})
    (root / "simulate/events").write_text("1 94 0 0\n")
    assert program.answer()[1:] == [8, 94, 0, 0]


GARBAGE = [
    "1 MIG-x 1g.18gb 7 0 201 202 0", "1 {uuid} 1g.18gb 7 0 201 202",
    "1 {uuid} 1g.18gb 7 0 201 202 0 0", "1 {uuid} 1g.18gb 15 0 201 202 0",
    "1 {uuid} 1g.18gb 7 8 201 202 0", "1 {uuid} 1g.18gb 7 0 201 202 8",
    "1 {uuid} 7g.141gb 0 0 201 202 1", "1 {uuid} 9g.99gb 0 0 201 202 1", "1 " + "{uuid}" * 40,
    "9", "\x00",
]  # fmt: skip


@pytest.mark.parametrize("line", GARBAGE)
def test_malformed_mig_lines_are_ignored(root: Path, program: Program, line: str) -> None:
    uuid = "MIG-12345678-1234-1234-1234-123456789abc"
    (root / "simulate/mig").write_text(line.format(uuid=uuid) + "\n")
    assert program.ask(MIGS.format(1)) == []
    assert program.ask("n.nvmlDeviceGetMigMode(gpu(0))[0]") == 0


def test_mig_devices_never_exceed_the_profiles_maximum(root: Path, program: Program) -> None:
    """A program allocates space for the maximum number of instances that a profile reports."""
    line = "1 MIG-12345678-1234-1234-{4}-12345678900{0} {1} {2} 0 201 202 {3}"
    lines = [line.format(n, "7g.141gb", n, 0, 1111) for n in range(8)]
    (root / "simulate/mig").write_text("\n".join(lines))
    assert len(program.ask(MIGS.format(1))) == 1
    lines = [line.format(n, "1g.18gb+me", n, n, 2222) for n in range(8)]
    (root / "simulate/mig").write_text("\n".join(lines))
    assert len(program.ask(MIGS.format(1))) == 1
    lines = [line.format(n, "1g.18gb", n, n, 3333) for n in range(8)]
    (root / "simulate/mig").write_text("\n".join(lines))
    assert len(program.ask(MIGS.format(1))) == 7


@pytest.mark.parametrize("fields", [{"lost": frozenset({3})}, {"found": frozenset({9})}])
def test_changes_of_unknown_gpus_are_refused(root: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(SimulateError, match="There is no GPU"):
        change(str(root), **fields)
    assert state.load(str(root)).options.lost == frozenset()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"options": {"failure": 3}}'])
def test_a_damaged_build_record_means_no_simulated_machine(root: Path, content: str) -> None:
    (root / "simulate/built.json").write_text(content)
    with pytest.raises(SimulateError, match="has no simulated NVIDIA machine"):
        change(str(root))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["1g.18gb", "2g.35gb", "3g.71gb", "1g.18gb+me"]), max_size=4),
    st.frozensets(st.sampled_from([0, 1, 2])),
)
def test_a_saved_simulator_state_is_loaded_unchanged(
    root: Path, names: list[str], lost: frozenset[int]
) -> None:
    old = state.load(str(root))
    new = replace(old, options=replace(old.options, mig={0: tuple(names), 2: ()}, lost=lost))
    try:
        machine = make_machine(new.options)
    except SimulateError:
        return
    state.save(str(root), new, machine)
    assert state.load(str(root)) == new


# Lines that mean nothing ----------------------------------------------------------------------


@pytest.fixture
def made(make_root: MakeRoot) -> tuple[Path, SimulatedMachine]:
    return make_root(gpus=3, mig={2: ("3g.71gb", "1g.18gb")}, lost=frozenset({1}))


def test_lines_written_by_commands_are_not_skipped(made: tuple[Path, SimulatedMachine]) -> None:
    root, machine = made
    mig = machine.gpus[2].migs[0].uuid
    report_xid(str(root), 79, "0")
    report_xid(str(root), 94, mig)
    run_process(str(root), SimulatedProcess(mig, 11, kind="mps"))
    with (root / "simulate/lost").open("a") as file:
        file.write(f"# and\n\n  {machine.gpus[0].uuid.upper()}  \n")
    with (root / "simulate/activity").open("a") as file:
        file.write("12 0 accounting on\n12.5 0 end 11\n")
    assert skipped_lines(str(root), machine) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("events", "0"),
        ("events", "7 79"),
        ("events", "0 79 1"),
        ("lost", "9"),
        ("lost", "0 1"),
        ("mig", "0 MIG-x 1g.18gb 7 0 1 2 0"),
        ("activity", "now boot"),
        ("activity", "5 0 process 1 games 1 1 1 1 1"),
        ("activity", "5 7 end 1"),
        ("activity", "5 0:1 end 1"),
    ],
)
def test_skipped_lines_are_named(made: tuple[Path, SimulatedMachine], name: str, line: str) -> None:
    root, machine = made
    (root / "simulate" / name).write_text(f"# {name}\n{line}\n")
    [said] = skipped_lines(str(root), machine)
    assert f"simulate/{name}, line 2, is skipped" in said
    assert line in said


def test_reported_skipped_lines_are_limited_and_escaped(
    made: tuple[Path, SimulatedMachine],
) -> None:
    root, machine = made
    (root / "simulate/events").write_text("\x1b[31m\n" * 5000)
    said = skipped_lines(str(root), machine)
    assert len(said) == 11
    assert "\x1b" not in "".join(said)
    (root / "simulate/events").unlink()
    assert skipped_lines(str(root), machine) == []
