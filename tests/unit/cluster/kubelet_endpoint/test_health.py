"""Recovery of devices after errors."""

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from gpuhook.cluster.kubelet_endpoint.health import Health


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_quiet_device_that_answers_recovers(clock: Clock) -> None:
    state = Health(300.0, clock)
    assert state.ill("a", "XID 79")
    assert state.due() == 1300.0
    clock.now = 1100.0
    assert not state.ill("a", "XID 79")  # already known, but the quiet time starts again
    clock.now = 1300.0
    assert state.asked(["a", "b"]) == []
    clock.now = 1400.0
    assert state.asked(["b"]) == []
    assert state.due() == 1700.0
    clock.now = 1700.0
    assert state.asked(["a", "b"]) == ["a"]
    assert state.reasons() == {}
    assert state.due() is None


def test_a_reset_device_is_healthy_at_once(clock: Clock) -> None:
    state = Health(300.0, clock)
    state.ill("a", "XID 79")
    state.ill("b", "XID 48")
    assert state.reset(["a", "c"]) == ["a"]
    assert state.reasons() == {"b": "XID 48"}


def test_without_a_recovery_time_only_a_reset_restores_health(clock: Clock) -> None:
    state = Health(0.0, clock)
    state.ill("a", "XID 79")
    assert state.due() is None
    clock.now += 1e9
    assert state.asked(["a"]) == []
    assert state.reset(["a"]) == ["a"]


def test_a_flapping_device_waits_longer_before_each_recovery(clock: Clock) -> None:
    state = Health(10.0, clock)
    waits = []
    for _ in range(7):
        state.ill("a", "XID 79")
        waits.append((state.due() or 0.0) - clock.now)
        clock.now += waits[-1]
        assert state.asked(["a"]) == ["a"]
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0]
    state.ill("a", "XID 79")
    assert state.reset(["a"]) == []  # not even a reset shortens the wait
    clock.now += 7200.0
    assert state.asked(["a"]) == ["a"]
    state.ill("a", "XID 79")
    assert (state.due() or 0.0) - clock.now == 10.0


DEVICES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ill"), DEVICES),
        st.tuples(st.just("asked"), st.frozensets(DEVICES)),
        st.tuples(st.just("wait"), st.floats(0.0, 500.0)),
    ),
    max_size=40,
)


@hypothesis.given(steps=STEPS)
def test_any_sequence_of_events_keeps_health_consistent(steps: list[tuple[str, Any]]) -> None:
    """A device is unhealthy until it is quiet and responds.

    No other device's error affects it, and no device stays unhealthy forever.
    """
    clock = Clock()
    state = Health(100.0, clock)
    heard: dict[str, float] = {}
    for what, value in steps:
        before = state.reasons()
        if what == "ill":
            assert state.ill(value, what) is (value not in before)
            heard[value] = clock.now
            assert state.reasons() == {**before, value: what}
        elif what == "wait":
            clock.now += value
        else:
            for device in state.asked(value):
                assert device in value
                assert clock.now - heard[device] >= 100.0
    for _ in range(len(steps) + 1):
        clock.now += 1600.0
        state.asked("abc")
    assert state.reasons() == {}
