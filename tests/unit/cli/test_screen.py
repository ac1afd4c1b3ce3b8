"""What is drawn on terminals, and what comes out of a pipe."""

import os
import pty
import subprocess
import sys

DRAW = """
from gpuhook.tools.cli._screen import BAD, show, table, text
show(table(("N", "NAME"), [(1, "[red]\\x1b[2J:smile:"), (text("lost", BAD), "y" * 200)]))
"""


UUIDS = """
from gpuhook.tools.cli._screen import keep_whole, show, table
rows = [(n, "NVIDIA H100 80GB HBM3", "GPU-" + "z" * 28, "docker:" + "x" * 30) for n in range(2)]
show(keep_whole(table(("N", "NAME", "UUID", "CONTAINERS"), rows), "UUID"))
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


def test_what_is_to_be_copied_is_wrapped_last() -> None:
    """Nothing is lost either way."""
    wide, narrow = (on_terminal(UUIDS, COLUMNS=width) for width in ("72", "40"))
    assert wide.count("GPU-" + "z" * 28) == 2
    assert "GPU-" + "z" * 28 not in narrow
    for drawn in (wide, narrow):
        assert (drawn.count("z"), drawn.count("x")) == (2 * 28, 2 * 30)


def test_no_colours_where_they_are_not_wanted() -> None:
    assert "\x1b[31m" not in on_terminal(NO_COLOR="1")
    assert "\x1b" not in on_terminal(TERM="dumb")
