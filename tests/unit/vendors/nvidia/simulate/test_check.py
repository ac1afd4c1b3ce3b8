"""Lines of the state folder that mean nothing are named to the person who wrote them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuhook_simulate.vendors.nvidia import Process, report_xid, run_process
from gpuhook_simulate.vendors.nvidia.check import skipped_lines
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine

MakeRoot = Callable[..., tuple[Path, SimulatedMachine]]


@pytest.fixture
def made(make_root: MakeRoot) -> tuple[Path, SimulatedMachine]:
    return make_root(gpus=3, mig={2: ("3g.71gb", "1g.18gb")}, lost=frozenset({1}))


def test_what_commands_write_is_fine(made: tuple[Path, SimulatedMachine]) -> None:
    root, machine = made
    mig = machine.gpus[2].migs[0].uuid
    report_xid(str(root), 79, "0")
    report_xid(str(root), 94, mig)
    run_process(str(root), Process(mig, 11, kind="mps"))
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


def test_not_all_are_named(made: tuple[Path, SimulatedMachine]) -> None:
    root, machine = made
    (root / "simulate/events").write_text("\x1b[31m\n" * 5000)
    said = skipped_lines(str(root), machine)
    assert len(said) == 11
    assert "\x1b" not in "".join(said)
    (root / "simulate/events").unlink()
    assert skipped_lines(str(root), machine) == []
