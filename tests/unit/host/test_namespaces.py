"""A look at namespaces that is whole, or says that it isn't."""

import os
import subprocess
import sys

import pytest

from gpuhook.tools.host import namespaces
from gpuhook.tools.host.namespaces import Look


def test_each_namespace_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        other.stdout.readline()
        look = Look(600)
        ours = look.namespaces()[os.readlink("/proc/self/ns/mnt")]
        assert {str(os.getpid()), str(other.pid)} <= {*ours}
        assert ours == sorted(ours, key=int)
        assert look.is_whole
        assert b" / / " in (look.table(str(other.pid)) or b"")
        other.communicate(b"\n")
    assert look.table(str(other.pid)) is None
    assert look.is_whole


def test_what_there_is_no_time_for() -> None:
    look = Look(0)
    assert look.is_whole
    assert look.namespaces() == {}
    assert not look.is_whole


def test_a_table_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_TABLE_LIMIT", 10)
    look = Look(600)
    assert look.table("self") == b""
    assert not look.is_whole
