"""The table of time slices that nvidia-smi prints, and its use if it can't be read."""

import pytest

from gpuhook.monitor.vendors.nvidia import settings

# As nvidia-smi 535.309.01 prints it.
TABLE = """\
+-------------------------------------+
| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
|   1   Timeslice       {:<13} |
+-------------------------------------+
"""


@pytest.mark.parametrize("number", range(4))
def test_a_time_slice_is_read(number: int) -> None:
    word = ("Default", "Short", "Medium", "Long")[number]
    assert settings.parse(TABLE.format(word)) == number
    assert settings.shown(settings.SLICE, number) == word


@pytest.mark.parametrize(
    "text",
    [
        "",
        TABLE.format("Endless"),
        TABLE.replace("Timeslice", "Unknown").format("Long"),
        "Failed to get compute policies for GPU 0 : Not Supported",
        "Long",
        "| Timeslice Long |",
        "\x00\xff| | |",
    ],
)
def test_an_unreadable_time_slice_table_gives_no_value(text: str) -> None:
    assert settings.parse(text) is None


def test_setting_values_are_shown_as_words() -> None:
    assert settings.shown("compute-mode", 3) == "Exclusive_Process"
    assert settings.shown("compute-mode", 9) == "9"
    assert settings.shown("else", 1) == "1"
    assert settings.title("compute-mode") == "compute mode"
    assert settings.refusal("compute-mode", 2)
    assert not settings.refusal("compute-mode", 3)
    assert not settings.refusal("time-slice", 2)
