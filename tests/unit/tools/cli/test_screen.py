"""Output on terminals, and in a pipe."""

import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from gpuhook.tools.cli import _screen

DRAW = """
from gpuhook.tools.cli._screen import BAD, show, table, text
show(table(("N", "NAME"), [(1, "[red]\\x1b[2J:smile:"), (text("lost", BAD), "y" * 200)]))
"""


UUIDS = """
from gpuhook.tools.cli._screen import show, table
rows = [(n, "NVIDIA H100 80GB HBM3", "GPU-" + "z" * 28, "docker:" + "x" * 30) for n in range(2)]
show(table(("N", "NAME", "UUID", "CONTAINERS"), rows, less=("NAME", "UUID")))
"""


def piped(**environment: str) -> str:
    variables = {**os.environ, **environment}
    words = [sys.executable, "-c", DRAW]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=variables).stdout


def on_terminal(program: str = DRAW, **environment: str) -> str:
    ours, theirs = pty.openpty()
    variables = {"PATH": os.environ["PATH"], "TERM": "xterm", "COLUMNS": "40", **environment}
    with subprocess.Popen([sys.executable, "-c", program], stdout=theirs, env=variables) as process:
        os.close(theirs)
        found = b""
        try:
            while piece := os.read(ours, 1 << 16):
                found += piece
        except OSError:
            pass  # EIO: the terminal's other end is closed
        os.close(ours)
        assert process.wait() == 0
    return found.decode()


def test_a_pipe_gets_plain_lines_of_full_length() -> None:
    expected = "N     NAME\n1     [red]\\x1b[2J:smile:\nlost  " + "y" * 200 + "\n"
    assert piped() == expected
    assert piped(COLUMNS="40", TERM="dumb") == expected


def test_a_terminal_gets_colours_and_shortened_lines() -> None:
    drawn = on_terminal()
    assert "\x1b[31mlost\x1b[0m" in drawn
    assert "\x1b[2J" not in drawn
    assert "yyy…yyy" in drawn


def test_columns_that_do_not_fit_are_dropped_whole() -> None:
    cases = ((97, (1, 1)), (96, (0, 1)), (74, (0, 1)), (73, (1, 0)), (63, (1, 0)), (62, (0, 0)))
    for width, is_shown in (*cases, (40, (0, 0))):
        drawn = on_terminal(UUIDS, COLUMNS=str(width))
        assert drawn.count("docker:" + "x" * 30) == 2
        assert ("H100" in drawn, "GPU-" + "z" * 28 in drawn) == is_shown


WORDS = st.text("abc-/:é漢", min_size=1, max_size=70)
CELLS = st.lists(WORDS, max_size=4).map(" ".join)
ROWS = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=4)
)


def is_shortened(lines: list[str]) -> bool:
    return "…" in "".join(lines) or "..." in "".join(lines)


def printed(*drawn: Text | list[Text]) -> list[str]:
    with redirect_stdout(io.StringIO()) as file:
        _screen.show(*drawn)
    return file.getvalue().removesuffix("\n").split("\n")


def breadth(rows: list[list[str]], places: Iterable[int]) -> int:
    """Return the width of a table with these columns."""
    return sum(2 + max(2, *(cell_len(row[n]) for row in rows), 0) for n in places) - 2


@settings(max_examples=300)
@given(ROWS, st.integers(40, 200), st.booleans(), st.booleans())
def test_table_rows_fit_on_one_line_of_the_terminals_width(
    rows: list[list[str]], width: int, some_go: bool, is_cut: bool
) -> None:
    """Columns are dropped before texts are shortened, and texts only as far as needed."""
    header = [f"T{number}" for number in range(len(rows[0]))]
    less = header[1:] if some_go else []
    cut = header[-1] if is_cut else ""
    lines = printed(_screen.table(header, rows, less=less, cut=cut, width=width))
    assert len(lines) == 1 + len(rows)
    assert max(map(cell_len, lines)) <= width
    shown = [header.index(title) for title in lines[0].split()]
    if breadth(rows, range(len(header))) <= width:
        assert shown == [*range(len(header))]
    if not is_cut and breadth(rows, shown) <= width:
        words = [word for line in lines[1:] for word in line.split()]
        assert words == " ".join(row[n] for row in rows for n in shown).split()
        # No further column would fit.
        dropped = [header.index(title) for title in less if header.index(title) not in shown]
        assert all(breadth(rows, sorted([*shown, each])) > width for each in dropped)
    elif not is_cut:
        assert shown == ([0] if some_go else [*range(len(header))])
        assert is_shortened(lines)


@settings(max_examples=150)
@given(ROWS, st.integers(40, 200))
def test_lists_are_wrapped_when_no_column_can_be_dropped(rows: list[list[str]], width: int) -> None:
    header = [f"T{number}" for number in range(len(rows[0]))]
    table = _screen.table(header, rows, less=header[1:-1], wrap=header[-1], width=width)
    lines = printed(table)
    assert max(map(cell_len, lines)) <= width
    shown = [header.index(title) for title in lines[0].split()]
    if breadth(rows, {0, len(header) - 1}) <= width:
        assert len(lines) == 1 + len(rows)
    if not is_shortened(lines):
        words = [word for line in lines[1:] for word in line.split()]
        assert sorted(words) == sorted(" ".join(row[n] for row in rows for n in shown).split())


@settings(max_examples=150)
@given(st.lists(st.tuples(WORDS, CELLS), min_size=1, max_size=4), st.integers(40, 200))
def test_text_beside_a_title_is_wrapped_without_breaking_words(
    rows: list[tuple[str, str]], width: int
) -> None:
    """A word that doesn't fit next to its title goes to the line below."""
    with patch.object(_screen, "_ENDLESS", width):
        lines = printed(_screen.facts([(title, text, "") for title, text in rows]))
    words = [word for line in lines for word in line.split()]
    assert sorted(words) == sorted(word for row in rows for word in f"{row[0]}: {row[1]}".split())
    for line in lines:
        # Only a line with a single word may be wider than the terminal.
        assert cell_len(line) <= width or len(line.split()) == 1


@pytest.mark.parametrize("width", range(40, 120))
def test_a_device_number_stays_on_one_line_with_its_uuid(width: int) -> None:
    uuid = "GPU-e4c09598-4fb0-5de0-9c83-ea9dc3a21a8a"
    with patch.object(_screen, "_ENDLESS", width):
        lines = printed(_screen.facts([("Gets", f"GPU 0 ({uuid}), 1 ({uuid}); NVIDIA H200", "")]))
    fits = cell_len(f"  1 ({uuid}),") <= width
    assert [f"{number} ({uuid})" in "\n".join(lines) for number in (0, 1)] == [fits, fits]
    assert max(map(cell_len, lines)) <= max(width, cell_len(f"  ({uuid}),"))


MODELS = ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 2g.20gb", "NVIDIA H200")


@pytest.mark.parametrize("width", range(20, 50))
def test_shortened_model_names_stay_distinct(width: int) -> None:
    rows = [(number, model) for number, model in enumerate(MODELS)]
    lines = printed(_screen.table(("N", "MODEL"), rows, cut="MODEL", width=width))
    assert len({line.split(maxsplit=1)[1] for line in lines}) == 4
    for line, model in zip(lines[1:], MODELS, strict=True):
        assert model.split()[-1] in line.split()
    assert max(map(cell_len, lines)) <= width


def test_no_color_and_dumb_terminals_disable_colours() -> None:
    assert "\x1b[31m" not in on_terminal(NO_COLOR="1")
    assert "\x1b" not in on_terminal(TERM="dumb")
