"""Arbitrary bytes as CDI specs: errors, or the same content as from PyYAML's own reader."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from timeouts import in_time

from gpuhook.core.cdi import checks, document, versions, yaml_reader
from gpuhook.core.cdi.document import read

# Pieces of CDI specs, and pieces that break them.
PIECES = st.sampled_from(
    ["cdiVersion: 0.5.0\n", "kind: a/b\n", "devices:\n", "- name: x\n", "  containerEdits:\n",
     "    env:\n", "    - A=b\n", "  - &a ", "*a", "<<: *a\n", "{", "}", "[", "]", ",", ": ", "- ",
     "? ", "'", '"', "|\n", ">\n", "#", "\n", "  ", "\t", "---\n", "...\n", "!!str ", "!!int ",
     "!!float ", "!x ", "%YAML 1.1\n", "~", "0", "1e3", "0x1f", "yes", "1:0", ".inf", "\\", "\0",
     "\ufeff", "\u2028", "\x85", "\r\n", "é", "@", "`", '"\\ud83d"', '"\\UFFFFFFFF"', "null"]
)  # fmt: skip
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=30).map("".join)
BYTES = st.one_of(st.binary(max_size=60), TEXTS.map(lambda text: text.encode()))


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader of PyYAML: with libyaml or without."""
    found = getattr(yaml, request.param, None)
    if found is None:
        pytest.skip("this PyYAML has no libyaml")
    monkeypatch.setattr(yaml_reader, "LOADER", found)


@pytest.mark.usefixtures("loader")
@settings(max_examples=600)
@given(BYTES)
@example(b'kind: "\\UFFFFFFFF"')
@example(b'kind: "\\ud83d"')
@example(b"\xff\xfea\x00")
@example(b"!!float 1_")
@example(b"- &a [*a]")
def test_any_bytes_give_a_cdi_spec_or_errors(data: bytes) -> None:
    with in_time():
        reading = read(data)
    assert (reading.document is None) == bool(reading.problems)
    for problem in reading.problems:
        assert (
            problem.line is None or 1 <= problem.line <= data.count(b"\n") + data.count(b"\r") + 8
        )
        assert problem.sentence
        assert not problem.sentence.endswith(".")


# CDI specs with all fields, from tables of the fields' contents.
WORDS = st.one_of(
    st.sampled_from(["0", "1e3", "yes", "null", "~", "1:0", "0x1", "", " a", "a: b", "- a", "#"]),
    # JSON escapes a character beyond U+FFFF as two surrogates, which YAML doesn't combine.
    # NUL is refused in every field.
    st.text(
        st.characters(min_codepoint=1, max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=4
    ),
)  # fmt: skip


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field of a kind of ``document.FIELDS``."""
    if isinstance(kind, list):
        return st.lists(values(kind[0]), max_size=2)
    if isinstance(kind, dict) and "*" in kind:
        return st.dictionaries(WORDS, values(kind["*"]), max_size=2)
    if isinstance(kind, dict):
        fields = {name: values(inner) for name, inner in kind.items()}
        return st.fixed_dictionaries({}, optional=fields)
    return {
        document.TEXT: WORDS,
        document.FLAG: st.booleans(),
        document.SIGNED: st.integers(-(1 << 63), (1 << 63) - 1),
        document.UNSIGNED: st.integers(0, (1 << 32) - 1),
    }[kind]


DOCUMENTS = values(document.FIELDS)


class _Quoting(yaml.SafeDumper):
    """A dumper that quotes all strings, because a bare y is a string to PyYAML and true to Go."""


_Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


@settings(max_examples=300)
@given(DOCUMENTS, st.booleans())
def test_a_written_cdi_spec_is_read_back_unchanged(written: dict[str, Any], as_json: bool) -> None:
    """The types of values are kept, even if the spec isn't valid."""
    text = json.dumps(written) if as_json else yaml.dump(written, Dumper=_Quoting)
    assert _without_checks(text.encode()) == written


def _without_checks(data: bytes) -> Any:
    """Return the content of a text, without checks of its validity."""
    root = yaml_reader.read(data)
    assert root is not None
    reader = document._Reader()
    found = reader.value(root, document.FIELDS, ())
    assert reader.problems == []
    return found


BEGIN = "cdiVersion: '0.6.0'\nkind: a/b\n"
LINES = [
    "devices:", "- name: 'x'", "  annotations: {a: 'b', 'c': \"d\"}", "  containerEdits:",
    "    env: [ 'A=b', 'B=c' ]", "    mounts:", "    - hostPath: '/a'", "      containerPath: '/b'",
    "- {name: 'y', containerEdits: {env: ['A=b']}}",
]  # fmt: skip


@st.composite
def disturbed(draw: st.DrawFn) -> str:
    """Return a valid spec with a text inserted anywhere."""
    whole = BEGIN + "\n".join(LINES) + "\n"
    place = draw(st.integers(len(BEGIN), len(whole)))
    return whole[:place] + draw(TEXTS) + whole[place:]


@settings(max_examples=1000)
@given(disturbed())
@example(BEGIN + "\n".join(LINES) + "\n")
@example(BEGIN + "\n".join(LINES).replace("'b', 'c'", "'b',\u2028\ufeff 'c'") + "\n")
def test_an_accepted_cdi_spec_has_the_same_content_in_pyyaml(text: str) -> None:
    found = read(text.encode("utf-8", "replace")).document
    if found is None:
        return
    try:
        loaded = yaml.load(text, yaml_reader.LOADER)  # noqa: S506 - a safe one; PyYAML's own has another BOM
    except (yaml.YAMLError, ValueError, TypeError):  # several documents, unknown tags, dates
        return
    assert _agrees(found, loaded), loaded


def _agrees(ours: Any, theirs: Any) -> bool:
    """Compare strings, lists and tables; Go may read other values differently from PyYAML."""
    if isinstance(theirs, dict):
        folded = {key.lower(): value for key, value in ours.items()}
        return all(
            _agrees(ours[key] if key in ours else folded[key.lower()], value)
            for key, value in theirs.items()
            if isinstance(key, str) and value is not None
        )
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_agrees, ours, theirs))
    return not isinstance(theirs, str) or ours == theirs or yaml_reader._resolved(theirs) != theirs


@settings(max_examples=300)
@given(DOCUMENTS)
def test_checks_and_versions_accept_any_cdi_spec(whole: dict[str, Any]) -> None:
    for path, sentence in checks.problems(whole):
        assert sentence
        assert document.spelled(path)
    assert versions.needed(whole) in versions.KNOWN


@settings(max_examples=300)
@given(DOCUMENTS)
def test_the_needed_version_is_the_lowest_accepted(whole: dict[str, Any]) -> None:
    needed = versions.needed(whole)
    for version in versions.KNOWN[versions.KNOWN.index(versions.EARLIEST) :]:
        found = checks.problems({**whole, "cdiVersion": version})
        too_low = any("needs cdiVersion" in sentence for _, sentence in found)
        assert too_low == versions.is_below(version, needed)


def test_the_table_of_versions_names_existing_fields() -> None:
    for field in versions.EDITS:
        kind: Any = document.FIELDS["containerEdits"]
        for name in field:
            kind = kind[0][name] if isinstance(kind, list) else kind[name]
