"""Terminal output of the commands with rich, limited to what terminals and pipes can show.

Only the drawing modules of the command line import rich, and only when they draw. Untrusted text
(a container's name, a driver's error) never controls the terminal and is never parsed as markup.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gpuhook.base.errors import printable

GOOD, POOR, BAD, FAINT, TITLE = "green", "yellow", "red", "dim", "bold"
TONES = {"": "", "good": GOOD, "poor": POOR, "bad": BAD}
_GAP = 2  # spaces between two columns of a table
_INDENT = 2  # of a text below its title
_CUT = 20  # least width of a column whose texts may be shortened
_TITLE = 16  # least width of a fact's title, including its colon
# Width of lines in a file or a pipe: nothing is wrapped or shortened there.
_ENDLESS = 1 << 16

Lines = list[Text]


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


def text(words: object, style: str = "") -> Text:
    """Return text to show, with terminal control characters escaped."""
    return Text(printable(str(words)), style=style)


# Texts next to titles -----------------------------------------------------------------------


def facts(rows: Sequence[tuple[str, str, str]]) -> Lines:
    """Return the lines of titles and texts, each text in its tone; long texts are wrapped."""
    heads = [text(f"{title}:", TITLE) for title, _, _ in rows]
    first = 1 + max([_TITLE, *(cell_len(each.plain) for each in heads)])
    lines = []
    for head, (_, words, tone) in zip(heads, rows, strict=True):
        lines += beside(head, text(words, TONES[tone]), first)
    return lines


def beside(head: Text, body: Text, width: int) -> Lines:
    """Return a wrapped text to the right of a head of the given width.

    A text with a word that has no space there comes below its head.
    """
    full = console().width
    space = full - width
    longest = max(map(cell_len, _units(body.plain, full - _INDENT)))
    if longest > space and full - _INDENT > space:
        return [head, *_indented(_wrap(body, full - _INDENT), _INDENT)]
    first, *others = _wrap(body, space)
    return [_join([(head, width), (first, 0)]), *_indented(others, width)]


def _indented(lines: Lines, width: int) -> Lines:
    return [_join([(Text(""), width), (line, 0)]) for line in lines]


def _wrap(words: Text, width: int) -> Lines:
    """Return a text as lines of whole units; a longer one has a line of its own."""
    if cell_len(words.plain) <= width:
        return [words]
    lines = [""]
    for word in _units(words.plain, width):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and cell_len(joined) > width:
            lines.append(word)
        else:
            lines[-1] = joined
    return [Text(line, style=words.style) for line in lines]


def _units(plain: str, width: int) -> list[str]:
    """Return the words, each with what begins in brackets behind it: ``0 (GPU-...)``.

    Where both together are longer than the width, each is a unit.
    """
    units = re.split(r" (?!\()", plain)
    return [
        word for unit in units for word in ([unit] if cell_len(unit) <= width else unit.split(" "))
    ]


def _join(cells: Sequence[tuple[Text, int]]) -> Text:
    """Return a line of texts, each padded to its width."""
    line = Text()
    for cell, width in cells:
        line.append_text(cell)
        line.append(" " * (width - cell_len(cell.plain)))
    line.rstrip()
    return line


# Tables ------------------------------------------------------------------------------------


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    less: Sequence[str] = (),
    cut: str = "",
    wrap: str = "",
    width: int | None = None,
) -> Lines:
    """Return rows under a header, columns aligned; ``width`` is the terminal's if known.

    A row is one line, and no line exceeds the width. If there is too little space, the texts of
    the column with the title ``cut`` are shortened, to ``_CUT`` at least. Then the columns in
    ``less`` are dropped, one after the other; a narrow one that still fits when a wider one is
    dropped stays. If that isn't enough, the texts of the column
    ``wrap``, which are lists, are wrapped between words. Last, the longest texts are shortened.
    """
    cells = [[cell if isinstance(cell, Text) else text(cell) for cell in row] for row in rows]
    width = console().width if width is None else width
    columns = [
        _Column(title, [row[place] for row in cells], is_cut=title == cut, is_wrapped=title == wrap)
        for place, title in enumerate(header)
    ]
    shown = _arrange(columns, less, width)
    lines = [_join([(text(each.title, TITLE), each.width + _GAP) for each in shown])]
    for number in range(len(rows)):
        parts = [each.lines(number) for each in shown]
        for height in range(max(map(len, parts))):
            found = [part[height] if height < len(part) else Text("") for part in parts]
            taken = [each.width + _GAP for each in shown]
            lines.append(_join([*zip(found, taken, strict=True)]))
    for line in lines:
        line.truncate(width)  # of a terminal with less space than its columns have gaps
    return lines


class _Column:
    """A column of a table: its texts and its ``width``, from ``least`` to ``most``."""

    def __init__(self, title: str, cells: Lines, *, is_cut: bool, is_wrapped: bool) -> None:
        self.title, self._cells, self._is_wrapped = title, cells, is_wrapped
        self._briefer = _without_vendor(cells) if is_cut else cells
        lengths = [cell_len(cell.plain) for cell in cells]
        self.width = self.most = self.least = max([len(title), *lengths])
        if is_cut:
            least = [cell_len(_briefest(cell.plain)) for cell in self._briefer]
            self.least = min(self.most, max([len(title), *least]))

    def allow_wrapping(self) -> None:
        """Let the column be as narrow as its longest word, if it may be wrapped."""
        if self._is_wrapped:
            words = [cell_len(word) for cell in self._cells for word in cell.plain.split(" ")]
            self.least = max([len(self.title), *words])

    def trim(self) -> None:
        """Give up width that the shortened texts don't need."""
        if self.width < self.most:
            used = [
                cell_len(line.plain) for row in range(len(self._cells)) for line in self.lines(row)
            ]
            self.width = max([len(self.title), *used])

    def lines(self, row: int) -> Lines:
        """Return a row's text in the column's width."""
        if self.width >= self.most:
            return [self._cells[row]]
        cell = self._briefer[row]
        lines = _wrap(cell, self.width) if self._is_wrapped else [cell]
        return [
            line
            if cell_len(line.plain) <= self.width
            else Text(_shorten(line.plain, self.width), style=line.style)
            for line in lines
        ]


