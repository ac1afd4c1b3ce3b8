"""Events and use: affected devices, the meaning of XIDs, and the use of SMs."""

from types import SimpleNamespace
from typing import Any

import pytest
from machines import gpu, mig

from gpuhook.cluster.vendors import slices
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.metrics.containers import DeviceReference, assigned
from gpuhook.metrics.vendors.nvidia.telemetry import mean
from gpuhook.monitor.vendor_parts import ACTIONS, APPLICATION, FATAL, IGNORE
from gpuhook.monitor.vendors.nvidia import events, xids
from gpuhook.monitor.vendors.nvidia.xids import EVERY
from gpuhook.vendors.nvidia import names
from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory

MIGS = (mig(0, 1, 12, 13), mig(1, 2, 21, 22))


def inventory(*gpus: Gpu, lost: tuple[int, ...] = (), platform: str = "") -> NvidiaInventory:
    nodes = tuple(DeviceNode(each.path, 195, each.minor) for each in gpus)
    return NvidiaInventory("/", "580.65.06", "13.0", gpus, nodes, (), lost, "", platform)


@pytest.mark.parametrize(
    ("event", "labels"),
    [
        ({}, ["1"]),
        ({"gi": 1, "ci": 0}, ["1:0"]),
        ({"gi": 2, "ci": 0}, ["1:1"]),
        ({"gi": 2}, ["1:1"]),
        ({"gi": 2, "ci": 1}, []),
        ({"gi": 3, "ci": 0}, []),
        ({"gpu": "GPU-of-before"}, []),
        ({"gpu": ""}, []),
    ],
)
def test_events_are_assigned_to_the_affected_device(
    event: dict[str, Any], labels: list[str]
) -> None:
    here = inventory(gpu(0, 0), gpu(1, 1, MIGS))
    found = events.concerned(here, {"xid": 79, "gpu": gpu(1, 1).uuid, **event})
    assert [device.label for device in found] == labels


def test_events_need_a_gpu_and_are_unavailable_on_wsl() -> None:
    assert events.can_listen(inventory(gpu(0, 0)))
    assert not events.can_listen(inventory())
    assert not events.can_listen(inventory(gpu(0, 0), platform="wsl"))


def test_a_lost_gpu_is_kept_with_its_mig_devices() -> None:
    before = inventory(gpu(0, 0), gpu(1, 1, MIGS), gpu(2, 2))
    now = inventory(gpu(0, 0), gpu(2, 2), lost=(1,))
    found = now.remembering(before)
    assert (found.gpus, found.devices, found.lost) == (before.gpus, before.devices, ())
    assert set(found.nodes) == set(before.nodes)
    assert now.remembering(now) == now
    assert before.remembering(now) == before


def test_a_removed_gpu_that_is_not_lost_is_not_kept() -> None:
    before = inventory(gpu(0, 0), gpu(1, 1))
    now = inventory(gpu(0, 0))
    assert now.remembering(before) == now
    other = inventory(gpu(1, 1), lost=(0, 2))
    assert other.remembering(inventory(gpu(0, 0))).lost == (2,)


# XIDs -----------------------------------------------------------------------------------------


Case = dict[str, Any]


@pytest.mark.vectors("plugin_health", "plugin.xid_list")
def test_xid_lists_match_the_vectors(case: Case) -> None:
    assert sorted(xids.read_xids(case["input"]["value"])) == case["expected"]["xids"]


# A context switch timeout needs a reset; NVIDIA's plugin ignores it. See differences.md.
OURS = {109: FATAL}


@pytest.mark.vectors("plugin_health", "plugin.xid_policy")
def test_xid_policies_match_the_vectors(case: Case) -> None:
    watched, settings = xids.policy(case["input"])
    assert watched is not case["expected"]["checks_off"]
    ours = {} if {EVERY} & {*settings} else OURS
    for number, ignored in case["expected"]["ignored"].items():
        expected = not ignored or (ours.get(int(number)) and int(number) not in settings)
        assert (xids.action(int(number), settings) == FATAL) == bool(expected), number


@pytest.mark.vectors("plugin_health", "plugin.mig_uuid")
def test_old_mig_device_names_are_parsed_as_in_the_vectors(case: Case) -> None:
    uuid, expected = case["input"]["uuid"], case["expected"]
    found = assigned(uuid)
    if expected.get("error"):
        assert (found.gi, found.ci) == (None, None), "it is a name as others are"
    else:
        numbers = str(expected["gi"]), str(expected["ci"])
        assert found == DeviceReference(expected["parent"], "", *numbers)


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
def test_unusual_xid_lists_are_parsed(text: str, expected: set[int]) -> None:
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
def test_enabled_xids_override_disabled_ones(
    disabled: str, enabled: str, watched: bool, actions: dict[int, str]
) -> None:
    environ = {"DP_DISABLE_HEALTHCHECKS": disabled, "DP_ENABLE_HEALTHCHECKS": enabled}
    found, settings = xids.policy(environ)
    assert found is watched
    assert {xid: xids.action(xid, settings) for xid in actions} == actions


