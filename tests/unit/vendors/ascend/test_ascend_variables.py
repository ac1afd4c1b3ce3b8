"""Variables for Ascend's driver in addition to the requested NPUs."""

from typing import Any

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError
from gpuhook.core.request.reader import Request, SpecReader
from gpuhook.vendors.ascend import names, variables
from gpuhook.vendors.ascend.variables import AscendOptions
from gpuhook.vendors.ascend.vendor import VENDOR

Case = dict[str, Any]
ASK = "ASCEND_VISIBLE_DEVICES"


def read(*env: str) -> Request:
    return SpecReader({"process": {"env": [*env]}}, Config()).read(names, VENDOR)


def test_ascend_options_default_to_the_base_list() -> None:
    assert read(f"{ASK}=0").options == AscendOptions()
    assert AscendOptions().lists == ("base",)
    assert AscendOptions().facts() == [("Lists of files", "base")]
    assert AscendOptions(nodes_only=True).facts() == [("Lists of files", "none")]


def test_list_variables_are_ignored_where_variables_are_not_accepted() -> None:
    config = Config()
    config.accept_envvar_unprivileged = False
    spec = {"process": {"env": ["ASCEND_RUNTIME_MOUNTS=a"]}}
    by_mounts = (f"{names.KIND}=0",)  # as a mount in NVIDIA's format requests it
    found = SpecReader(spec, config).read(names, VENDOR, by_mounts)
    assert (found.devices, found.options) == (by_mounts, AscendOptions())
    [(source, why)] = found.ignored
    assert (source, why[:21]) == ("environment", "ASCEND_RUNTIME_MOUNTS")


def test_option_variables_are_parsed() -> None:
    request = read(
        f"{ASK}=100",
        "ASCEND_RUNTIME_OPTIONS= virtual , NODRV,VIRTUAL",
        "ASCEND_RUNTIME_MOUNTS=a, b,,a",
        "DISABLE_UB_MOUNT=true",
    )
    assert request.options == AscendOptions(("a", "b"), nodes_only=True, virtual=True, no_ub=True)
    assert request.to_json()["lists"] == ["a", "b"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("ASCEND_RUNTIME_OPTIONS=NODRIVER", "'NODRIVER' isn't an option of ASCEND_RUNTIME_OPTIONS"),
        ("ASCEND_RUNTIME_OPTIONS=" + "a" * 129, "has 129 characters"),
        ("ASCEND_RUNTIME_MOUNTS=../../etc/shadow", "can't be the name of a list"),
        ("ASCEND_RUNTIME_MOUNTS=/etc/x", "can't be the name of a list"),
        ("ASCEND_RUNTIME_MOUNTS=.hidden", "can't be the name of a list"),
        ("ASCEND_RUNTIME_MOUNTS=" + "a" * 129, "can't be the name of a list"),
        ("DISABLE_UB_MOUNT=maybe", "DISABLE_UB_MOUNT is 'maybe'"),
        ("ASCEND_VNPU_SPECS=vir04", "asks to split an NPU, which gpuhook doesn't do"),
    ],
)
def test_invalid_ascend_options_are_refused_only_with_a_request(entry: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read(f"{ASK}=0", entry)
    assert read(entry).devices is None
    assert read(f"{ASK}=void", entry).devices is None


def test_a_request_for_engine_sockets_is_ignored() -> None:
    request = read(f"{ASK}=0", "MOUNT_BY_RUNTIME_FOR_DP=")
    [(source, reason)] = request.ignored
    assert source == "environment"
    assert "which no container gets" in reason


@pytest.mark.parametrize(
    ("asked", "selectors"),
    [
        ("100", ("vnpu-100",)),
        ("100-102,101", ("vnpu-100", "vnpu-101", "vnpu-102")),
        ("npu-100,Ascend310P-101", ("vnpu-100", "vnpu-101")),
        ("all", ("vnpus",)),
        ("ALL", ("vnpus",)),
        ("3-1", ("3-1",)),
        ("odd", ("odd",)),
        ("none", ()),
    ],
)
def test_numbers_mean_vnpus_with_the_virtual_option(asked: str, selectors: tuple[str, ...]) -> None:
    assert read(f"{ASK}={asked}", "ASCEND_RUNTIME_OPTIONS=VIRTUAL").selectors == selectors


# The vendor's cases --------------------------------------------------------------------------


@pytest.mark.vectors("vendor_ascend", "ascend.options")
def test_option_values_match_the_vectors(case: Case) -> None:
    value, expected = case["input"]["value"], case["expected"]
    if expected.get("error"):
        with pytest.raises(RequestError):
            variables.option_words(value)
    else:
        assert list(variables.option_words(value)) == expected["options"]


@pytest.mark.vectors("vendor_ascend", "ascend.disable_ub")
def test_disable_ub_values_match_the_vectors(case: Case) -> None:
    value, expected = case["input"]["value"], case["expected"]
    if expected.get("error"):
        with pytest.raises(RequestError):
            variables.boolean("DISABLE_UB_MOUNT", value)
    else:
        assert variables.boolean("DISABLE_UB_MOUNT", value) == expected["disabled"]


@pytest.mark.vectors("vendor_ascend", "ascend.list_names")
def test_list_names_match_the_vectors(case: Case) -> None:
    """The hook converts names to lower case; gpuhook finds a list in either case."""
    expected = case["expected"]
    if expected.get("error"):
        with pytest.raises(RequestError):
            variables.list_names(case["input"]["value"])
        return
    found = list(variables.list_names(case["input"]["value"]))
    if case["input"]["reader"] == "hook":
        found = [name.lower() for name in found]
    assert found == expected["names"]


@pytest.mark.vectors("vendor_ascend", "ascend.variable")
def test_variable_values_match_the_vectors(case: Case) -> None:
    assert read(*case["input"]["env"]).devices is None
    env = SpecReader({"process": {"env": case["input"]["env"]}}, Config()).env
    assert env[case["input"]["name"]] == case["expected"]["value"]


@pytest.mark.vectors("vendor_ascend", "ascend.virtual_split")
def test_a_request_to_split_an_npu_is_refused(case: Case) -> None:
    """gpuhook doesn't split NPUs, so such a request always fails."""
    devices = ",".join(str(number) for number in case["input"]["devices"])
    with pytest.raises(RequestError, match="asks to split an NPU"):
        read(f"{ASK}={devices}", *case["input"]["env"])


@pytest.mark.vectors("vendor_ascend", "ascend.engine_sockets")
def test_engine_sockets_are_ignored_in_every_vector(case: Case) -> None:
    """gpuhook never passes them to a container (docs/engineering/differences.md)."""
    env = case["input"].get("env", ["MOUNT_BY_RUNTIME_FOR_DP=1"])
    request = read(f"{ASK}=0", *env)
    asked = any(entry.startswith("MOUNT_BY_RUNTIME_FOR_DP") for entry in env)
    assert [source for source, _ in request.ignored] == ["environment"] * asked
    assert request.options == AscendOptions()
