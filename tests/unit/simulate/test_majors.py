"""Major numbers of drivers that this machine doesn't have."""

import pytest

from gpuhook.ground.errors import SimulateError
from gpuhook_simulate.majors import devices_text, free_majors, machines_devices

DEVICES = "Character devices:\n  1 mem\n511 x\n509 y\n\nBlock devices:\n510 sd\n"


def test_majors_that_no_driver_has() -> None:
    assert free_majors(("kfd", "accel"), DEVICES) == {"kfd": 510, "accel": 508}
    assert free_majors((), DEVICES) == {}


def test_this_machines_own_are_not_given_away() -> None:
    known = machines_devices()
    used = {line.split()[0] for line in known.partition("Block")[0].splitlines()[1:] if line}
    assert not used & {str(major) for major in free_majors(("a", "b", "c"), known).values()}


def test_more_drivers_than_majors() -> None:
    names = [f"driver{number}" for number in range(127)]
    with pytest.raises(SimulateError, match="has 126 major numbers for 127 drivers"):
        free_majors(names, DEVICES)
    assert len(free_majors(names[1:], DEVICES)) == 126


def test_they_are_added_to_the_character_devices() -> None:
    assert devices_text({"kfd": 510, "mine": 8}, DEVICES) == (
        "Character devices:\n  1 mem\n511 x\n509 y\n510 kfd\n  8 mine\n\nBlock devices:\n510 sd\n"
    )
