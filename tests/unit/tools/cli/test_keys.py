"""Keys that a full-screen view gets from a terminal."""

import os
import pty
import sys

import pytest

from gpuhook.tools.cli import _keys


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (b"m", ["m"]), (b"\x1b[A", ["up"]), (b"\x1bOB", ["down"]), (b"\x1b[5~", ["page-up"]),
        (b"\x1b[6~", ["page-down"]), (b"\x1b[H", ["home"]), (b"\x1b[4~", ["end"]),
        (b"\x1b[Aq", ["up", "q"]), (b"\x1b[1;5Cq", [None, "q"]), (b"\x1b", [None]),
        (b"\x1b" + b"0" * 100 + b"q", [None]),
    ],
)  # fmt: skip
def test_keys_are_recognized_and_unknown_escape_sequences_dropped(
    monkeypatch: pytest.MonkeyPatch, typed: bytes, expected: list[str | None]
) -> None:
    """A sequence that means nothing is dropped whole, so that no part of it is taken for a key."""
    ours, theirs = pty.openpty()
    with open(theirs, "rb", buffering=0) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        with _keys.Keys() as keys:
            os.write(ours, typed)
            assert [keys.wait(5.0) for _ in expected] == expected
    os.close(ours)
