"""bpf: a program is loaded although a signal came, and a refusal is said."""

import errno
import os

import pytest

from gpuhook.ground.cgroup import bpf


@pytest.mark.parametrize("interrupted", [0, 1, 4])
def test_a_signal_while_a_program_is_verified(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    answers = [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))] * interrupted

    def call(*_: object) -> int:
        if answers:
            raise answers.pop()
        return 7

    monkeypatch.setattr(bpf, "_bpf", call)
    assert bpf.load_program(bytes(16), gpl=False, what="test") == 7


def test_signals_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call(*words: object) -> int:
        calls.append(words)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(bpf, "_bpf", call)
    with pytest.raises(OSError, match="temporarily unavailable"):
        bpf.load_program(bytes(16), gpl=False, what="test")
    assert len(calls) == 5
