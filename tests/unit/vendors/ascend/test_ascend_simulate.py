"""The simulator of machines with Ascend's NPUs."""

import ctypes
from pathlib import Path

import pytest
from node_files import Machine

from gpuhook.ground.errors import SimulateError
from gpuhook.vendors.ascend.discover import CHIPS
from gpuhook_simulate.vendors.ascend import CHIPS as SIMULATED


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"colour": "red"}, "has no setting 'colour'"), ({"chip": "9"}, "'9' isn't an Ascend chip")],
)
def test_what_it_refuses(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(SimulateError, match=message):
        Machine("ascend", tmp_path, 1, **settings)


@pytest.mark.parametrize("chip", SIMULATED)
def test_every_chip(tmp_path: Path, chip: str) -> None:
    made = Machine("ascend", tmp_path, 1, chip=chip)
    assert CHIPS[SIMULATED[chip][0]] == chip
    assert made.look().devices[0].model == f"Ascend {chip}"
    assert made.lines == [f"NPU 0: Ascend {chip} at 0000:01:00.0"]


def test_its_libraries_can_be_loaded(tmp_path: Path) -> None:
    Machine("ascend", tmp_path, 1)
    ctypes.CDLL(str(tmp_path / "usr/local/Ascend/driver/lib64/driver/libascend_hal.so"))
