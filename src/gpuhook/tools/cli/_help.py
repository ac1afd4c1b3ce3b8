"""Help output of the commands: whole sentences, examples, and suggestions for misspelt words."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from gpuhook.base.errors import shown
from gpuhook.core.suggest import did_you_mean, similar
from gpuhook.tools.cli import _completion

_SENTENCE = re.compile(r".*?[.](?=\s|$)", re.DOTALL)


class SecondsParam(click.types.FloatParamType):
    """A number of seconds within limits, with a clear error."""

    name = "seconds"

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; UsageError for no number, or one outside the limits."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not self._least <= seconds <= self._most:  # so is nan
            limits = f"{self._least:g} to {self._most:g}"
            self.fail(f"{shown(str(value))} isn't a number of seconds from {limits}.", param, ctx)
        return seconds


class Command(click.Command):
    """A command whose help ends with examples: command lines with their meaning."""

    def __init__(
        self, *given: Any, examples: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(*given, **settings)
        self.examples = dict(examples or {})
        self.help = self.help and self.help.replace("``", "")
        for parameter in self.params:
            _completion.complete_files(parameter)

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the whole first sentence of the help; a long one is wrapped, not cut."""
        del limit
        return self.short_help or first_sentence(self.help or "")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, each on one line of any length, so that it can be copied."""
        if self.examples:
            with formatter.section("Examples"):
                for line, meaning in self.examples.items():
                    indent = " " * formatter.current_indent
                    formatter.write(f"{indent}# {meaning}\n{indent}{line}\n")
        super().format_epilog(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line; for a wrong word suggest the options that it may mean."""
        try:
            ctx.allow_extra_args = True  # click would refuse them with no hint
            over = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            every = (each for each in self.get_params(ctx) if isinstance(each, click.Option))
            known = [word for each in every if not each.hidden for word in each.opts]
            question = did_you_mean(similar(error.option_name, known))
            raise click.UsageError(f"No such option {error.option_name}.{question}", ctx) from None
        if over and not isinstance(self, click.Group) and not ctx.resilient_parsing:
            question = did_you_mean(self._options_taking(over[0], ctx))
            raise click.UsageError(f"Unexpected argument {shown(over[0])}.{question}", ctx)
        return over

    def _options_taking(self, word: str, ctx: click.Context) -> list[str]:
        """Return the options that accept a word as a choice, each with the word."""
        return [
            f"{option.opts[0]} {word}"
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            and isinstance(option.type, click.Choice)
            and word in option.type.choices
        ]


class Group(Command, click.Group):
    """A group of commands that suggests similar names for an unknown one."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command named by the first word, as click does."""
        known = self.get_command(ctx, args[0])
        if known is None and not ctx.resilient_parsing and not args[0].startswith("-"):
            raise no_such_command(self, ctx, args[0])
        return super().resolve_command(ctx, args)


# Groups within a group use this class, too.
Group.group_class = Group


def command(
    name: str | None = None, *, examples: Mapping[str, str], **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Turn a function into a command, as click.command does; examples are line -> meaning."""
    return click.command(name, cls=Command, examples=examples, **settings)


def group(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], click.Group]:
    """Turn a function into a group of commands, as click.group does."""
    return click.group(name, cls=Group, **settings)


def no_such_command(among: click.Group, ctx: click.Context, word: str) -> click.UsageError:
    """Return the error for a word that names no command of a group."""
    question = did_you_mean(similar(word, among.list_commands(ctx)))
    return click.UsageError(f"No such command {shown(word)}.{question}", ctx)


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, on one line."""
    found = _SENTENCE.match(text)
    return " ".join((found[0] if found else text).split())
