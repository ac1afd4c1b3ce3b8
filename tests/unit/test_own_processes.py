"""Guards against tests that kill themselves or wait forever in a child process."""

import gc
import os
import signal
import weakref

import pytest


@pytest.mark.parametrize("send", [os.kill, os.killpg])
@pytest.mark.parametrize("number", [0, -1])
def test_signals_to_process_0_or_minus_1_are_refused_in_tests(send: object, number: int) -> None:
    assert callable(send)
    with pytest.raises(ProcessLookupError):
        send(number, signal.SIGCONT)


def test_a_forked_child_collects_no_garbage_of_its_parent() -> None:
    """A gRPC server in that garbage would wait for threads that a child doesn't have."""

    class Ring:
        def __init__(self) -> None:
            self.ring = self

    usual = gc.get_threshold()
    gc.disable()
    gc.set_threshold(1)  # the collector runs as often as possible
    gone = weakref.ref(Ring())
    gc.enable()
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(0 if gone() is not None else 1)
    gc.set_threshold(*usual)
    assert os.waitpid(pid, 0)[1] == 0
    assert gc.isenabled()
    gc.collect()
    assert gone() is None
