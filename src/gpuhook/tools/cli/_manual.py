"""Generator of the manual pages gpuhook.1, gpuhook-COMMAND.1 and gpuhook.toml.5.

Section 1 is made from the commands' help, section 5 from the commented config.toml, so no page
becomes outdated. All are in mdoc(7). The date comes from SOURCE_DATE_EPOCH, or from the
installation, so a page changes only when its content does.
"""

import os
import re
import textwrap
import time
from collections.abc import Iterator
from importlib import resources

import click

from gpuhook.tools.cli import cli
from gpuhook.tools.cli._help import Command
from gpuhook.tools.extensions import MAIN, package_of

_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")
_WIDTH = 78
_SIMULATE = "simulate"
_UNLISTED = "Others"  # title of the commands that gpuhook --help doesn't list
_KEY = re.compile(r"#([a-z][a-z0-9-]*) = (.*)")


def pages() -> dict[str, str]:
    """Return all pages by file name, except the page of ``gpuhook simulate``."""
    found = {"gpuhook.1": overview(), "gpuhook.toml.5": config_page()}
    with click.Context(cli, info_name="gpuhook") as context:
        for name, command in _commands(context):
            if name != _SIMULATE:
                found[f"gpuhook-{name}.1"] = command_page(command, name, context)
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


def page_of_simulate() -> str:
    """Return gpuhook-simulate.1, which belongs to the package of that name."""
    with click.Context(cli, info_name="gpuhook") as context:
        commands = dict(_commands(context))
        return "\n".join(command_page(commands[_SIMULATE], _SIMULATE, context)) + "\n"


