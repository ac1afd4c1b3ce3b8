"""Terminal output of the commands with rich, limited to what terminals and pipes can show.

Only the drawing modules of the command line import rich, and only when they draw. Untrusted text
(a container's name, a driver's error) never controls the terminal and is never parsed as markup.
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

from gpuhook.base.errors import printable

GOOD, POOR, BAD, FAINT, TITLE = "green", "yellow", "red", "dim", "bold"
TONES = {"": "", "good": GOOD, "poor": POOR, "bad": BAD}
_GAP = 2  # spaces between two columns of a table
_CUT = 12  # least number of characters left of a truncated text
_TITLE = 16  # least width of a fact's title, including its colon
# Width of lines in a file or a pipe: nothing is wrapped or truncated there.
_ENDLESS = 1 << 16
_PAPER = 1 << 16  # width of the drawing area, wider than any table


def console(*, stderr: bool = False) -> Console:
    """Return a console for the terminal in its current state.

    Colours are used only where a terminal has them and neither NO_COLOR nor TERM=dumb forbids
    them (https://no-color.org). The width is the terminal's, unlimited without a terminal.
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
    """Return a table of titles and texts, each text in its tone; long texts are wrapped."""
    body = [text(words, TONES[tone]) for _, words, tone in rows]
    heads = [text(f"{title}:", TITLE) for title, _, _ in rows]
    first = max([_TITLE, *(_longest_line(each) for each in heads)])
    made = Table.grid(padding=(0, 1, 0, 0), pad_edge=True)
    _add_columns(made, ["", ""], [(first, first), _need("", body)], _room(first + 2))
    for head, words in zip(heads, body, strict=True):
        made.add_row(head, words)
    return made


def text(words: object, style: str = "") -> Text:
    """Return text to show, with terminal control characters escaped."""
    return Text(printable(str(words)), style=style)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    less: Sequence[str] = (),
    cut: str = "",
    width: int | None = None,
) -> Table:
    """Return rows under a header, columns aligned; ``width`` is the terminal's if known.

    A cell is a result of ``text``, a bar or any object. On a narrow terminal cells are first
    wrapped between words. Then the columns in ``less`` are dropped, one after the other. Then
    lines exceed the terminal's width: no word is broken. With ``cut`` each row stays one line,
    and the cells of the column with that title are truncated last.
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
    # Includes the gap after the last column: without it the width differs between rich versions.
    made = Table(box=None, padding=(0, _GAP, 0, 0), header_style=TITLE)
    titles = [header[place] for place in shown]
    # A table with ``cut`` is redrawn in place, with blanks at the end of its lines.
    room = width - _GAP * (len(shown) - (0 if cut else 1))
    _add_columns(made, titles, [needs[place] for place in shown], room)
    for row in cells:
        kept = [row[place] for place in shown]
        made.add_row(*map(one_line, kept) if cut else kept)
    return made


_Need = tuple[int, int]  # the minimum width of a column, and the width of its longest line


def _need(title: str, cells: Sequence[Text | ProgressBar], cut: str = "") -> _Need:
    """Return a column's minimum width, and its width without wrapping."""
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
    """Add the columns to a table, wide enough for whole words, then as wide as space allows."""
    spare = max(0, room - sum(least for least, _ in needs))
    widths = {}
    # Columns that need little get it; the others share the rest.
    order = sorted(range(len(needs)), key=lambda place: needs[place][1] - needs[place][0])
    for left, place in zip(range(len(needs), 0, -1), order, strict=True):
        least, most = needs[place]
        more = min(most - least, spare // left)
        widths[place], spare = least + more, spare - more
    for place, title in enumerate(header):
        made.add_column(title, width=widths[place], overflow="fold")


def beside(head: Text, body: Text, width: int) -> Table:
    """Return a wrapped text to the right of a head of the given width."""
    made = Table.grid()
    _add_columns(made, ["", ""], [(width, width), _need("", [body])], _room(width))
    made.add_row(head, body)
    return made


def show(*drawn: RenderableType) -> None:
    """Print drawn objects without trailing blanks, so that the text can be copied.

    A word longer than the terminal's width is not broken.
    """
    screen = console()
    # Columns have fixed widths, which rich would reduce where a table is too wide.
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
    """Return a bar of the given width, filled to a share from 0 to 1."""
    return ProgressBar(1.0, share, width=width, complete_style=style, finished_style=style)


def one_line(cell: RenderableType) -> RenderableType:
    """Return a text that is truncated to the available space; other objects unchanged."""
    if isinstance(cell, Text):
        cell.no_wrap, cell.overflow = True, _shortened()
    return cell


def _shortened() -> OverflowMethod:
    return "ellipsis" if has_blocks() else "crop"


def has_blocks() -> bool:
    """Tell whether the output can contain Unicode block characters."""
    return sys.stdout.encoding.lower().startswith("utf")


def can_redraw() -> bool:
    """Tell whether standard output is a terminal that can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


@contextmanager
def live() -> Iterator[Live]:
    """Provide a full-screen display (``update`` with refresh=True, ``refresh``).

    Nothing else may be printed meanwhile. At the end the terminal's content is restored. There
    is no thread, so the caller may fork.
    """
    with Live(
        console=console(),
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as drawn:
        yield drawn
