"""The manual pages that are made from the command line and from config.toml are complete."""

from collections.abc import Iterator

import click
import pytest

from gpuhook.ground.config.model import KEYS
from gpuhook.tools.cli import cli
from gpuhook.tools.cli._help import Command
from gpuhook.tools.cli._manual import page


@pytest.fixture(autouse=True)
def _on_the_second_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")


def _commands(group: click.Group, path: str = "gpuhook") -> Iterator[tuple[str, click.Command]]:
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                yield from _commands(command, f"{path} {name}")
            elif not command.hidden:
                yield f"{path} {name}", command


def test_every_command_and_option_is_described() -> None:
    text = page("gpuhook.1")
    for name, command in _commands(cli):
        assert f'.Ss "{name} ' in text
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert any(option in text for option in parameter.opts), (name, parameter.opts)
        assert isinstance(command, Command)
        for line in command.examples:
            assert f'.Dl "{line}"' in text


def test_every_key_is_described() -> None:
    text = page("gpuhook.toml.5")
    for key in KEYS:
        section, _, name = key.rpartition(".")
        assert f'.It Va "{name}"' in text
        assert not section or f'.Ss "[{section}]' in text


@pytest.mark.parametrize("name", ["gpuhook.1", "gpuhook.toml.5"])
def test_no_text_is_taken_for_a_macro(name: str) -> None:
    lines = page(name).splitlines()
    assert lines[0] == ".Dd January 2, 1970"
    known = [
        ".Dd",
        ".Dt",
        ".Os",
        ".Sh",
        ".Ss",
        ".Nm",
        ".Nd",
        ".Ar",
        ".Op",
        ".Pp",
        ".Bl",
        ".It",
        ".El",
        ".Pa",
        ".Xr",
        ".Li",
        ".Dl",
    ]
    assert {line.split()[0] for line in lines if line.startswith(".")} <= set(known)
    assert not [line for line in lines if line.startswith("'") or not line]
