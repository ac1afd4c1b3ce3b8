"""Arbitrary text as config.toml: a configuration or a ConfigError.

The quick reader never differs from tomllib.
"""

import contextlib
import tomllib
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuhook.base.config import source
from gpuhook.base.config.loader import loads
from gpuhook.base.config.locate import line_of
from gpuhook.base.config.model import FEATURE_PREFIX, FEATURES, KEYS
from gpuhook.base.config.source import BOOL, LIST, NUMBER, PAUSE, SECONDS, STRING, flatten
from gpuhook.base.errors import ConfigError, GpuhookError
from gpuhook.tools.config.edit import parse_assignment, set_value
from gpuhook.tools.config.render import as_toml

# Pieces that plain files are made of, and pieces that break them.
NAMES = st.sampled_from(["a", "b-c", "D_1", "2", "a.b", '"a"', "'a'", "é", "", "a b"])
SCALARS = st.sampled_from(
    [
        "true", "false", "True", '"x"', "'x'", '""', "''", '"""x"""', "'''x'''", '"\\n"', '"#"',
        "'\\'", '"\\"', '"x', "'x", "0", "1", "01", "-1", "+1", "1.5", "1.", ".5", "1e3", "1_000",
        "123456789", "1234567890", "0x1f", "inf", "nan", "1979-05-27", "07:32:00", "{}",
        "{ a = 1 }", "bare", "", '"é"', '"\t"', '"\x7f"', "٣", "1 2", '"a" "b"', '"\u00a0"',
    ]
)  # fmt: skip
LISTS = st.lists(SCALARS, max_size=3).map(lambda items: f"[{', '.join(items)}]")
VALUES = st.one_of(SCALARS, LISTS, st.sampled_from(["[", "]", "[,]", '["a",]', '["a" "b"]']))
SPACE = st.sampled_from(["", " ", "\t", "  \t", "\u00a0", "\r"])
COMMENT = st.sampled_from(["", "# x", "#", "# é", "#\x01", "# \x7f", "x"])
ASSIGNMENTS = st.tuples(SPACE, NAMES, SPACE, st.just("="), SPACE, VALUES, SPACE, COMMENT)
HEADERS = st.tuples(
    SPACE, st.sampled_from(["[", "[["]), NAMES, st.sampled_from(["]", "]]", ""]), SPACE, COMMENT
)
LINES = st.one_of(
    ASSIGNMENTS.map("".join), HEADERS.map("".join), COMMENT, st.text(max_size=5), SPACE
)
TEXTS = st.one_of(st.text(), st.lists(LINES).map("\n".join))


def reference(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


@settings(max_examples=500)
@given(TEXTS)
@example("a = 1\n[a]\n")
@example("[a.b]\n[a]\nb = 1\n")
@example("[a]\nb = 1\n[a.b]\n")
@example("[a.b]\nc=1\n[a]\nd=1\n")
@example("a = [\"x\", 'y' , ]  # z")
@example("a = 1\r\nb = 2\r\n")
@example("[a]\n[a.b.c]\n[a.b]\n[a.b]")
@example("[[a b]]\n")
@example('a = ["a" "b"]\n')
def test_the_quick_reader_agrees_with_tomllib_or_declines(text: str) -> None:
    found = source.read_plain(text)
    assert found is None or repr(found) == repr(reference(text))


@given(st.lists(st.sampled_from(['a = "x"', "b = true", "[t]", "# c", "", "n = [ 'a', \"b\" ]#"])))
def test_quick_reader_reads_all_plain_text(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert source.read_plain(text) == reference(text)


KEY_LINES = st.tuples(
    st.sampled_from(sorted(KEYS) + [FEATURE_PREFIX + name for name in FEATURES] + ["unknown"]),
    VALUES,
).map(" = ".join)


@settings(max_examples=200)
@given(st.one_of(TEXTS, st.lists(st.one_of(KEY_LINES, LINES)).map("\n".join)))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    try:
        config = loads(text)
    except ConfigError as error:
        reported = error.cause
    else:
        reported = "".join(f"{key}: {reason}" for key, reason in config.ignored)
        assert settings_of(loads(as_toml(config))) == settings_of(config)
    assert "\n" not in reported or "\n" in text


def settings_of(config: Any) -> list[object]:
    return [getattr(config, attribute) for attribute, _, _ in KEYS.values()] + [config.features]


@given(TEXTS, st.one_of(st.text(), st.sampled_from(sorted(KEYS))))
def test_a_reported_line_is_within_the_text(text: str, key: str) -> None:
    line = line_of(text, key)
    assert line is None or 1 <= line <= len(text.splitlines())


OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    BOOL: st.booleans(),
    STRING: st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    LIST: st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
    SECONDS: st.floats(0.001, 1000),
    PAUSE: st.floats(0, 1000),
    NUMBER: st.integers(0, 100),
}
CHANGES = st.sampled_from(sorted(KEYS)).flatmap(
    lambda key: st.tuples(st.just(key), OF_KIND[KEYS[key][1]])
)


@settings(max_examples=200)
@given(st.lists(st.one_of(KEY_LINES, LINES)).map("\n".join), CHANGES)
def test_setting_a_key_changes_only_that_key(text: str, change: tuple[str, Any]) -> None:
    key, value = change
    with contextlib.suppress(ConfigError):
        changed = set_value(text, key, value)
        before, after = flatten(tomllib.loads(text)), flatten(tomllib.loads(changed))
        assert after.pop(key) == value
        before.pop(key, None)
        assert repr(sorted(after.items())) == repr(sorted(before.items()))
        kept = [line for line in text.splitlines() if line.lstrip().startswith("# ")]
        assert [line for line in changed.splitlines() if line in kept] == kept


@given(st.text())
def test_any_assignment_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(GpuhookError):
        key, _ = parse_assignment(text)
        assert key in KEYS or key.startswith(FEATURE_PREFIX)
