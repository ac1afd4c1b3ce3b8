"""What XIDs mean, what an administrator sets of that, and when devices are well again."""

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from gpuhook.ground.errors import RequestError
from gpuhook.tools.kubernetes import health
from gpuhook.tools.kubernetes.health import APPLICATION, EVERY, FATAL, IGNORE, Health

Case = dict[str, Any]


@pytest.mark.vectors("plugin_health", "plugin.xid_list")
def test_lists_of_xids(case: Case) -> None:
    assert sorted(health.read_xids(case["input"]["value"])) == case["expected"]["xids"]


# A context switch timeout needs a reset; NVIDIA's plugin ignores it. See differences.md.
OURS = {109: FATAL}


@pytest.mark.vectors("plugin_health", "plugin.xid_policy")
def test_policies(case: Case) -> None:
    watched, settings = health.policy(case["input"])
    assert watched is not case["expected"]["checks_off"]
    ours = {} if {EVERY} & {*settings} else OURS
    for number, ignored in case["expected"]["ignored"].items():
        expected = not ignored or (ours.get(int(number)) and int(number) not in settings)
        assert (health.action(int(number), settings) == FATAL) == bool(expected), number


@pytest.mark.vectors("plugin_health", "plugin.mig_uuid")
def test_old_names_of_mig_devices(case: Case) -> None:
    uuid, expected = case["input"]["uuid"], case["expected"]
    if expected.get("error"):
        with pytest.raises(RequestError):
            health.split_mig(uuid)
    else:
        assert health.split_mig(uuid) == (expected["parent"], expected["gi"], expected["ci"])


@pytest.mark.parametrize(
    ("text", "xids"),
    [
        ("ALL", {EVERY}),
        ("13, Xids ,14", {EVERY}),
        ("+13,1_3,0x13,13.0,\u0661", set()),
        ("18446744073709551615,18446744073709551616", {18446744073709551615}),
        ("9" * 5000, set()),
    ],
)
def test_further_lists(text: str, xids: set[int]) -> None:
    assert health.read_xids(text) == xids


@pytest.mark.parametrize(
    ("disabled", "enabled", "watched", "actions"),
    [
        ("68,67", "", True, {67: IGNORE, 68: IGNORE, 79: FATAL}),
        ("79", "79", True, {79: FATAL}),
        ("", "13", True, {13: FATAL, 31: APPLICATION}),
        ("all", "43", False, {43: FATAL, 79: IGNORE}),
        ("79", "all", True, {79: FATAL, 13: FATAL}),
        ("xids", "", False, {79: IGNORE}),
    ],
)
def test_enabling_wins(disabled: str, enabled: str, watched: bool, actions: dict[int, str]) -> None:
    environ = {"DP_DISABLE_HEALTHCHECKS": disabled, "DP_ENABLE_HEALTHCHECKS": enabled}
    found, settings = health.policy(environ)
    assert found is watched
    assert {xid: health.action(xid, settings) for xid in actions} == actions


def test_the_table() -> None:
    expected = {13: APPLICATION, 45: IGNORE, 48: FATAL, 79: FATAL, 94: APPLICATION, 95: FATAL}
    assert {xid: health.action(xid, {}) for xid in expected} == expected
    assert health.action(109, {}) == FATAL  # NVIDIA's plugin ignores it, though it needs a reset
    assert health.action(99999, {}) == FATAL
    assert {each for each, _ in health.XIDS.values()} == set(health.ACTIONS)
    assert health.describe(79) == "XID 79 (GPU has fallen off the bus)"
    assert health.describe(99999) == "XID 99999"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_quiet_and_answering_is_well(clock: Clock) -> None:
    state = Health(300.0, clock)
    assert state.ill("a", "XID 79")
    assert state.due() == 1300.0
    clock.now = 1100.0
    assert not state.ill("a", "XID 79")  # no news, but it isn't quiet
    clock.now = 1300.0
    assert state.asked(["a", "b"]) == []
    clock.now = 1400.0
    assert state.asked(["b"]) == []
    assert state.due() == 1700.0
    clock.now = 1700.0
    assert state.asked(["a", "b"]) == ["a"]
    assert state.reasons() == {}
    assert state.due() is None


def test_a_reset_helps_at_once(clock: Clock) -> None:
    state = Health(300.0, clock)
    state.ill("a", "XID 79")
    state.ill("b", "XID 48")
    assert state.reset(["a", "c"]) == ["a"]
    assert state.reasons() == {"b": "XID 48"}


def test_without_recovery_only_a_reset_helps(clock: Clock) -> None:
    state = Health(0.0, clock)
    state.ill("a", "XID 79")
    assert state.due() is None
    clock.now += 1e9
    assert state.asked(["a"]) == []
    assert state.reset(["a"]) == ["a"]


def test_one_that_flaps_waits_longer(clock: Clock) -> None:
    state = Health(10.0, clock)
    waits = []
    for _ in range(7):
        state.ill("a", "XID 79")
        waits.append((state.due() or 0.0) - clock.now)
        clock.now += waits[-1]
        assert state.asked(["a"]) == ["a"]
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0]
    state.ill("a", "XID 79")
    assert state.reset(["a"]) == []  # not even a reset shortens that
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
def test_whatever_happens(steps: list[tuple[str, Any]]) -> None:
    """Unwell until quiet and answering, never by another's trouble, and never for ever."""
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
