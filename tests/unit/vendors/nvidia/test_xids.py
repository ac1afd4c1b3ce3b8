"""What XIDs mean, and what an administrator sets of that."""

from typing import Any

import pytest

from gpuhook.tools.metrics.containers import Assigned, assigned
from gpuhook.tools.vendors.nvidia import xids
from gpuhook.tools.vendors.nvidia.xids import EVERY
from gpuhook.tools.vendors.parts import ACTIONS, APPLICATION, FATAL, IGNORE

Case = dict[str, Any]


@pytest.mark.vectors("plugin_health", "plugin.xid_list")
def test_lists_of_xids(case: Case) -> None:
    assert sorted(xids.read_xids(case["input"]["value"])) == case["expected"]["xids"]


# A context switch timeout needs a reset; NVIDIA's plugin ignores it. See differences.md.
OURS = {109: FATAL}


@pytest.mark.vectors("plugin_health", "plugin.xid_policy")
def test_policies(case: Case) -> None:
    watched, settings = xids.policy(case["input"])
    assert watched is not case["expected"]["checks_off"]
    ours = {} if {EVERY} & {*settings} else OURS
    for number, ignored in case["expected"]["ignored"].items():
        expected = not ignored or (ours.get(int(number)) and int(number) not in settings)
        assert (xids.action(int(number), settings) == FATAL) == bool(expected), number


@pytest.mark.vectors("plugin_health", "plugin.mig_uuid")
def test_old_names_of_mig_devices(case: Case) -> None:
    uuid, expected = case["input"]["uuid"], case["expected"]
    found = assigned(uuid)
    if expected.get("error"):
        assert (found.gi, found.ci) == (None, None), "it is a name as others are"
    else:
        numbers = str(expected["gi"]), str(expected["ci"])
        assert found == Assigned(expected["parent"], "", *numbers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ALL", {EVERY}),
        ("13, Xids ,14", {EVERY}),
        ("+13,1_3,0x13,13.0,\u0661", set()),
        ("18446744073709551615,18446744073709551616", {18446744073709551615}),
        ("9" * 5000, set()),
    ],
)
def test_further_lists(text: str, expected: set[int]) -> None:
    assert xids.read_xids(text) == expected


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
    found, settings = xids.policy(environ)
    assert found is watched
    assert {xid: xids.action(xid, settings) for xid in actions} == actions


def test_the_table() -> None:
    expected = {13: APPLICATION, 45: IGNORE, 48: FATAL, 79: FATAL, 94: APPLICATION, 95: FATAL}
    assert {xid: xids.action(xid, {}) for xid in expected} == expected
    assert xids.action(109, {}) == FATAL  # NVIDIA's plugin ignores it, though it needs a reset
    assert xids.action(99999, {}) == FATAL
    assert {each for each, _ in xids.XIDS.values()} == set(ACTIONS)
    assert xids.describe(79) == "XID 79 (GPU has fallen off the bus)"
    assert xids.describe(99999) == "XID 99999"
