"""The chart on the page of figures shows the figures of that page."""

import chart
import pytest

PAGE = chart.PAGE.read_text("utf-8")


def test_the_chart_shows_the_pages_figures() -> None:
    """If this fails, run python3 scripts/lib/chart.py."""
    assert chart.CHART.read_text("utf-8") == chart.drawn(PAGE)


def test_another_figure_is_another_drawing() -> None:
    median, added = chart.figures(PAGE)["8 GPUs"]
    assert 0 < added < median
    assert chart.drawn(PAGE.replace(f"| {added} |", "| 99.5 |")).count("+ 99.5 ms") == 1


def test_a_row_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="no row of figures for 8 GPUs, helper off"):
        chart.figures(PAGE.replace("| 8 GPUs, helper off |", "| helper off |"))
