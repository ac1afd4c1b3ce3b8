"""Driver capabilities: lists, bounds, defaults and what a refusal says."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.ground.config.loader import loads
from gpuhook.ground.errors import CapabilityError, ConfigError
from gpuhook.vendors.nvidia import variables

Case = dict[str, Any]


def listed(text: str) -> tuple[str, ...]:
    return variables.split_capabilities(text)


@pytest.mark.vectors("capabilities", "capabilities.intersection")
def test_intersection(case: Case) -> None:
    asked, supported = listed(case["input"]["capabilities"]), listed(case["input"]["supported"])
    expected = case["expected"]["intersection_sorted"]
    assert ",".join(variables.common_capabilities(asked, supported)) == expected


@pytest.mark.vectors("capabilities", "capabilities.list")
def test_list(case: Case) -> None:
    assert listed(case["input"]["value"]) == tuple(case["expected"]["list"] or ())


@pytest.mark.vectors("hook", "hook.supported_driver_capabilities")
def test_supported(case: Case) -> None:
    value = case["input"]["supported-driver-capabilities"]
    text = "" if value == "<unset>" else f'supported-driver-capabilities = "{value}"'
    if case["expected"].get("panic"):
        with pytest.raises(ConfigError, match=r"line 1: supported-driver-.*'not-compute'"):
            loads(text)
    else:
        supported = variables.supported_capabilities(loads(text).supported_driver_capabilities)
        assert ",".join(supported) == case["expected"]["supported"]


@pytest.mark.vectors("hook", "hook.driver_capabilities")
def test_granted(case: Case) -> None:
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
def test_blank_all_and_duplicates(value: str | None, supported: str, result: str) -> None:
    assert granted(value, supported) == result


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
def test_an_unknown_word_is_named_and_corrected(value: str, hint: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        granted(value, "compute,utility")
    word = next(word for word in value.split(",") if word != "compute")
    assert ascii(word[:48]) in caught.value.cause
    assert "isn't a driver capability: there are compat32, compute, " in caught.value.cause
    assert caught.value.remedy == f"Correct NVIDIA_DRIVER_CAPABILITIES{hint}"
    assert caught.value.code == "unsupported-capability"


def test_several_unknown_words() -> None:
    with pytest.raises(CapabilityError) as caught:
        granted("utlity,compte,x")
    assert "'compte', 'utlity', 'x' aren't driver capabilities" in caught.value.cause
    assert "did you mean compute,utility?" in caught.value.remedy


def test_a_refusal_names_the_bound() -> None:
    with pytest.raises(CapabilityError, match="'video', and only compute,utility") as caught:
        granted("compute,video", "compute,utility")
    assert "supported-driver-capabilities" in caught.value.remedy
    assert caught.value.code == "unsupported-capability"


def test_known_but_not_supported_is_refused_too() -> None:
    with pytest.raises(CapabilityError, match="'display', 'graphics'"):
        granted("graphics,compute,display", "compute,utility")


@given(
    st.one_of(st.none(), st.text()), st.sets(st.sampled_from(variables.CAPABILITIES)), st.booleans()
)
def test_never_more_than_is_supported(value: str | None, bound: set[str], legacy: bool) -> None:
    supported = tuple(sorted(bound))
    with contextlib.suppress(CapabilityError):
        found = variables.granted_capabilities(value, legacy, supported)
        assert set(found) <= bound
        assert list(found) == sorted(set(found))