def test_default_xid_actions_follow_the_table() -> None:
    expected = {13: APPLICATION, 45: IGNORE, 48: FATAL, 79: FATAL, 94: APPLICATION, 95: FATAL}
    assert {xid: xids.action(xid, {}) for xid in expected} == expected
    assert xids.action(109, {}) == FATAL  # NVIDIA's plugin ignores it, though it needs a reset
    assert xids.action(99999, {}) == FATAL
    assert {each for each, _ in xids.XIDS.values()} == set(ACTIONS)
    assert xids.describe(79) == "XID 79 (GPU has fallen off the bus)"
    assert xids.describe(99999) == "XID 99999"


# Use ------------------------------------------------------------------------------------------


S = 1_000_000  # a second


@pytest.mark.parametrize(
    ("samples", "now", "expected", "end"),
    [
        ([], 10 * S, {}, 10 * S),
        ([(10 * S, 1, 60)], 10 * S, {1: 0.6}, 10 * S),
        # The last sample is recent, so the use after it isn't known yet.
        ([(9 * S + 500_000, 1, 60)], 10 * S, {1: 0.6}, 9 * S + 500_000),
        # The process was idle in the second half.
        ([(5 * S, 1, 60)], 10 * S, {1: 0.3}, 10 * S),
        ([(5 * S, 1, 20), (10 * S, 1, 60)], 10 * S, {1: 0.4}, 10 * S),
        ([(10 * S, 1, 60), (10 * S, 2, 40), (5 * S, 2, 20)], 10 * S, {1: 0.6, 2: 0.3}, 10 * S),
        # The driver's clock is ahead.
        ([(12 * S, 1, 50)], 10 * S, {1: 0.5}, 12 * S),
    ],
)
def test_sm_usage_is_averaged_over_time(
    samples: list[tuple[int, int, int]], now: int, expected: object, end: int
) -> None:
    used, until = mean(samples, 0, now)
    assert {pid: round(share, 6) for pid, share in used.items()} == expected
    assert until == end


# What helps a GPU -----------------------------------------------------------------------------


class Nvml:
    """The part of pynvml that reports a GPU's recovery action.

    ``says`` is the answer, or the exception that it raises.
    """

    class NVMLError(Exception):
        """The exception class of NVML."""

    NVML_SUCCESS = NVML_ERROR_GPU_IS_LOST = 0
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 13
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - pynvml's name

    def __init__(self, result: int, number: int) -> None:
        self.says = SimpleNamespace(nvmlReturn=result, value=SimpleNamespace(uiVal=number))

    def nvmlDeviceGetUUID(self, handle: object) -> str:  # noqa: N802 - pynvml's name
        return "GPU-1"

    def nvmlDeviceGetFieldValues(self, handle: object, fields: list[int]) -> list[Any]:  # noqa: N802
        assert (handle, fields) == (1, [230])
        if self.says.nvmlReturn < 0:
            raise self.NVMLError
        return [self.says]


def heard(nvml: Nvml) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    whole = {"gpuInstanceId": 0xFFFFFFFF, "computeInstanceId": 0xFFFFFFFF}
    event = SimpleNamespace(eventType=8, eventData=79, device=1, **whole)
    found = events.EventSet(nvml, said.append)._event(event)
    assert said == [{"asking": "GPU-1"}]  # written before the call of NVML, which may hang
    assert found is not None
    assert events.is_error(found)
    return found


@pytest.mark.parametrize(
    ("nvml", "more", "effect"),
    [
        (Nvml(0, 0), {"recovery": 0}, "NoSchedule"),
        (Nvml(0, 1), {"recovery": 1}, "NoExecute"),  # reset
        (Nvml(0, 2), {"recovery": 2}, "NoExecute"),  # restart of the node
        (Nvml(0, 3), {"recovery": 3}, "NoSchedule"),  # only peer-to-peer work must be drained
        (Nvml(0, 99), {"recovery": 99}, "NoSchedule"),  # an action that gpuhook doesn't know
        (Nvml(3, 0), {}, "NoSchedule"),  # not supported
        (Nvml(-1, 0), {}, "NoSchedule"),
    ],
)
def test_the_recovery_action_decides_the_taint_effect(
    nvml: Nvml, more: dict[str, int], effect: str
) -> None:
    event = heard(nvml)
    assert event == {"xid": 79, "gpu": "GPU-1", **more}
    assert slices.of(names).effect(event) == effect
