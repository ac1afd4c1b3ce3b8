"""The tests' own protection from signals to themselves."""

import os
import signal

import pytest


@pytest.mark.parametrize("send", [os.kill, os.killpg])
@pytest.mark.parametrize("number", [0, -1])
def test_a_test_that_has_lost_a_process_does_not_end_them_all(send: object, number: int) -> None:
    assert callable(send)
    with pytest.raises(ProcessLookupError):
        send(number, signal.SIGCONT)
