"""process: variables and groups of the container's process, written into config.json."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import SpecError
from gpuhook.base.oci import process
from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.base.oci.spec import Spec

SET = EnvironmentSetting("A", "1", "why")
FRONT = EnvironmentSetting("A", "/x", "why", front=True)
OTHER = EnvironmentSetting("A", "/y", "why", front=True)


def spec(*env: str, **more: Any) -> Spec:
    return Spec("/b/config.json", json.dumps({"process": {"env": list(env)}, **more}))


def env(made: Spec) -> list[str]:
    found: list[str] = made.data["process"]["env"]
    return found


@pytest.mark.parametrize(
    ("before", "setting", "after"),
    [
        ([], SET, ["A=1"]),
        (["B=2"], SET, ["B=2", "A=1"]),
        (["A=0", "B=2"], SET, ["A=1", "B=2"]),
        (["A=0", "B=2", "A=9"], SET, ["A=1", "B=2", "A=1"]),
        (["A", "AA=0"], SET, ["A=1", "AA=0"]),
        ([], FRONT, ["A=/x"]),
        (["A="], FRONT, ["A=/x"]),
        (["A=/mine"], FRONT, ["A=/x:/mine"]),
        (["A=/first", "A=/last"], FRONT, ["A=/x:/last", "A=/x:/last"]),
        (["A=/xy"], FRONT, ["A=/x:/xy"]),
    ],
)
def test_a_variable_is_set_once_in_place(
    before: list[str], setting: EnvironmentSetting, after: list[str]
) -> None:
    made = process.set_variable(spec(*before), setting)
    assert env(made) == after
    assert process.has_variable(made.data, setting)
    assert process.set_variable(made, setting) is made


def test_values_of_two_vendors_are_prefixed_once() -> None:
    """However often a bundle is started, each value is there once."""
    made = spec("A=/mine")
    for _ in range(3):
        for setting in (FRONT, OTHER):
            made = process.set_variable(made, setting)
    assert env(made) == ["A=/y:/x:/mine"]
    assert all(process.has_variable(made.data, setting) for setting in (FRONT, OTHER))


@pytest.mark.parametrize(
    "data", [{}, {"process": None}, {"process": {}}, {"process": {"env": None}}]
)
def test_a_variable_is_set_in_a_process_without_environment(data: dict[str, Any]) -> None:
    made = process.set_variable(Spec("/b/config.json", json.dumps(data)), SET)
    assert env(made) == ["A=1"]
    assert not process.has_variable(data, SET)


VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(st.lists(st.tuples(st.sampled_from(["A", "B", "AB"]), VALUES)), st.booleans())
def test_other_variables_are_unchanged(pairs: list[tuple[str, str]], front: bool) -> None:
    setting = EnvironmentSetting("A", "/x", "why", front=front)
    before = [f"{name}={value}" for name, value in pairs]
    made = process.set_variable(spec(*before), setting)
    others = [entry for entry in before if not entry.startswith("A=")]
    assert [entry for entry in env(made) if not entry.startswith("A=")] == others
    ours = [entry for entry in env(made) if entry.startswith("A=")]
    assert len(ours) == max(1, len(before) - len(others))
    assert len(set(ours)) == 1


# Groups --------------------------------------------------------------------------------------

USER = {"type": "user"}


def mapping(inside: object, outside: object, size: object) -> dict[str, object]:
    return {"containerID": inside, "hostID": outside, "size": size}


@pytest.mark.parametrize(
    ("linux", "inside"),
    [
        (None, 44),
        ({"namespaces": [{"type": "mount"}]}, 44),
        ({"namespaces": [USER], "gidMappings": [mapping(0, 40, 10)]}, 4),
        ({"namespaces": [USER], "gidMappings": [mapping(0, 100, 9), mapping(7, 44, 1)]}, 7),
        ({"namespaces": [USER], "gidMappings": [mapping(0, 45, 10)]}, None),
        ({"namespaces": [USER], "gidMappings": [mapping(0, 34, 10)]}, None),
        ({"namespaces": [USER]}, None),
        ({"namespaces": [{**USER, "path": "/proc/1/ns/user"}]}, None),
        # Runtimes read a missing number as 0, and refuse values of another type.
        ({"namespaces": [USER], "gidMappings": [{"hostID": 40, "size": 10}]}, 4),
        ({"namespaces": [USER], "gidMappings": ["x", mapping("0", 40, None)]}, None),
        ({"namespaces": "user", "gidMappings": 1}, 44),
    ],
)
def test_host_groups_are_mapped_into_the_user_namespace(linux: object, inside: int | None) -> None:
    data = {"linux": linux}
    assert process.group_inside(data, 44) == inside
    made = process.add_groups(Spec("/b/config.json", json.dumps(data)), [44])
    user = made.data.get("process", {}).get("user", {})
    assert user.get("additionalGids") == (None if inside is None else [inside])


@pytest.mark.parametrize(
    ("user", "groups"),
    [
        ({"gid": 5}, [44, 45]),
        ({"gid": 44}, [45]),
        ({"additionalGids": [45, 1]}, [45, 1, 44]),
        ({"additionalGids": None}, [44, 45]),
        ({"gid": 44, "additionalGids": [45]}, [45]),
    ],
)
def test_groups_are_added_once(user: dict[str, Any], groups: list[int]) -> None:
    before = Spec("/b/config.json", json.dumps({"process": {"user": user}}))
    made = process.add_groups(before, [44, 45, 44])
    assert made.data["process"]["user"]["additionalGids"] == groups
    assert process.add_groups(made, [44, 45]) is made


def test_groups_of_another_type_are_refused() -> None:
    strange = Spec("/b/config.json", '{"process": {"user": {"additionalGids": "44"}}}')
    with pytest.raises(SpecError, match=r"process\.user.additionalGids is not a list"):
        process.add_groups(strange, [44])


def test_environment_entries_that_are_not_text_are_ignored() -> None:
    spec = Spec("config.json", '{"process": {"env": [5, null, "A=1"]}}')
    assert (
        process.set_variable(spec, EnvironmentSetting("B", "2", "a test")).data["process"]["env"][
            -1
        ]
        == "B=2"
    )
