"""Shared parts of simulators: major numbers that no driver uses, and a library without code."""

import os
from types import SimpleNamespace

import pytest

from gpuhook.base.errors import SimulateError
from gpuhook.base.loader import elf
from gpuhook_simulate.library import shared_library
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices

DEVICES = "Character devices:\n  1 mem\n511 x\n509 y\n\nBlock devices:\n510 sd\n"


def test_unused_major_numbers_are_chosen() -> None:
    assert free_majors(("kfd", "accel"), DEVICES) == {"kfd": 510, "accel": 508}
    assert free_majors((), DEVICES) == {}


def test_major_numbers_of_this_machine_are_not_chosen() -> None:
    known = machines_devices()
    used = {line.split()[0] for line in known.partition("Block")[0].splitlines()[1:] if line}
    assert not used & {str(major) for major in free_majors(("a", "b", "c"), known).values()}


def test_more_drivers_than_free_major_numbers_are_refused() -> None:
    names = [f"driver{number}" for number in range(127)]
    with pytest.raises(SimulateError, match="has 126 free major numbers for 127 drivers"):
        free_majors(names, DEVICES)
    assert len(free_majors(names[1:], DEVICES)) == 126


def test_simulated_drivers_are_added_to_the_character_devices() -> None:
    assert devices_text({"kfd": 510, "mine": 8}, DEVICES) == (
        "Character devices:\n  1 mem\n511 x\n509 y\n510 kfd\n  8 mine\n\nBlock devices:\n510 sd\n"
    )


# The library without code that simulators write -----------------------------------------------


@pytest.mark.parametrize("soname", ["libx.so", "libascend_hal.so.1", "l"])
def test_a_simulated_library_has_its_soname(soname: str) -> None:
    found = elf.read(shared_library(soname))
    assert (found.bits, found.soname, found.needed) == (64, soname, ())


def test_a_library_for_an_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="vax"))
    with pytest.raises(SimulateError, match="Libraries for vax can't be simulated"):
        shared_library("libx.so")
