"""What the commands draw with: rich, kept to what every terminal and every pipe can show.

Only these files of the command line import rich, and only when they draw. Text of others (a
container's name, a driver's error) never steers the terminal, nor is it read as rich's markup.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console, OverflowMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuhook.ground.errors import printable

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


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, cut: str = "") -> Table:
    """Return rows under a header, columns aligned.

    A cell is a text of ``text``, a bar or any object. Where the terminal is too narrow, cells are
    wrapped and nothing is lost. With ``cut`` each row stays one line, and it is the column of
    that title that is cut first.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=TITLE)
    for title in header:
        made.add_column(
            title, overflow=_shortened() if cut else "fold", no_wrap=bool(cut) and title != cut
        )
    for row in rows:
        cells = [cell if isinstance(cell, Text | ProgressBar) else text(cell) for cell in row]
        made.add_row(*map(one_line, cells) if cut else cells)
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
    for line in captured.get().removesuffix("\n").split("\n"):
        click.echo(line.rstrip(), color=True)


def bar(share: float, style: str, width: int = 12) -> ProgressBar:
    """Return a bar of that many columns, of which a share, 0 to 1, is filled."""
    return ProgressBar(1.0, share, width=width, complete_style=style, finished_style=style)


def one_line(cell: RenderableType) -> RenderableType:
    """Return a text that is cut where there is no room for it, others as they are."""
    if isinstance(cell, Text):
        cell.no_wrap, cell.overflow = True, _shortened()
    return cell


def _shortened() -> OverflowMethod:
    return "ellipsis" if sys.stdout.encoding.lower().startswith("utf") else "crop"


def can_redraw() -> bool:
    """Tell whether standard output is a terminal that can draw again what it shows."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


@contextmanager
def live() -> Iterator[Live]:
    """Give what draws on the whole terminal (``update`` with refresh=True, ``refresh``).

    Nothing else may be printed meanwhile; at the end the terminal is as it was before. There is
    no thread, so the caller may fork.
    """
    with Live(
        console=console(),
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as drawn:
        yield drawn