def _arrange(columns: Sequence[_Column], less: Sequence[str], width: int) -> Sequence[_Column]:
    """Return the columns to show, with their widths."""
    shown = columns
    for is_last in (False, True):
        for title in ("", *less):
            kept = columns if not title else [each for each in shown if each.title != title]
            shown = kept or shown
            space = width - _GAP * (len(shown) - 1)
            if sum(each.least for each in shown) <= space:
                shown = _with_room_for(columns, shown, less, width)
                _widen(shown, width - _GAP * (len(shown) - 1))
                return shown
        for each in () if is_last else columns:
            each.allow_wrapping()
    for each in shown:
        each.width = each.least
    for _ in range(sum(each.width for each in shown) - max(space, len(shown))):
        max(shown, key=lambda each: each.width).width -= 1
    return shown


def _with_room_for(
    columns: Sequence[_Column], shown: Sequence[_Column], less: Sequence[str], width: int
) -> Sequence[_Column]:
    """Return the shown columns with those dropped ones that fit, the most important first."""
    titles = {each.title for each in shown}
    for title in reversed(less):
        found = [each for each in columns if each.title in {*titles, title}]
        if sum(each.least + _GAP for each in found) - _GAP <= width:
            titles.add(title)
            shown = found
    return shown


def _widen(columns: Sequence[_Column], space: int) -> None:
    """Make columns as wide as space allows: those that need little get it, others share."""
    spare = space - sum(each.least for each in columns)
    order = sorted(columns, key=lambda each: each.most - each.least)
    for left, each in zip(range(len(columns), 0, -1), order, strict=True):
        more = min(each.most - each.least, spare // left)
        each.width, spare = each.least + more, spare - more
    for each in columns:
        each.trim()


def _without_vendor(cells: Lines) -> Lines:
    """Return models without their first word, if it is the same for all."""
    firsts = {cell.plain.partition(" ")[0] for cell in cells}
    if len(firsts) != 1 or not all(cell.plain.partition(" ")[2] for cell in cells):
        return cells
    return [Text(cell.plain.partition(" ")[2], style=cell.style) for cell in cells]


def _briefest(plain: str) -> str:
    """Return the shortest form of a text that still tells models and MIG profiles apart."""
    words = plain.split(" ")
    if len(words) > 2:
        plain = f"{words[0]} {_dots()} {words[-1]}"
    return plain if len(words) > 1 else _shorten(plain, _CUT)


def _shorten(plain: str, width: int) -> str:
    """Return a text without its middle: whole words of it if possible."""
    if cell_len(plain) <= width:
        return plain
    words = plain.split(" ")
    for kept in range(len(words) - 2, 0, -1):
        found = " ".join([*words[:kept], _dots(), words[-1]])
        if cell_len(found) <= width:
            return found
    for kept in range(min(len(plain) - 1, width), 0, -1):
        found = plain[: (kept + 1) // 2] + _dots() + plain[len(plain) - kept // 2 :]
        if cell_len(found) <= width:
            return found
    return _dots()[:width]


def _dots() -> str:
    return "…" if has_blocks() else "..."


# Output ------------------------------------------------------------------------------------


def show(*drawn: Text | Lines) -> None:
    """Print lines, and texts wrapped to the terminal's width, without trailing blanks.

    A word of a text that is longer than the terminal's width is not broken.
    """
    screen = console()
    width = screen.width
    with screen.capture() as captured:
        for each in drawn:
            for line in _wrap(each, width) if isinstance(each, Text) else each:
                screen.print(line, soft_wrap=True)
    for printed in captured.get().removesuffix("\n").split("\n"):
        click.echo(printed.rstrip(), color=True)


def bar(share: float, style: str, width: int = 12) -> Text:
    """Return a bar of the given width, filled to a share from 0 to 1."""
    full, half, rest = "━╸─" if has_blocks() else "#- "
    halves = round(min(max(share, 0.0), 1.0) * width * 2)
    filled = full * (halves // 2) + half * (halves % 2)
    return Text.assemble((filled, style), (rest * (width - len(filled)), FAINT))


def one_line(line: Text) -> Text:
    """Return a line that is cropped to the available space."""
    line.no_wrap, line.overflow = True, "crop"
    return line


def has_blocks() -> bool:
    """Tell whether the output can contain Unicode block characters."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


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