def _commands(context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None and not command.hidden:
            yield name, command


def _date() -> str:
    seconds = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", os.stat(__file__).st_mtime)))
    return f"{time.strftime('%B', seconds)} {seconds.tm_mday}, {seconds.tm_year}"


def _head(name: str, section: int, description: str) -> list[str]:
    return [
        f".Dd {_date()}",
        f".Dt {name.upper()} {section}",
        ".Os",
        ".Sh NAME",
        f".Nm {name}",
        f".Nd {description}",
    ]


def text(words: str) -> Iterator[str]:
    """Yield running text, each sentence on its own lines, with macro characters escaped."""
    plain = " ".join(words.replace("``", "").replace("\b", "").split())
    for sentence in _SENTENCE_END.split(plain) if plain else ():
        escaped = sentence.replace("\\", "\\e")
        for line in textwrap.wrap(escaped, _WIDTH, break_long_words=False, break_on_hyphens=False):
            yield f"\\&{line}" if line.startswith((".", "'")) else line


def _argument(word: str) -> str:
    """Return a word as an argument on a macro's line."""
    closed = word + "\\&" if word.endswith((")", "]", "...")) else word
    return '"' + closed.replace("\\", "\\e").replace("\\e&", "\\&").replace('"', '""') + '"'


def overview() -> Iterator[str]:
    """Yield gpuhook.1."""
    yield from _head("gpuhook", 1, "put GPUs into containers")
    yield from (".Sh SYNOPSIS", ".Nm", ".Ar command", ".Op Ar arguments", ".Sh DESCRIPTION", ".Nm")
    yield from text(
        "is the command line of gpuhook, which puts GPUs and the driver's files into "
        "containers that request them. It registers the runtime gpu-py with container engines, "
        "shows what a container would get, and diagnoses problems."
    )
    yield from text("Each command has a page of its own, such as gpuhook-explain(1).")
    yield ".Sh COMMANDS"
    with click.Context(cli, info_name="gpuhook") as context:
        commands = dict(_commands(context))
        for title, names in cli.groups().items():
            yield f".Ss {_argument(title or _UNLISTED)}"
            yield ".Bl -tag -width Ds"
            for name in filter(commands.__contains__, names):
                yield f".It Xr gpuhook-{name} 1"
                yield from text(commands[name].get_short_help_str())
                if (package := package_of(name)) != MAIN:
                    yield from text(f"Debian and rpm systems have it in the package {package}.")
            yield ".El"
        yield ".Sh OPTIONS"
        yield from _options(cli, context)
    yield from _tail()


def command_page(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """Yield the page of a command, or of a group with all its commands."""
    about = command.get_short_help_str().removesuffix(".")
    yield from _head(f"gpuhook-{name}", 1, about[:1].lower() + about[1:])
    yield ".Sh SYNOPSIS"
    yield f".Nm {_argument(f'gpuhook {name}')}"
    if isinstance(command, click.Group):
        yield from (".Ar command", ".Op Ar arguments", ".Sh COMMANDS")
        yield from _command(command, name, parent)
    else:
        with click.Context(command, info_name=name, parent=parent) as context:
            for piece in command.collect_usage_pieces(context):
                yield f".Ar {_argument(piece.replace('[OPTIONS]', '[options]'))}"
            yield ".Sh DESCRIPTION"
            yield from _body(command, context)
    yield from (".Sh SEE ALSO", ".Xr gpuhook 1 ,", ".Xr gpuhook.toml 5")


def _command(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=parent) as context:
        path = context.command_path.partition(" ")[2]
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                if found is not None:
                    yield from _command(found, inner, context)
            return
        usage = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS]", "[options]")
        yield f".Ss {_argument(f'gpuhook {path} {usage}'.strip())}"
        yield from _body(command, context)


def _body(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the part of a command's help below its usage."""
    for number, paragraph in enumerate((command.help or "").split("\n\n")):
        if number:
            yield ".Pp"
        yield from text(paragraph)
    yield from _options(command, context)
    yield from _examples(command)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    records = [option.get_help_record(context) for option in options]
    shown = [record for record in records if record is not None and "--help" not in record[0]]
    if not shown:
        return
    yield ".Bl -tag -width Ds"
    for spelled, meaning in shown:
        yield f".It Li {_argument(spelled)}"
        yield from text(meaning or "")
    yield ".El"


def _examples(command: click.Command) -> Iterator[str]:
    examples = command.examples if isinstance(command, Command) else {}
    for line, meaning in examples.items():
        yield ".Pp"
        yield from text(f"{meaning}:")
        yield f".Dl {_argument(line)}"


def _tail() -> Iterator[str]:
    yield from (".Sh ENVIRONMENT", ".Bl -tag -width Ds", ".It Ev GPUHOOK_CONFIG")
    yield "Path of a configuration file to use instead of the one below."
    yield from (".El", ".Sh FILES", ".Bl -tag -width Ds", ".It Pa /etc/gpuhook/config.toml")
    yield from ("The configuration, see", ".Xr gpuhook.toml 5 .", ".It Pa /run/gpuhook")
    yield from ("The saved inventory of the host; it may be deleted at any time.",)
    yield from (
        ".It Pa /var/lib/gpuhook",
        "Records of the changes by install, and of the files it keeps up to date.",
    )
    yield ".El"
    yield from (".Sh EXIT STATUS", ".Nm")
    yield from text("exits with 0 on success, 1 on failure and 2 on a wrong command line.")
    yield from (".Nm gpuhook doctor", "exits with 1 if it has warnings and 2 if it has failures.")
    yield from (".Sh SEE ALSO", ".Xr gpu-docker 1 ,", ".Xr gpuhook-simulate 1 ,")
    yield from (".Xr gpuhook.toml 5 ,", ".Xr gpu-py 8 ,", ".Xr gpuhook-prestart 8")


def config_page() -> Iterator[str]:
    """Yield gpuhook.toml.5."""
    yield from _head("gpuhook.toml", 5, "configuration of gpuhook")
    yield from (".Sh SYNOPSIS", ".Pa /etc/gpuhook/config.toml", ".Sh DESCRIPTION")
    comments: list[str] = []
    is_list_open = False
    lines = (resources.files("gpuhook") / "tools/config/config.toml").read_text("utf-8")
    for line in lines.split("\n"):
        key = _KEY.fullmatch(line)
        if line.startswith("["):
            yield from [".El"] if is_list_open else []
            yield f".Ss {_argument(line)}"
            is_list_open = False
        elif key:
            yield from [] if is_list_open else [".Bl -tag -width Ds"]
            yield f".It Va {_argument(key[1])}"
            yield from _comment(comments)
            yield "The default is"
            yield f".Li {_argument(key[2])} ."
            comments, is_list_open = [], True
        elif line.startswith("#"):
            comments.append(line[1:])
        elif comments:
            yield from _comment(comments)
            comments = []
    yield from [".El"] if is_list_open else []
    yield from (".Sh SEE ALSO", ".Xr gpuhook 1 ,", ".Xr gpu-py 8 ,", ".Xr gpuhook-prestart 8")


def _comment(lines: list[str]) -> Iterator[str]:
    """Yield a comment's paragraphs; indented lines are kept unchanged."""
    running: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("   "):
            yield from text(" ".join(running)) if running else ()
            running = []
            yield from (".Dl " + _argument(line.strip()),)
        elif line.strip():
            running.append(line)
        elif running:
            yield from text(" ".join(running))
            running = []
