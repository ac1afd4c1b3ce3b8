"""The chart of docs/performance.md, drawn from the table of figures on the page of measurements.

usage: python3 scripts/lib/chart.py        (writes docs/images/cost.svg)

That page is the only place where the figures are written down; tests/unit/test_documents.py
fails if the chart shows others.
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/engineering/measurements.md"
CHART = REPOSITORY / "docs/images/cost.svg"

# Rows of the table that are drawn -> their names in the drawing.
ROWS = {
    "no GPU": "no GPU asked for",
    "1 GPU": "1 GPU",
    "8 GPUs": "8 GPUs",
    "8 GPUs, first after a pause": "8 GPUs, first after a pause",
    "8 GPUs, helper off": "8 GPUs, helper off",
}
PLAIN = "plain runc"
_ROW = re.compile(r"^\| ([^|]+) \| ([\d.]+) \([\d. to]+\) \| ([\d.]+) \|", re.MULTILINE)

LEFT, TOP, STEP, BAR, SCALE = 210, 62, 34, 20, 4.2  # pixels of the drawing; SCALE is pixels per ms

_STYLE = """\
    text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }
    .name { font-weight: 600; }
    .small { font-size: 12px; fill: #57606a; }
    .plain { fill: #c4ccd4; }
    .ours { fill: #0f766e; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .small { fill: #9da7b3; }
      .plain { fill: #56606c; }
      .ours { fill: #2dd4bf; }
    }"""


def figures(page: str) -> dict[str, tuple[float, float]]:
    """Return the rows of the page's table: name -> (median, added), both in milliseconds.

    ValueError if a row that is drawn is missing.
    """
    found = {name: (float(median), float(added)) for name, median, added in _ROW.findall(page)}
    missing = [name for name in (PLAIN, *ROWS) if name not in found]
    if missing:
        raise ValueError(f"{PAGE} has no row of figures for {', '.join(missing)}")
    return found


def _bar(kind: str, x: float, y: int, width: float) -> str:
    return f'  <rect class="{kind}" x="{x:.0f}" y="{y}" width="{width:.0f}" height="{BAR}"/>'


def drawn(page: str) -> str:
    """Return the chart as SVG: for each row the time of plain runc, and gpuhook's addition."""
    found = figures(page)
    plain = found[PLAIN][0]
    width = plain * SCALE
    lines = []
    for at, (row, name) in enumerate(ROWS.items()):
        added = found[row][1]
        y = TOP + at * STEP
        wide = added * SCALE
        end = LEFT + width + wide
        lines += [
            f'  <text x="{LEFT - 12}" y="{y + 15}" text-anchor="end">{name}</text>',
            _bar("plain", LEFT, y, width),
            _bar("ours", LEFT + width, y, wide),
            f'  <text x="{end + 8:.0f}" y="{y + 15}">+ {added:g} ms</text>',
        ]
    size = f"0 0 860 {TOP + len(ROWS) * STEP + 6}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img"'
    says = "; ".join(f"{name}: {found[row][1]:g} ms" for row, name in ROWS.items())
    return "\n".join(
        [
            f'{head} aria-labelledby="title desc">',
            '  <title id="title">What gpuhook adds to the life of a container</title>',
            f'  <desc id="desc">Plain runc takes {plain:g} ms. gpuhook adds: {says}.</desc>',
            f"  <style>\n{_STYLE}\n  </style>",
            '  <text class="name" x="20" y="26">Create, start, exit and delete a container</text>',
            f'  <text class="small" x="{LEFT}" y="50">plain runc: {plain:g} ms</text>',
            f'  <text class="small" x="{LEFT + width:.0f}" y="50">gpuhook adds</text>',
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    CHART.write_text(drawn(PAGE.read_text("utf-8")), "utf-8")
