"""Child processes that do one task and exit, and pauses that grow."""

import os
import signal
from pathlib import Path

import pytest

from gpuhook.base.errors import DriverError
from gpuhook.monitor.host.child import BackOff, do


def nobody(sentence: str) -> None:
    raise AssertionError(sentence)


def test_a_child_tasks_success_or_failure_is_returned() -> None:
    assert do(lambda: True, 60, nobody, "The chore")
    assert not do(lambda: False, 60, nobody, "The chore")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DriverError("There is none", "Load it"), b"The chore: There is none. Load it."),
        (KeyError("devices"), b"The chore: KeyError: 'devices'"),
        (OSError(28, "No space left on device"), b"The chore: OSError: [Errno 28] No space left"),
    ],
)
def test_an_exception_in_a_child_is_reported_as_a_sentence(
    error: Exception, expected: bytes
) -> None:
    reader, writer = os.pipe()

    def fail() -> bool:
        raise error

    def tell(sentence: str) -> None:
        os.write(writer, sentence.encode())

    with open(reader, "rb") as said:
        assert not do(fail, 60, tell, "The chore")
        os.close(writer)
        assert said.read().startswith(expected)


def wait_for_ever() -> bool:
    signal.pause()
    return True


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_a_hung_child_task_is_ended() -> None:
    before = children()
    assert not do(wait_for_ever, 1, nobody, "The chore")
    assert children() == before


def test_pauses_double_up_to_the_maximum_and_reset() -> None:
    pauses = BackOff(1.0, 5.0)
    assert [pauses.grow() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    pauses.reset()
    assert pauses.grow() == 1.0
