"""NVIDIA's configurations of claims: null counts as missing, and limits apply per device."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpuhook.base.errors import RequestError
from gpuhook.cluster.dra import configs
from gpuhook.cluster.vendors.nvidia import claim_config
from gpuhook.vendors import registry

GIB = 1 << 30
MOST_SAID = 1 << 15  # most characters of a condition's message: Condition of Kubernetes' meta/v1
EACH = "defaultPerDevicePinnedMemoryLimit"
SLICES = {"do": "time-slice", "slice": 0}
MPS = {"do": "mps", "threads": 0, "memory": 0}


def plan(kind: str = "GpuConfig", **parameters: Any) -> Any:
    told = {"apiVersion": claim_config.APIS[0], "kind": kind, **parameters}
    given = {"opaque": {"driver": "d", "parameters": told}}
    part = kind != "GpuConfig"
    return configs.wish([given], "d", "a", registry.BUILT_IN["nvidia"], is_part=part).plan


@pytest.mark.parametrize(
    ("sharing", "found"),
    [
        (None, {}),
        ({"strategy": None}, {}),
        ({"strategy": "TimeSlicing", "timeSlicingConfig": None}, SLICES),
        ({"strategy": "TimeSlicing", "mpsConfig": None}, SLICES),
        ({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": None}}, SLICES),
        ({"strategy": "MPS", "mpsConfig": None}, MPS),
        ({"strategy": "MPS", "timeSlicingConfig": None}, MPS),
        ({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": None}}, MPS),
        ({"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": None}}, MPS),
        ({"strategy": "MPS", "mpsConfig": {EACH: None, "multiUser": None}}, MPS),
        ({"strategy": "MPS", "mpsConfig": {EACH: {}, "multiUser": False}}, MPS),
    ],
)
def test_null_values_count_as_missing(sharing: Any, found: dict[str, Any]) -> None:
    assert plan(sharing=sharing) == found


@pytest.mark.parametrize(
    "sharing",
    [None, {"strategy": "TimeSlicing", "mpsConfig": None, "timeSlicingConfig": {"interval": None}}],
)
def test_null_values_of_mig_configurations_count_as_missing(sharing: Any) -> None:
    assert plan("MigDeviceConfig", sharing=sharing) == {}


def test_null_values_of_gpuhooks_configuration_count_as_missing() -> None:
    told = {"apiVersion": configs.API, "kind": configs.KIND, "memory": None}
    given = {"opaque": {"driver": "d", "parameters": told}}
    nvidia = registry.BUILT_IN["nvidia"]
    assert configs.wish([given], "d", "a", nvidia, is_part=False) == configs.DeviceConfig()


@pytest.mark.parametrize(
    "sharing", [{"color": None}, {"strategy": "MPS", "mpsConfig": {"x": None}}]
)
def test_an_unknown_field_is_refused_even_if_null(sharing: Any) -> None:
    with pytest.raises(RequestError, match="knows no"):
        plan(sharing=sharing)


def test_sharing_strategies_set_compute_mode_and_time_slice() -> None:
    """As with NVIDIA's driver, time slices are for several processes, and MPS for its clients."""
    shares = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}
    assert claim_config.settings(plan(sharing=shares)) == {"compute-mode": 0, "time-slice": 3}
    assert claim_config.settings(plan(sharing={"strategy": "MPS"})) == {"compute-mode": 3}


def effect(limits: Any, *devices: str) -> dict[str, Any]:
    sharing = {"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "8Gi", **limits}}
    wanted: Any = [(SimpleNamespace(id=each), plan(sharing=sharing)) for each in devices]
    return claim_config._daemon(wanted, "/claim")


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"GPU-b": "4Gi"}, {"GPU-b": 4 * GIB}),
        ({"0": "4Gi"}, {"GPU-a": 4 * GIB}),  # 0 is the first of the sorted UUIDs, as with NVIDIA
        ({"GPU-a": 2 * GIB, "1": "3Gi"}, {"GPU-a": 2 * GIB, "GPU-b": 3 * GIB}),
    ],
)
def test_memory_limits_of_each_device_are_applied(
    limits: dict[str, Any], found: dict[str, int]
) -> None:
    made = effect({EACH: limits}, "GPU-b", "GPU-a")
    assert made["limits"] == found
    assert made["memory"] == 8 * GIB


