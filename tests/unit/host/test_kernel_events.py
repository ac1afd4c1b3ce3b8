"""The kernel's events as bytes."""

import hypothesis
from hypothesis import strategies as st

from gpuhook.tools.host.uevents import KernelEvents, listen, parse


def test_an_event() -> None:
    data = b"add@/module/nvidia\0ACTION=add\0DEVPATH=/module/nvidia\0SUBSYSTEM=module\0A=b=c\0"
    [event] = parse(data)
    assert event == {
        "ACTION": "add",
        "DEVPATH": "/module/nvidia",
        "SUBSYSTEM": "module",
        "A": "b=c",
    }


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    [event] = parse(data)
    assert all(isinstance(each, str) for pair in event.items() for each in pair)


def test_nothing_is_waited_for() -> None:
    events = KernelEvents(listen())
    try:
        assert isinstance([*events.read()], list)
        assert events.fileno() >= 0
    finally:
        events.close()
