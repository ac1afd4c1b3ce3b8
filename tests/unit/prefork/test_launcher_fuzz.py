"""The launcher with sanitizers, compared with Python on made-up command lines and files.

Each run takes a few seconds, or a minute in continuous integration. GPUHOOK_FUZZ_SECONDS sets
the time, and GPUHOOK_FUZZ_SEED the first seed.
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from launcher_inputs import command_lines, specs
from launchers import Probe

from gpuhook.base.config.model import Config
from gpuhook.base.names import CREATING_VERBS
from gpuhook.base.oci.runtime_argv import Arguments
from gpuhook.prefork import launcher_cache

SECONDS = float(
    os.environ.get("GPUHOOK_FUZZ_SECONDS", "60" if os.environ.get("CI") == "true" else "3")
)
SEED = int(os.environ.get("GPUHOOK_FUZZ_SEED", "0"))
CHUNK = 128  # the chunk size with which the probe is compiled
END = launcher_cache.END_MARKER.encode()
TRIGGERS = [word.encode() for word in launcher_cache.words(Config()) or ()]


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Check values of a strategy until the time is over."""
    end = time.monotonic() + SECONDS / 3
    for number in itertools.count(SEED):
        run = settings(max_examples=200, database=None)(given(strategy)(check))
        seed(number)(run)()
        if time.monotonic() >= end:
            return


WILD = st.lists(st.text(st.characters(blacklist_characters="\0"), max_size=9), max_size=9)


def test_any_command_line_is_parsed_as_python_does(probe: Probe) -> None:
    def check(argv: list[str]) -> None:
        try:
            [os.fsencode(word) for word in argv]
        except UnicodeEncodeError:
            return  # such a word can't be in a command line
        verb, bundle, is_usual, _ = probe.arguments(argv)
        arguments = Arguments(argv)
        if arguments.verb in CREATING_VERBS:
            assert verb != "pass"
            assert verb != "create" or bundle == (arguments.bundle or ".")
        if verb == "create" and is_usual and not arguments.unclear:
            assert arguments.verb in CREATING_VERBS

    fuzz(command_lines | WILD, check)


def _pieces(words: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return texts with words, parts of words, and other bytes between them."""
    parts = st.sampled_from(words).flatmap(
        lambda word: st.integers(0, len(word)).map(lambda length: word[:length])
    )
    filling = st.integers(0, 2 * CHUNK).map(lambda length: b'{"x":' * (length // 5))
    piece = st.one_of(st.sampled_from(words), parts, filling, st.binary(max_size=8))
    return st.lists(piece, max_size=8).map(b"".join)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "triggers", tmp_path / "config.json"


def test_trigger_strings_in_any_config_json_are_found(
    probe: Probe, files: tuple[Path, Path]
) -> None:
    """The launcher reads the file in pieces, and a string may lie across two of them."""
    saved, config = files
    saved.write_bytes(b"".join(word + b"\n" for word in (*TRIGGERS, END)))

    def check(text: bytes) -> None:
        config.write_bytes(text)
        expected = "some" if any(word in text for word in TRIGGERS) else "none"
        assert probe.search(saved, config) == expected

    fuzz(specs.map(str.encode) | _pieces(TRIGGERS), check)


def test_any_saved_trigger_strings_are_used_only_if_complete(
    probe: Probe, files: tuple[Path, Path]
) -> None:
    """Any file is used only if it is complete, and then all its strings are found."""
    saved, config = files
    lines = st.one_of(
        st.sampled_from([*TRIGGERS, b"", b"{", END, END[:3], b"y" * CHUNK]),
        st.binary(max_size=CHUNK // 2),
    )
    contents = st.tuples(
        st.lists(lines, max_size=5).map(b"\n".join),
        st.sampled_from([b"", b"\n", b"\n" + END + b"\n"]),
    ).map(b"".join)

    def check(values: tuple[bytes, bytes]) -> None:
        content, text = values
        saved.write_bytes(content)
        config.write_bytes(text)
        *words, rest = content.split(b"\n")
        whole = not rest and words[-1:] == [END] and END not in words[:-1]
        words = words[:-1]
        if not (whole and words) or any(not 0 < len(word) <= CHUNK // 2 for word in words):
            assert probe.search(saved, config) == "unknown"
        else:
            expected = "some" if any(word in text for word in words) else "none"
            assert probe.search(saved, config) == expected

    fuzz(st.tuples(contents, _pieces([*TRIGGERS, b"{", END])), check)