@pytest.mark.parametrize("name", ["2", "-1", "GPU-c", "", "01", " 0"])
def test_limits_of_devices_that_are_not_in_the_claim_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=EACH):
        effect({EACH: {name: "4Gi"}}, "GPU-b", "GPU-a")


@pytest.mark.parametrize("size", [None, 0, "1Ki", "much", True, {}])
def test_limits_with_an_invalid_size_are_refused(size: Any) -> None:
    with pytest.raises(RequestError, match="such as 8Gi"):
        plan(sharing={"strategy": "MPS", "mpsConfig": {EACH: {"0": size}}})


@pytest.mark.parametrize("value", [True, "true", 1, {}])
def test_the_mps_multi_user_setting_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="multiUser"):
        plan(sharing={"strategy": "MPS", "mpsConfig": {"multiUser": value}})


# What a pod's author may write -------------------------------------------------------------------

LEAVES = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.floats(),
    some.text(max_size=12),
    some.sampled_from(["Default", "Long", "TimeSlicing", "MPS", "8Gi", "1e99", "9" * 400, "\0"]),
)
NAMES = some.one_of(
    some.text(max_size=5),
    some.sampled_from(
        [
            *("strategy", "timeSlicingConfig", "mpsConfig", "interval", EACH, "multiUser", "0"),
            *("defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit", "memory", "kind"),
        ]
    ),
)
VALUES = some.recursive(
    LEAVES,
    lambda inner: some.one_of(
        some.lists(inner, max_size=3), some.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=12,
)
INTERVALS = some.fixed_dictionaries({}, optional={"interval": VALUES})
LIMITS = some.fixed_dictionaries(
    {},
    optional={
        "defaultActiveThreadPercentage": VALUES,
        "defaultPinnedDeviceMemoryLimit": VALUES,
        EACH: VALUES,
        "multiUser": VALUES,
    },
)
SHARINGS = some.fixed_dictionaries(
    {"strategy": some.one_of(some.sampled_from(["TimeSlicing", "MPS"]), VALUES)},
    optional={
        "timeSlicingConfig": some.one_of(INTERVALS, VALUES),
        "mpsConfig": some.one_of(LIMITS, VALUES),
    },
)
PARAMETERS: some.SearchStrategy[Any] = some.fixed_dictionaries(
    {
        "apiVersion": some.sampled_from([*claim_config.APIS, configs.API, None, [], {}, 1]),
        "kind": some.sampled_from(["GpuConfig", "MigDeviceConfig", configs.KIND, None, [], {}]),
    },
    optional={"sharing": some.one_of(SHARINGS, VALUES), "memory": VALUES},
)


@given(
    some.lists(some.one_of(PARAMETERS, VALUES), min_size=1, max_size=3),
    some.sampled_from(["nvidia", "amd"]),
    some.booleans(),
)
def test_any_configuration_is_read_or_refused(every: list[Any], vendor: str, is_part: bool) -> None:
    """The refusal has a message that fits into a claim's status, and no other error occurs."""
    given = [{"source": "FromClaim", "opaque": {"driver": "d", "parameters": one}} for one in every]
    error, found = "", configs.DeviceConfig()
    try:
        found = configs.wish(given, "d", "a", registry.BUILT_IN[vendor], is_part=is_part)
    except RequestError as refusal:
        error = str(refusal)
    assert error == "" or error.isprintable()
    assert len(error) < MOST_SAID
    assert found.memory is None or found.memory.number > 0
    plan = dict(found.plan)
    assert not (plan and (is_part or vendor == "amd"))
    if plan.get("do") == "mps":
        limits = plan.pop("limits", {})
        assert all(1 << 20 <= size <= 1 << 60 for size in limits.values())
        assert plan["memory"] == 0 or 1 << 20 <= plan["memory"] <= 1 << 60
        assert 0 <= plan["threads"] <= 100
    elif plan:
        assert plan == {"do": "time-slice", "slice": plan["slice"]}
        assert plan["slice"] in range(4)
