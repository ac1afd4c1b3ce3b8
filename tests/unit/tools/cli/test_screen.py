"""What is drawn on terminals, and what comes out of a pipe."""

import io
import os
import pty
import subprocess
import sys
from contextlib import redirect_stdout

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from gpuhook.tools.cli import _screen

DRAW = """
from gpuhook.tools.cli._screen import BAD, show, table, text
show(table(("N", "NAME"), [(1, "[red]\\x1b[2J:smile:"), (text("lost", BAD), "y" * 200)]))
"""


UUIDS = """
from gpuhook.tools.cli._screen import show, table
rows = [(n, "NVIDIA H100 80GB HBM3", "GPU-" + "z" * 28, "docker:" + "x" * 30) for n in range(2)]
show(table(("N", "NAME", "UUID", "CONTAINERS"), rows, less=("NAME",)))
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
            pass  # a terminal whose other end is closed
        os.close(ours)
        assert process.wait() == 0
    return found.decode()


def test_a_pipe_gets_plain_lines_as_long_as_they_are() -> None:
    expected = "N     NAME\n1     [red]\\x1b[2J:smile:\nlost  " + "y" * 200 + "\n"
    assert piped() == expected
    assert piped(COLUMNS="40", TERM="dumb") == expected


def test_a_terminal_has_colours_and_loses_nothing() -> None:
    drawn = on_terminal()
    assert "\x1b[31mlost\x1b[0m" in drawn
    assert "\x1b[2J" not in drawn
    assert drawn.count("y") == 200


def test_what_is_to_be_copied_is_never_broken() -> None:
    """Where there is no room, cells are wrapped between words, then columns go."""
    for width, has_model in (("200", True), ("88", True), ("80", False), ("40", False)):
        drawn = on_terminal(UUIDS, COLUMNS=width)
        assert drawn.count("GPU-" + "z" * 28) == drawn.count("docker:" + "x" * 30) == 2
        assert ("H100" in drawn) is has_model


WORDS = st.text("abc-/:.é漢", min_size=1, max_size=70)
CELLS = st.lists(WORDS, max_size=4).map(" ".join)


@settings(max_examples=150)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    st.integers(1, 120),
    st.booleans(),
)
def test_no_word_is_ever_broken(rows: list[list[str]], width: int, some_go: bool) -> None:
    """And no line is longer than the terminal where every column's longest word has room."""
    header = [f"T{number}" for number in range(len(rows[0]))]
    drawn = _screen.table(header, rows, less=header[1:] if some_go else (), width=width)
    with redirect_stdout(io.StringIO()) as file:
        _screen.show(drawn)
    lines = file.getvalue().split("\n")
    shown = [header.index(title) for title in lines[0].split()]
    printed = [word for line in lines[1:] for word in line.split()]
    assert sorted(printed) == sorted(" ".join(row[n] for row in rows for n in shown).split())
    least = [
        max(2, *(cell_len(word) for row in rows for word in [*row[n].split(), ""])) for n in shown
    ]
    if sum(least) + 2 * (len(shown) - 1) <= width:
        assert max(map(cell_len, lines)) <= width
    else:
        assert len(shown) == 1 or not some_go


def test_no_colours_where_they_are_not_wanted() -> None:
    assert "\x1b[31m" not in on_terminal(NO_COLOR="1")
    assert "\x1b" not in on_terminal(TERM="dumb")
