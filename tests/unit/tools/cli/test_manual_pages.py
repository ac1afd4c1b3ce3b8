"""Manual pages made from the command line and from config.toml, which must be complete."""

import click
import pytest
from command_lines import commands

from gpuhook.base.config.model import KEYS
from gpuhook.tools.cli import cli
from gpuhook.tools.cli._manual import page_of_simulate, pages


@pytest.fixture(autouse=True)
def _on_the_second_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")


def test_every_command_and_option_is_described() -> None:
    every = {**pages(), "gpuhook-simulate.1": page_of_simulate()}
    for name, command, _ in commands(cli, "gpuhook"):
        if isinstance(command, click.Group) or command.hidden:
            continue
        words = name.split()
        assert f".It Xr gpuhook-{words[1]} 1\n" in every["gpuhook.1"]
        text = every[f"gpuhook-{words[1]}.1"]
        assert (f'.Ss "{name} ' if len(words) > 2 else f'.Nm "{name}"\n') in text
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert any(option in text for option in parameter.opts), (name, parameter.opts)
        for line in command.examples:
            assert f'.Dl "{line}"' in text


def test_every_config_key_is_described() -> None:
    text = pages()["gpuhook.toml.5"]
    for key in KEYS:
        section, _, name = key.rpartition(".")
        assert f'.It Va "{name}"' in text
        assert not section or f'.Ss "[{section}]' in text


def test_manual_pages_stay_below_160_lines() -> None:
    """The page of one command must not contain all commands."""
    lengths = {name: text.count("\n") for name, text in pages().items() if name.endswith(".1")}
    assert max(lengths.values()) < 160, lengths


@pytest.mark.parametrize("name", pages())
def test_no_text_in_a_manual_page_is_read_as_a_macro(name: str) -> None:
    lines = pages()[name].splitlines()
    assert lines[0] == ".Dd January 2, 1970"
    known = {
        ".Dd", ".Dt", ".Os", ".Sh", ".Ss", ".Nm", ".Nd", ".Ar", ".Op", ".Pp", ".Bl", ".It", ".El",
        ".Pa", ".Xr", ".Li", ".Dl", ".Ev",
    }  # fmt: skip
    assert {line.split()[0] for line in lines if line.startswith(".")} <= known
    assert not [line for line in lines if line.startswith("'") or not line]
