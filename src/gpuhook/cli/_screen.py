"""What the commands draw with: rich, kept to what every terminal and every pipe can show.

Only these files of the command line import rich, and only when they draw. Text of others (a
container's name, a driver's error) never steers the terminal, nor is it read as rich's markup.
"""

import sys
from collections.abc import Sequence

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gpuhook.cli._output import printable

GOOD, POOR, BAD, FAINT, TITLE = "green", "yellow", "red", "dim", "bold"
TONES = {"": "", "good": GOOD, "poor": POOR, "bad": BAD}
_TITLE = 16  # characters for the title of a fact, with its colon, at least
# Of lines that go to a file or a pipe: nothing is wrapped or cut there.
_ENDLESS = 1 << 16


def console(*, stderr: bool = False) -> Console:
    """Return what prints to the terminal as it is now.

    With colours only where a terminal has them and neither NO_COLOR nor TERM=dumb forbids it
    (https://no-color.org); as wide as the terminal, without an end where there is none.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else _ENDLESS,
        markup=False,
        highlight=False,
        emoji=False,
    )


def facts(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Return texts, each after its title and in its tone.

    What is too long for the terminal is wrapped.
    """
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_column(min_width=_TITLE, style=TITLE, no_wrap=True)
    made.add_column(overflow="fold")
    for title, words, tone in rows:
        made.add_row(text(f"{title}:"), text(words, TONES[tone]))
    return made


def keep_whole(drawn: Table, title: str) -> Table:
    """Have the cells under a title (UUIDs, to be copied) wrapped last, and return the table.

    Only as long as they need half of the terminal at most: nothing is lost.
    """
    column = next(each for each in drawn.columns if each.header == title)
    longest = max((len(str(cell)) for cell in column.cells), default=0)
    column.no_wrap = longest <= console().width // 2
    return drawn


def text(words: object, style: str = "") -> Text:
    """Return words as they are to be shown, with whatever could steer a terminal escaped."""
    return Text(printable(str(words)), style=style)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return rows under a header, columns aligned; a cell is a text of ``text`` or any object.

    Where the terminal is too narrow, cells are wrapped and nothing is lost.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=TITLE)
    for title in header:
        made.add_column(title, overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else text(cell) for cell in row))
    return made


def beside(head: Text, body: Text, width: int) -> Table:
    """Return a text of several lines, where it is wrapped, to the right of a head of that width."""
    made = Table.grid()
    made.add_column(width=width, no_wrap=True)
    made.add_column(overflow="fold")
    made.add_row(head, body)
    return made


def show(*drawn: RenderableType) -> None:
    """Print what was drawn, no blanks at the end of its lines: so that it can be copied."""
    screen = console()
    with screen.capture() as captured:
        for each in drawn:
            screen.print(each)
    for line in captured.get().splitlines():
        click.echo(line.rstrip(), color=True)
