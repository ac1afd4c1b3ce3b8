"""The library without code that simulators write."""

import os
from types import SimpleNamespace

import pytest

from gpuhook.ground.errors import SimulateError
from gpuhook.ground.loader import elf
from gpuhook_simulate.library import shared_library


@pytest.mark.parametrize("soname", ["libx.so", "libascend_hal.so.1", "l"])
def test_it_says_its_name(soname: str) -> None:
    found = elf.read(shared_library(soname))
    assert (found.bits, found.soname, found.needed) == (64, soname, ())


def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="vax"))
    with pytest.raises(SimulateError, match="Libraries for vax can't be simulated"):
        shared_library("libx.so")
