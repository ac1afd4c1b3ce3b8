"""Help texts: complete sentences, an example for every command, and hints for misspelt words."""

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_lines import WIDTH, commands

from gpuhook.tools.cli import _commands, cli
from gpuhook.tools.cli._help import Command, SecondsParam

_OPTION_HELP = re.compile(r"[A-Z].*[.](  \[[^]]*\])?")


EVERY = {path: (command, context) for path, command, context in commands(cli, "gpuhook")}
EXAMPLES = [
    (path, line)
    for path, (command, _) in EVERY.items()
    if path not in ("gpuhook", "gpuhook runtime configure")
    for line in command.examples
]


def run(*words: str) -> str:
    done = CliRunner().invoke(cli, words, prog_name="gpuhook", terminal_width=WIDTH)
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", EVERY)
def test_help_texts_are_complete_sentences(path: str) -> None:
    command, context = EVERY[path]
    text = command.get_help(context)
    assert "`" not in text
    assert "..." not in command.get_short_help_str()
    first, *_ = (command.help or "").split("\n\n")
    assert re.fullmatch(r"[A-Z].*[.:]", " ".join(first.split()))
    assert command.get_short_help_str().endswith(".")


@pytest.mark.parametrize("path", EVERY)
def test_every_option_is_explained(path: str) -> None:
    command, context = EVERY[path]
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option) and not parameter.hidden:
            text = parameter.help or ""
            assert _OPTION_HELP.fullmatch(" ".join(text.split(" "))), (parameter.opts, text)


@pytest.mark.parametrize("path", EVERY)
def test_every_command_has_an_example(path: str) -> None:
    command, context = EVERY[path]
    assert command.examples or isinstance(command, click.Group)
    lines = command.get_help(context).splitlines()
    for line, meaning in command.examples.items():
        assert [f"  # {meaning}", f"  {line}"] in [list(pair) for pair in itertools.pairwise(lines)]
        assert re.fullmatch(r"[A-Z].*[^.]", meaning)
        assert len(meaning) < WIDTH


@pytest.mark.parametrize(("path", "line"), EXAMPLES)
def test_examples_are_valid_command_lines(path: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])
    assert words[: len(path.split())] == path.split()
    command, context = EVERY[path]
    with command.make_context(words[-1], words[len(path.split()) :], parent=context.parent) as made:
        assert made.command is command


def test_examples_of_the_main_help_are_valid_command_lines() -> None:
    assert isinstance(cli, Command)
    for line in cli.examples:
        program, name, *words = shlex.split(line)
        command, context = EVERY[f"{program} {name}"]
        command.make_context(name, words, parent=context.parent).close()


def test_the_main_help_describes_every_listed_command() -> None:
    """Commands are in groups; those that few users need are in the manual and the reference."""
    text = run("--help")
    groups = cli.groups()
    every = _commands()
    assert sorted(name for names in groups.values() for name in names) == sorted(every)
    assert groups.pop("") == ["files", "ps", "top", "unit-lines"]
    assert [line[:-1] for line in text.splitlines() if line[:-1] in groups] == [*groups]
    for title, names in groups.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert names
        for name in names:
            sentence = every[name][1]
            assert sentence.endswith(".")
            assert re.search(rf"^  {name} +{sentence.split()[0]}", section, re.MULTILINE)
            assert sentence in " ".join(section.split())
    assert "unit-lines" not in text
    assert "Usage: gpuhook unit-lines" in run("unit-lines", "--help")


@pytest.mark.parametrize("path", EVERY)
def test_help_before_a_command_prints_the_commands_help(path: str) -> None:
    words = path.split()[1:]
    assert run("help", *words) == run(*words, "--help").replace("-h, --help", "-h, --help")


def test_help_for_an_unknown_command_suggests_a_name() -> None:
    assert "No such command 'instal'. Did you mean install" in run("help", "instal")
    assert "No such command 'lst'. Did you mean list?" in run("help", "cdi", "lst")
    assert "gpuhook list has no commands of its own." in run("help", "list", "all")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("lst", "No such command 'lst'. Did you mean list?"),
        ("cdi generat", "No such command 'generat'. Did you mean generate?"),
        ("cdi transform rot", "No such command 'rot'. Did you mean root?"),
        ("install --set-defualt", "No such option --set-defualt. Did you mean --set-default?"),
        ("list --formt=json", "No such option --formt. Did you mean --format?"),
        ("--versoin", "No such option --versoin. Did you mean --version?"),
        ("quux", "No such command 'quux'.\n"),
        ("list --quux", "No such option --quux.\n"),
        ("install -q", "No such option -q.\n"),
        ("device-plugin --mig-stratgy", "Did you mean --mig-strategy?"),
        ("install docker", "Unexpected argument 'docker'. Did you mean --engine docker?"),
        ("doctor json", "Unexpected argument 'json'. Did you mean --format json?"),
        ("explain one two", "Unexpected argument 'two'.\n"),
        ("stats --interval 0", "'0' isn't a number of seconds from 0.2 to 86400.\n"),
        ("watch --interval soon", "'soon' isn't a number of seconds from 0.1 to 86400.\n"),
        ("repair", "Error: Name the containers, or use only --all.\n"),
    ],
)
def test_unknown_commands_and_options_are_refused_with_a_suggestion(line: str, answer: str) -> None:
    done = CliRunner().invoke(cli, line.split(), prog_name="gpuhook", terminal_width=WIDTH)
    assert done.exit_code == 2
    assert answer in done.stderr


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0.09", "11", ""])
def test_seconds_outside_the_limits_are_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match=r"isn't a number of seconds from 0[.]1 to 10[.]"):
        SecondsParam(0.1, 10.0).convert(text, None, None)
    assert SecondsParam(0.1, 10.0).convert("0.1", None, None) == 0.1


def test_metrics_refuses_textfile_together_with_listen(tmp_path: Path) -> None:
    done = run("metrics", f"--textfile={tmp_path / 'gpus.prom'}", "--listen=127.0.0.1:9836")
    assert "Error: --textfile serves nothing: it doesn't go with --listen.\n" in done
    assert not [*tmp_path.iterdir()]


def test_hidden_options_are_not_suggested() -> None:
    hidden = [each for each in EVERY["gpuhook device-plugin"][0].params if
              isinstance(each, click.Option) and each.hidden]  # fmt: skip
    assert hidden
    for option in hidden:
        done = run("device-plugin", f"{option.opts[0]}x")
        assert not re.search(rf"Did you mean .*{option.opts[0]}\b", done)


def test_install_help_explains_the_gpus_option() -> None:
    text = " ".join(run("install", "--help").split())
    assert re.search(r"--gpus / --no-gpus .*docker, ctr and podman work, and .* compose", text)
    assert "(formerly --nvidia-names)" in text
    assert not re.search(r"--nvidia-names /", text)
