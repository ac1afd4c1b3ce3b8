"""daemon.json and its like are edited without touching what isn't meant."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.ground.errors import EngineError
from gpuhook.tools.engines import json_text

TABBED = (
    '{\n\t"log-driver": "json-file",\n\t"features": {"buildkit": true},\n\t"dns": ["1", "2"]\n}'
)


def test_order_indentation_and_the_end_stay() -> None:
    wanted = {**json.loads(TABBED), "runtimes": {"gpu-py": {"path": "/x"}}}
    assert json_text.edited(TABBED, wanted, "f") == (
        '{\n\t"log-driver": "json-file",\n\t"features": {\n\t\t"buildkit": true\n\t},\n'
        '\t"dns": [\n\t\t"1",\n\t\t"2"\n\t],\n'
        '\t"runtimes": {\n\t\t"gpu-py": {\n\t\t\t"path": "/x"\n\t\t}\n\t}\n}'
    )


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("{}", {"a": 1}, '{\n    "a": 1\n}'),
        ("{}\n", {"a": {"b": 1}}, '{\n    "a": {\n        "b": 1\n    }\n}\n'),
        ("", {"a": 1}, '{\n    "a": 1\n}\n'),
        ("  \n", {"a": 1}, '{\n    "a": 1\n}\n'),
        ('{"a":1}', {"a": 1, "b": [1]}, '{"a": 1, "b": [1]}'),
        ('{"a": {"b": 1, "c": 2}}\n', {"a": {"c": 2}}, '{"a": {"c": 2}}\n'),
        ('{\n  "a": 1,\n  "b": 2\n}\n', {"b": 2}, '{\n  "b": 2\n}\n'),
        ('{ "a" : 1 }', {}, "{}"),
        ('{\r\n  "a": 1\r\n}', {"a": 1, "b": 2}, '{\r\n  "a": 1,\r\n  "b": 2\r\n}'),
        ('{\n  "a": {\n  }\n}', {"a": {"b": 1}}, '{\n  "a": {\n    "b": 1\n  }\n}'),
        ('{"a":   1.50}', {"a": 1.5}, '{"a":   1.50}'),
        ('{"a": true}', {"a": 1}, '{"a": 1}'),
        ('{"ключ": "é"}', {"ключ": "é", "b": "ü"}, '{"ключ": "é", "b": "ü"}'),
        ('{"a": "\\ud800"}', {"a": "\ud800", "b": 1}, '{"a": "\\ud800", "b": 1}'),
    ],
)
def test_edits(text: str, wanted: dict[str, Any], expected: str) -> None:
    assert json_text.edited(text, wanted, "f") == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', 'the key "a" is in one object twice'),
        ('{"b": [{"c": 1, "c": 1}]}', 'the key "c" is in one object twice'),
        ('{"a": 1e999}', "Out of range float values"),
    ],
)
def test_what_would_change_more_than_is_meant_is_refused(text: str, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        json_text.edited(text, {**json.loads(text), "new": 1}, "f")


@pytest.mark.parametrize("text", ["{", "[]", "null", "{'a': 1}", '{"a": 1,}', "{} x", "["])
def test_what_is_no_object_is_refused_by_name(text: str) -> None:
    with pytest.raises(EngineError, match=r"/etc/docker/daemon\.json"):
        json_text.parse(text, "/etc/docker/daemon.json")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=5)


@given(DOCUMENTS, DOCUMENTS, st.sampled_from([None, 0, 1, 4, "\t"]))
def test_any_document_becomes_any_other(
    old: dict[str, Any], new: dict[str, Any], indent: int | str | None
) -> None:
    text = json.dumps(old, indent=indent)
    assert json.loads(json_text.edited(text, new, "f")) == new
    assert json_text.edited(text, old, "f") == text
