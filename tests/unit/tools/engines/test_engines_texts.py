"""Edits of engines' files change only what is meant, and recognize gpuhook's own parts."""

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines import json_text, toml_text
from gpuhook.tools.engines.merge import EditStep, steps, without_ours

TABBED = (
    '{\n\t"log-driver": "json-file",\n\t"features": {"buildkit": true},\n\t"dns": ["1", "2"]\n}'
)


def test_json_edits_keep_order_indentation_and_file_end() -> None:
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
def test_json_edits_keep_the_formatting(text: str, wanted: dict[str, Any], expected: str) -> None:
    assert json_text.edited(text, wanted, "f") == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', 'the key "a" is in one object twice'),
        ('{"b": [{"c": 1, "c": 1}]}', 'the key "c" is in one object twice'),
        ('{"a": 1e999}', "Out of range float values"),
        ('{"a": "\u00e9\\ud800"}', "surrogates not allowed"),
    ],
)
def test_json_that_an_edit_would_alter_elsewhere_is_refused(text: str, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        json_text.edited(text, {**json.loads(text), "new": 1}, "f")


@pytest.mark.parametrize("text", ["{", "[]", "null", "{'a': 1}", '{"a": 1,}', "{} x", "["])
def test_text_that_is_not_a_json_object_is_refused_with_its_path(text: str) -> None:
    with pytest.raises(EngineError, match=r"/etc/docker/daemon\.json"):
        json_text.parse(text, "/etc/docker/daemon.json")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=5)


@given(DOCUMENTS, DOCUMENTS, st.sampled_from([None, 0, 1, 4, "\t"]))
def test_any_json_object_can_be_edited_into_any_other(
    old: dict[str, Any], new: dict[str, Any], indent: int | str | None
) -> None:
    text = json.dumps(old, indent=indent)
    assert json.loads(json_text.edited(text, new, "f")) == new
    assert json_text.edited(text, old, "f") == text


# TOML -----------------------------------------------------------------------------------------


COMMENTED = """\
# the admin's own words
version = 2  # two

# before the tables
[plugins]
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"   # Debian's
"""


def test_a_new_toml_list_goes_below_the_version_and_comments_stay() -> None:
    wanted = {**tomllib.loads(COMMENTED), "imports": ["/etc/containerd/conf.d/*.toml"]}
    assert toml_text.edited(COMMENTED, wanted, "f") == COMMENTED.replace(
        "# two\n", '# two\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
    )


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("", {"imports": ["a"]}, 'imports = ["a"]\n'),
        ("[a]\nversion = 1\n", {"a": {"version": 1}, "b": 2}, "b = 2\n[a]\nversion = 1\n"),
        ("version = 2", {"version": 2, "b": 2}, "b = 2\nversion = 2"),
        ('a = ["x", # x\n "y"]\n', {"a": ["x", "y", "z"]}, 'a = ["x", # x\n "y",\n "z"]\n'),
        ('a = ["x", # x\n "y"]\n', {"a": ["x"]}, 'a = ["x" # x\n]\n'),
        ("a = 1 # one\nb = 2\n", {"b": 2}, "b = 2\n"),
        ("a = 1 # one\n", {"a": 2}, "a = 2 # one\n"),
        ("[a]\nx = 1\n[b]\ny = 1\n", {"b": {"y": 1}}, "[b]\ny = 1\n"),
        ("a = {x = 1}\n", {"a": {"x": 1, "y": {"z": 1}}}, "a = {x = 1,y = {z = 1}}\n"),
    ],
)
def test_toml_edits_keep_comments_and_formatting(
    text: str, wanted: dict[str, Any], expected: str
) -> None:
    assert toml_text.edited(text, wanted, "f") == expected


def test_a_deeply_nested_toml_table_is_added_and_removed() -> None:
    runtime = {"runtime_type": "io.containerd.runc.v2", "options": {"BinaryName": "/x"}}
    wanted = tomllib.loads(COMMENTED)
    wanted["plugins"]["cri"] = {"containerd": {"runtimes": {"gpu-py": runtime}}}
    text = toml_text.edited(COMMENTED, wanted, "f")
    assert tomllib.loads(text) == wanted
    assert text.startswith(COMMENTED.rstrip("\n"))
    assert toml_text.edited(text, tomllib.loads(COMMENTED), "f").strip() == COMMENTED.strip()


@pytest.mark.parametrize("text", ["[", "a = ", "a = 1\na = 2\n", "x"])
def test_invalid_toml_is_refused_with_its_path(text: str) -> None:
    with pytest.raises(EngineError, match=r"/etc/containerd/config\.toml"):
        toml_text.parse(text, "/etc/containerd/config.toml")


@pytest.mark.parametrize(
    "document",
    [
        {"version": 2, "plugins": {"io.containerd.grpc.v1.cri": {"x": True, "y": {}}}},
        {"list": [1, 2], "tables": [{"a": 1}, {"b": [{"c": 2}]}], "text": 'a"b\\c\n\u00e9'},
        {"mixed": [[1, 2], ["a"]], "empty": [], "float": 1.5, "deep": {"a.b": {"c d": 1}}},
        {"append": ["a", {"append": True}], "numbers": [1, "a"], "keys": {'\u00e9 "': 1}},
    ],
)
def test_a_rendered_toml_file_has_its_comment_and_all_values(document: dict[str, Any]) -> None:
    text = toml_text.render(document, "one\ntwo")
    assert text.startswith("# one\n# two\n")
    assert tomllib.loads(text) == document


# What is ours ---------------------------------------------------------------------------------


ORIGINAL = {"log": "x", "features": {"buildkit": True}, "imports": ["a"]}
WRITTEN = {
    "log": "x",
    "features": {"buildkit": True, "cdi": True},
    "imports": ["a", "ours"],
    "runtimes": {"gpu-py": {"path": "/p"}},
    "default-runtime": "gpu-py",
}
OWNED = [("runtimes", "gpu-py")]


def test_edit_steps_are_minimal() -> None:
    assert list(steps({"a": 1, "b": {"c": 1, "d": 1}}, {"b": {"c": 2, "d": 1}, "e": []})) == [
        EditStep(("a",), remove=True),
        EditStep(("b", "c"), 2),
        EditStep(("e",), []),
    ]
    assert list(steps({"a": True}, {"a": 1})) == [EditStep(("a",), 1)]


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
def test_only_gpuhooks_changes_are_removed(
    current: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert without_ours(current, ORIGINAL, WRITTEN, OWNED) == expected


def test_an_earlier_entry_is_restored() -> None:
    original = {"runtimes": {"gpu-py": {"path": "/old"}}, "default-runtime": "nvidia"}
    written = {"runtimes": {"gpu-py": {"path": "/new"}}, "default-runtime": "gpu-py"}
    current = {**written, "debug": True}
    assert without_ours(current, original, written, OWNED) == {**original, "debug": True}


SMALL = st.dictionaries(
    st.sampled_from("abcd"),
    st.integers(0, 3) | st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3)),
)


@given(SMALL, SMALL)
def test_removing_our_changes_from_an_unedited_document_restores_it(
    original: dict[str, Any], added: dict[str, Any]
) -> None:
    written = {**original, **added}
    assert without_ours(written, original, written, []) == original
