"""gpuhook list: what is said of GPUs that are lost."""

import importlib

import pytest
from machines import gpu, machine

from gpuhook.tools.running.names import Names
from gpuhook.vendors import registry

listing = importlib.import_module("gpuhook.tools.cli.list")


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ((), ""),
        ((1,), "GPU 1 has fallen off the bus (lost).\n"),
        ((1, 2), "GPUs 1, 2 have fallen off the bus (lost).\n"),
    ],
)
def test_lost_gpus_are_named_below_the_table(
    capsys: pytest.CaptureFixture[str], lost: tuple[int, ...], sentence: str
) -> None:
    there = machine(gpu(0, 3))
    there.lost = lost
    listing._show([there], registry.KNOWN, [], Names())
    printed = capsys.readouterr().out
    assert printed.startswith("INDEX")
    assert printed.partition(" -\n")[2] == sentence
    as_json = listing._as_json([there], [], Names())
    assert as_json["lost"] == [{"vendor": "nvidia", "index": index} for index in lost]
