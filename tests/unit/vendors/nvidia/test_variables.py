"""Driver capabilities: lists, bounds, defaults, and messages of refusals."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests_made import mounts_request, request_for

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import ALL_CAPABILITIES, Config
from gpuhook.base.errors import CapabilityError, ConfigError, RequestError
from gpuhook.core import contract
from gpuhook.core.request import memory_settings
from gpuhook.core.request.reader import SpecReader
from gpuhook.vendors.nvidia import names, variables

Case = dict[str, Any]
# The setting in NVIDIA's own file, which allows every capability.
NVIDIAS = f'supported-driver-capabilities = "{ALL_CAPABILITIES}"'


def listed(text: str) -> tuple[str, ...]:
    return variables.split_capabilities(text)


@pytest.mark.vectors("capabilities", "capabilities.intersection")
def test_capability_intersections_match_the_vectors(case: Case) -> None:
    asked, supported = listed(case["input"]["capabilities"]), listed(case["input"]["supported"])
    expected = case["expected"]["intersection_sorted"]
    assert ",".join(variables.common_capabilities(asked, supported)) == expected


@pytest.mark.vectors("capabilities", "capabilities.list")
def test_capability_lists_match_the_vectors(case: Case) -> None:
    assert listed(case["input"]["value"]) == tuple(case["expected"]["list"] or ())


@pytest.mark.vectors("hook", "hook.supported_driver_capabilities")
def test_supported_capabilities_match_the_vectors(case: Case) -> None:
    value = case["input"]["supported-driver-capabilities"]
    text = "" if value == "<unset>" else f'supported-driver-capabilities = "{value}"'
    if case["expected"].get("panic"):
        with pytest.raises(ConfigError, match=r"line 1: supported-driver-.*'not-compute'"):
            loads(text)
    else:
        supported = variables.supported_capabilities(loads(text).supported_driver_capabilities)
        assert ",".join(supported) == case["expected"]["supported"]


@pytest.mark.vectors("hook", "hook.driver_capabilities")
def test_granted_capabilities_match_the_vectors(case: Case) -> None:
    given_, supported = case["input"], variables.supported_capabilities(case["input"]["supported"])
    value, legacy = given_["NVIDIA_DRIVER_CAPABILITIES"], given_["legacy_image"]
    found = variables.granted_capabilities(value, legacy, supported)
    assert ",".join(found) == case["expected"]["capabilities"]


def granted(value: str | None, supported: str = "all", legacy: bool = False) -> str:
    return ",".join(
        variables.granted_capabilities(value, legacy, variables.supported_capabilities(supported))
    )


@pytest.mark.parametrize(
    ("value", "supported", "result"),
    [
        (None, "all", "compute,utility"),
        ("", "all", "compute,utility"),
        (" , ,", "all", "compute,utility"),
        ("video,video, compute ", "all", "compute,video"),
        ("compute,all", "compute,video", "compute,video"),
        ("all", "", ""),
        ("", "video", ""),
        (None, "", ""),
    ],
)
def test_blank_all_and_duplicate_capabilities_are_resolved(
    value: str | None, supported: str, result: str
) -> None:
    assert granted(value, supported) == result


# Words that are none: a warning and the default, or a refusal where the setting limits ----------


@pytest.mark.parametrize(
    ("value", "result", "said"),
    [
        ("magic", "compute,utility", "'magic' isn't a driver capability, so the container gets"),
        ("video,magic", "compute,utility,video", "compute and utility as well: compute,utility,vi"),
        ("utlity", "compute,utility", "'utlity' isn't a driver capability (did you mean utility?)"),
        ("graphics,x,Y", "compute,graphics,utility", "'Y', 'x' aren't driver capabilities, so"),
        ("Compute", "compute,utility", "(did you mean compute?)"),
        ("compute utility", "compute,utility", "(did you mean compute,utility?)"),
        ("all,magic", ",".join(variables.CAPABILITIES), ""),
        (" , ", "compute,utility", ""),
    ],
)
@pytest.mark.parametrize("setting", ["", 'supported-driver-capabilities = "all"', NVIDIAS])
def test_an_unknown_capability_gives_a_warning(
    value: str, result: str, said: str, setting: str
) -> None:
    supported = loads(setting).supported_driver_capabilities
    env = ("NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_DRIVER_CAPABILITIES={value}")
    request = request_for(*env, supported_driver_capabilities=supported)
    assert ",".join(request.options.capabilities) == result
    assert [said in warning for warning in request.warnings] == ([True] if said else [])


def test_a_container_without_devices_is_not_warned() -> None:
    request = request_for("NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_DRIVER_CAPABILITIES=magic")
    assert request.warnings == ()


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("compute,foo", ""),
        ("compute,utlity", " (did you mean utility?)"),
        ("Compute", " (did you mean compute?)"),
        ("COMPUTE UTILITY", " (did you mean compute,utility?)"),
        ("compute foo", ""),
        ("vidoe", " (did you mean video?)"),
        ("grafics", ""),
        ("graphicss", " (did you mean graphics?)"),
        ("utilities", ""),
        ("All", " (did you mean all?)"),
        ("a\nb", ""),
        ("utility" * 1000, ""),
    ],
)
def test_an_unknown_capability_is_refused_with_a_suggestion(value: str, hint: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        granted(value, "compute,utility")
    word = next(word for word in value.split(",") if word != "compute")
    assert ascii(word[:48]) in caught.value.cause
    assert "isn't a driver capability: there are compat32, compute, " in caught.value.cause
    assert caught.value.remedy == f"Correct NVIDIA_DRIVER_CAPABILITIES{hint}"
    assert caught.value.code == "unsupported-capability"


def test_several_unknown_capabilities_are_named_together() -> None:
    with pytest.raises(CapabilityError) as caught:
        granted("utlity,compte,x", "compute,utility")
    assert "'compte', 'utlity', 'x' aren't driver capabilities" in caught.value.cause
    assert "did you mean compute,utility?" in caught.value.remedy


@pytest.mark.parametrize(
    ("value", "named"),
    [("compute,video", "'video'"), ("graphics,compute,display", "'display', 'graphics'")],
)
def test_a_refusal_names_unsupported_and_supported_capabilities(value: str, named: str) -> None:
    with pytest.raises(CapabilityError, match=f"{named}, and only compute,utility") as caught:
        granted(value, "compute,utility")
    assert "supported-driver-capabilities" in caught.value.remedy
    assert caught.value.code == "unsupported-capability"


@given(
    st.one_of(st.none(), st.text()), st.sets(st.sampled_from(variables.CAPABILITIES)), st.booleans()
)
def test_only_supported_capabilities_are_granted(
    value: str | None, bound: set[str], legacy: bool
) -> None:
    supported = tuple(sorted(bound))
    with contextlib.suppress(CapabilityError):
        found = variables.granted_capabilities(value, legacy, supported)
        assert set(found) <= bound
        assert list(found) == sorted(set(found))


# Beside capabilities: IMEX, features, requirements --------------------------------------------


@pytest.mark.parametrize(
    ("value", "channels"),
    [
        ("0", (0,)),
        ("3,4,3", (3, 4)),
        ("1048575", (1048575,)),
        ("all", ()),
        ("0,all", ()),
        ("none", ()),
        ("void", ()),
        ("", ()),
    ],
)
def test_imex_channels_are_parsed(value: str, channels: tuple[int, ...]) -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=none", f"NVIDIA_IMEX_CHANNELS={value}")
    assert request_for(*env).options.imex_channels == channels


@pytest.mark.parametrize(
    "value", ["1048576", "-1", "+1", "01", "00", "0x1", "1.0", "²", "٣", "../0", "1/2", "9" * 99]
)
def test_malformed_imex_channels_are_refused(value: str) -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=none", f"NVIDIA_IMEX_CHANNELS={value}")
    with pytest.raises(RequestError, match="IMEX"):
        request_for(*env)


def test_imex_mounts_override_the_variable_and_can_be_ignored() -> None:
    env = ("NVIDIA_IMEX_CHANNELS=7",)

    def channels(*mounts: str, **settings: Any) -> tuple[int, ...]:
        found: tuple[int, ...] = mounts_request(*mounts, env=env, **settings).options.imex_channels
        return found

    assert channels("0", "imex/3", "imex/1", "imex/3") == (3, 1)
    assert channels("0") == (7,)
    assert channels("imex/all") == ()
    assert channels("0", accept_envvar_unprivileged=False) == ()
    features = {"ignore-imex-channel-requests": True}
    assert channels("0", "imex/x", features=features) == ()
    assert mounts_request("imex/0").devices is None


@pytest.mark.parametrize("value", ["", "true", "Enabled", "enabled ", "1"])
def test_features_need_the_exact_word(value: str) -> None:
    assert request_for("NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_GDS={value}").options.features == ()


FEATURES = {
    "NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled", "NVIDIA_GDRCOPY": "enabled",
    "NVIDIA_NVSWITCH": "enabled", "NVIDIA_REQUIRE_JETPACK": "csv-mounts=all",
}  # fmt: skip


@pytest.mark.parametrize("name", [*FEATURES, "NVIDIA_IMEX_CHANNELS"])
def test_feature_variables_are_ignored_where_variables_are_not_accepted(name: str) -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=0", f"{name}={FEATURES.get(name, '3')}")
    heard = mounts_request("0", env=env)
    assert (heard.options.features or heard.options.imex_channels) != ()
    alone = mounts_request("0", env=env, accept_envvar_unprivileged=False)
    assert (alone.options.features, alone.options.imex_channels) == ((), ())
    assert alone.devices == ("0",)
    [why] = [reason for _, reason in alone.ignored if reason.startswith(name)]
    assert "the container is not privileged" in why


def test_requirements_disabled_by_configuration_as_by_environment() -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_REQUIRE_CUDA=cuda>=12")
    assert request_for(*env).options.requirements == ("cuda>=12",)
    by_config = request_for(*env, disable_require=True)
    by_env = request_for(*env, "NVIDIA_DISABLE_REQUIRE=T")
    assert by_config == by_env
    assert (by_env.options.requirements, by_env.options.requirements_disabled) == ((), True)
    for no in ("false", "0", "yes", "TRue", " true", ""):
        assert not request_for(*env, f"NVIDIA_DISABLE_REQUIRE={no}").options.requirements_disabled


def test_a_malformed_cuda_version_is_ignored_with_requirements_disabled() -> None:
    assert request_for("CUDA_VERSION=foo", disable_require=True).devices == ("all",)


# Variables -------------------------------------------------------------------------------------

# Each variable of a container that NVIDIA's toolkit (1.20.2) reads -> a value with an effect.
READ = {
    "NVIDIA_VISIBLE_DEVICES": "1",
    "NVIDIA_DRIVER_CAPABILITIES": "video",
    "NVIDIA_IMEX_CHANNELS": "3",
    "NVIDIA_MIG_CONFIG_DEVICES": "all",
    "NVIDIA_MIG_MONITOR_DEVICES": "all",
    "NVIDIA_REQUIRE_CUDA": "cuda>=12.0",
    "NVIDIA_DISABLE_REQUIRE": "true",
    "NVIDIA_GDS": "enabled",
    "NVIDIA_MOFED": "enabled",
    "NVIDIA_GDRCOPY": "enabled",
    "NVIDIA_NVSWITCH": "enabled",
    "NVIDIA_GPU_MEMORY_LIMIT": "8192",
    "NVIDIA_GPU_MEMORY_REQUEST": "8192",
}


def asked_by(*settings: str) -> Any:
    """Return a privileged container's request, and its memory limits."""
    spec = {"process": {"env": [*settings], "capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}
    reader = SpecReader(spec, Config())
    return reader.read(names, contract.load(names)), memory_settings.read(reader, [names]).said


@pytest.mark.parametrize("name", READ)
def test_every_variable_of_nvidias_toolkit_has_an_effect(name: str) -> None:
    """gpuhook warns about variables that it doesn't read, so that none is ignored silently."""
    before = asked_by("NVIDIA_VISIBLE_DEVICES=0")
    request, said = asked_by("NVIDIA_VISIBLE_DEVICES=0", f"{name}={READ[name]}")
    assert (request, said) != before
    assert request.warnings == ()
    assert name in variables.KNOWN or name.startswith(variables.REQUIRE)
    assert {*READ} >= variables.KNOWN


@pytest.mark.parametrize(
    "name",
    ["NVIDIA_GPU_COMPUTE_LIMIT", "NVIDIA_GPU_MEMORY_LIMITS", "NVIDIA_VISIBLE_DEVICE",
     "NVIDIA_DRIVER_CAPS", "NVIDIA_IMEX_DOMAIN", "NVIDIA_MIG_PROFILE"],
)  # fmt: skip
def test_an_unknown_nvidia_variable_gives_a_warning(name: str) -> None:
    request, _ = asked_by("NVIDIA_VISIBLE_DEVICES=0", f"{name}=1", "NVIDIA_TF32_OVERRIDE=0")
    [warning] = request.warnings
    assert warning.startswith(f"{name!r} isn't a variable that gpuhook ")
    assert asked_by(f"{name}=1")[0].warnings == (), "it asks for no device"


@pytest.mark.parametrize("name", ["NVIDIA_MIG_MANAGER_SERVICE_HOST", "NVIDIA_DRIVER_PORT_80_TCP"])
def test_kubernetes_service_variables_give_no_warning(name: str) -> None:
    assert asked_by("NVIDIA_VISIBLE_DEVICES=0", f"{name}=1")[0].warnings == ()
