"""What is ours in a document is told from what somebody else put there."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.tools.engines.merge import Step, steps, without_ours

ORIGINAL = {"log": "x", "features": {"buildkit": True}, "imports": ["a"]}
WRITTEN = {
    "log": "x",
    "features": {"buildkit": True, "cdi": True},
    "imports": ["a", "ours"],
    "runtimes": {"gpu-py": {"path": "/p"}},
    "default-runtime": "gpu-py",
}
OWNED = [("runtimes", "gpu-py")]


def test_steps_are_the_fewest() -> None:
    assert list(steps({"a": 1, "b": {"c": 1, "d": 1}}, {"b": {"c": 2, "d": 1}, "e": []})) == [
        Step(("a",), remove=True),
        Step(("b", "c"), 2),
        Step(("e",), []),
    ]
    assert list(steps({"a": True}, {"a": 1})) == [Step(("a",), 1)]


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (WRITTEN, ORIGINAL),
        ({**WRITTEN, "log": "y", "new": 1}, {**ORIGINAL, "log": "y", "new": 1}),
        ({**WRITTEN, "default-runtime": "kata"}, {**ORIGINAL, "default-runtime": "kata"}),
        ({**WRITTEN, "imports": ["ours", "a", "b"]}, {**ORIGINAL, "imports": ["a", "b"]}),
        (
            {**WRITTEN, "runtimes": {"gpu-py": {"path": "/p", "runtimeArgs": ["x"]}}},
            ORIGINAL,
        ),
        (
            {**WRITTEN, "runtimes": {"gpu-py": {"path": "/q"}, "kata": {"path": "/k"}}},
            {**ORIGINAL, "runtimes": {"kata": {"path": "/k"}}},
        ),
        (
            {**WRITTEN, "features": {"cdi": False, "buildkit": True}},
            {**ORIGINAL, "features": {"cdi": False, "buildkit": True}},
        ),
        ({"log": "x"}, {"log": "x"}),
        ({**WRITTEN, "runtimes": "broken"}, {**ORIGINAL, "runtimes": "broken"}),
    ],
)
def test_only_ours_is_taken_out(current: dict[str, Any], expected: dict[str, Any]) -> None:
    assert without_ours(current, ORIGINAL, WRITTEN, OWNED) == expected


def test_an_entry_that_was_there_before_comes_back() -> None:
    original = {"runtimes": {"gpu-py": {"path": "/old"}}, "default-runtime": "nvidia"}
    written = {"runtimes": {"gpu-py": {"path": "/new"}}, "default-runtime": "gpu-py"}
    current = {**written, "debug": True}
    assert without_ours(current, original, written, OWNED) == {**original, "debug": True}


DOCUMENTS = st.dictionaries(
    st.sampled_from("abcd"),
    st.integers(0, 3) | st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3)),
)


@given(DOCUMENTS, DOCUMENTS)
def test_what_nobody_touched_becomes_what_it_was(
    original: dict[str, Any], added: dict[str, Any]
) -> None:
    written = {**original, **added}
    assert without_ours(written, original, written, []) == original
