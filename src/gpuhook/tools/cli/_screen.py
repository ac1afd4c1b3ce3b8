"""What the commands draw with: rich, kept to what every terminal and every pipe can show.

Only these files of the command line import rich, and only when they draw. Text of others (a
container's name, a driver's error) never steers the terminal, nor is it read as rich's markup.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from rich.cells import cell_len
from rich.console import Console, OverflowMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuhook.ground.errors import printable

GOOD, POOR, BAD, FAINT, TITLE = "green", "yellow", "red", "dim", "bold"
TONES = {"": "", "good": GOOD, "poor": POOR, "bad": BAD}
_GAP = 2  # columns of the terminal between two of a table
_CUT = 12  # characters that are left of a text that is cut, at least
_TITLE = 16  # characters for the title of a fact, with its colon, at least
# Of lines that go to a file or a pipe: nothing is wrapped or cut there.
_ENDLESS = 1 << 16
_PAPER = 1 << 16  # what is drawn on, wider than any table


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
    """Return texts, each after its title and in its tone; what is too long is wrapped."""
    body = [text(words, TONES[tone]) for _, words, tone in rows]
    heads = [text(f"{title}:", TITLE) for title, _, _ in rows]
    first = max([_TITLE, *(_longest_line(each) for each in heads)])
    made = Table.grid(padding=(0, 1, 0, 0), pad_edge=True)
    _add_columns(made, ["", ""], [(first, first), _need("", body)], _room(first + 2))
    for head, words in zip(heads, body, strict=True):
        made.add_row(head, words)
    return made


def text(words: object, style: str = "") -> Text:
    """Return words as they are to be shown, with whatever could steer a terminal escaped."""
    return Text(printable(str(words)), style=style)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    less: Sequence[str] = (),
    cut: str = "",
    width: int | None = None,
) -> Table:
    """Return rows under a header, columns aligned; ``width`` is the terminal's where it is known.

    A cell is a text of ``text``, a bar or any object. Where the terminal is too narrow, cells are
    wrapped between words, then columns go that are in ``less``, one after the other, and then
    lines are longer than the terminal: no word is broken. With ``cut`` each row stays one line,
    and it is the column of that title whose cells are cut in the end.
    """
    cells = [
        [cell if isinstance(cell, Text | ProgressBar) else text(cell) for cell in row]
        for row in rows
    ]
    needs = [_need(title, [row[place] for row in cells], cut) for place, title in enumerate(header)]
    width = console().width if width is None else width
    shown = [*range(len(header))]
    for title in less:
        if sum(needs[place][0] + _GAP for place in shown) - _GAP <= width:
            break
        shown = [place for place in shown if header[place] != title]
    # With the gap after the last column, too, whose width is another one in each rich without it.
    made = Table(box=None, padding=(0, _GAP, 0, 0), header_style=TITLE)
    titles = [header[place] for place in shown]
    # What is cut is redrawn in place, with blanks at the end of its lines.
    room = width - _GAP * (len(shown) - (0 if cut else 1))
    _add_columns(made, titles, [needs[place] for place in shown], room)
    for row in cells:
        kept = [row[place] for place in shown]
        made.add_row(*map(one_line, kept) if cut else kept)
    return made


_Need = tuple[int, int]  # the least width of a column, and that of its longest line


def _need(title: str, cells: Sequence[Text | ProgressBar], cut: str = "") -> _Need:
    """Return how wide a column has to be, and how wide it would be without wrapping."""
    most = max([len(title), *map(_longest_line, cells)])
    if cut:
        return (min(most, _CUT) if title == cut else most), most
    return max([len(title), *map(_longest_word, cells)]), most


def _longest_line(cell: Text | ProgressBar) -> int:
    return cell_len(cell.plain) if isinstance(cell, Text) else cell.width or 0


def _longest_word(cell: Text | ProgressBar) -> int:
    if not isinstance(cell, Text):
        return cell.width or 0
    return max(map(cell_len, cell.plain.split(" ")), default=0)


def _room(taken: int) -> int:
    return max(1, console().width - taken)


def _add_columns(made: Table, header: Sequence[str], needs: Sequence[_Need], room: int) -> None:
    """Give a table its columns, so wide that words stay whole, and as wide as there is room."""
    spare = max(0, room - sum(least for least, _ in needs))
    widths = {}
    # Who wants little gets it, the others share what is left.
    order = sorted(range(len(needs)), key=lambda place: needs[place][1] - needs[place][0])
    for left, place in zip(range(len(needs), 0, -1), order, strict=True):
        least, most = needs[place]
        more = min(most - least, spare // left)
        widths[place], spare = least + more, spare - more
    for place, title in enumerate(header):
        made.add_column(title, width=widths[place], overflow="fold")


def beside(head: Text, body: Text, width: int) -> Table:
    """Return a text of several lines, where it is wrapped, to the right of a head of that width."""
    made = Table.grid()
    _add_columns(made, ["", ""], [(width, width), _need("", [body])], _room(width))
    made.add_row(head, body)
    return made


def show(*drawn: RenderableType) -> None:
    """Print what was drawn, no blanks at the end of its lines: so that it can be copied.

    A word that is longer than the terminal goes beyond its edge.
    """
    screen = console()
    # Each column has its width, which rich would take some of where a table is too wide.
    screen.width = _PAPER
    with screen.capture() as captured:
        for each in drawn:
            screen.print(_wrapped(each) if isinstance(each, Text) else each, crop=False)
    for line in captured.get().removesuffix("\n").split("\n"):
        click.echo(line.rstrip(), color=True)


def _wrapped(words: Text) -> Table:
    made = Table.grid()
    _add_columns(made, [""], [_need("", [words])], _room(0))
    made.add_row(words)
    return made


def bar(share: float, style: str, width: int = 12) -> ProgressBar:
    """Return a bar of that many columns, of which a share, 0 to 1, is filled."""
    return ProgressBar(1.0, share, width=width, complete_style=style, finished_style=style)


def one_line(cell: RenderableType) -> RenderableType:
    """Return a text that is cut where there is no room for it, others as they are."""
    if isinstance(cell, Text):
        cell.no_wrap, cell.overflow = True, _shortened()
    return cell


def _shortened() -> OverflowMethod:
    return "ellipsis" if has_blocks() else "crop"


def has_blocks() -> bool:
    """Tell whether what is printed can have the block characters of Unicode."""
    return sys.stdout.encoding.lower().startswith("utf")


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
