"""config.toml and its like are edited without touching what isn't meant."""

import tomllib
from typing import Any

import pytest

from gpuhook.ground.errors import EngineError
from gpuhook.tools.engines import toml_text

COMMENTED = """\
# the admin's own words
version = 2  # two

# before the tables
[plugins]
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"   # Debian's
"""


def test_a_list_goes_below_the_version_and_comments_stay() -> None:
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
def test_edits(text: str, wanted: dict[str, Any], expected: str) -> None:
    assert toml_text.edited(text, wanted, "f") == expected


def test_a_table_is_added_deep_inside() -> None:
    runtime = {"runtime_type": "io.containerd.runc.v2", "options": {"BinaryName": "/x"}}
    wanted = tomllib.loads(COMMENTED)
    wanted["plugins"]["cri"] = {"containerd": {"runtimes": {"gpu-py": runtime}}}
    text = toml_text.edited(COMMENTED, wanted, "f")
    assert tomllib.loads(text) == wanted
    assert text.startswith(COMMENTED.rstrip("\n"))
    assert toml_text.edited(text, tomllib.loads(COMMENTED), "f").strip() == COMMENTED.strip()


@pytest.mark.parametrize("text", ["[", "a = ", "a = 1\na = 2\n", "x"])
def test_what_is_no_toml_is_refused_by_name(text: str) -> None:
    with pytest.raises(EngineError, match=r"/etc/containerd/config\.toml"):
        toml_text.parse(text, "/etc/containerd/config.toml")


@pytest.mark.parametrize(
    "document",
    [
        {"version": 2, "plugins": {"io.containerd.grpc.v1.cri": {"x": True, "y": {}}}},
        {"list": [1, 2], "tables": [{"a": 1}, {"b": [{"c": 2}]}], "text": 'a"b\\c\n\u00e9'},
        {"mixed": [[1, 2], ["a"]], "empty": [], "float": 1.5, "deep": {"a.b": {"c d": 1}}},
    ],
)
def test_a_new_file_says_the_document_below_its_comment(document: dict[str, Any]) -> None:
    text = toml_text.render(document, "one\ntwo")
    assert text.startswith("# one\n# two\n")
    assert tomllib.loads(text) == document
