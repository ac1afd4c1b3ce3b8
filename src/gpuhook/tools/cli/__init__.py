"""The gpuhook command line: one click command per file, imported only when it is called."""

import importlib
import os
import sys
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from gpuhook import __version__
from gpuhook.base import names
from gpuhook.base.errors import GpuhookError
from gpuhook.monitor.host import streams
from gpuhook.tools import extensions
from gpuhook.tools.cli import _completion
from gpuhook.tools.cli._help import Group

_COMPLETE = "_GPUHOOK_COMPLETE"  # set by the shells' completion scripts
# The groups of `gpuhook --help`, in order; commands without one aren't listed there.
_GROUPS = (
    "Set up", "Look", "Share and repair", "Kubernetes", "Services", "Folders and units",
)  # fmt: skip
# name -> (module, one line for --help, group); the module holds a click command of that name.
_COMMANDS = {
    "attach": (
        "gpuhook.tools.cli.attach",
        "Give a running container devices.",
        "Share and repair",
    ),
    "cdi": (
        "gpuhook.tools.cli.cdi",
        "Generate and check CDI specs for container engines.",
        "Set up",
    ),
    "completion": ("gpuhook.tools.cli.completion", "Print a shell's completion script.", "Set up"),
    "config": ("gpuhook.tools.cli.config", "Show, check and change the configuration.", "Set up"),
    "detach": (
        "gpuhook.tools.cli.attach",
        "Take attached devices away from a container.",
        "Share and repair",
    ),
    "doctor": ("gpuhook.tools.cli.doctor", "Check the installation and suggest fixes.", "Look"),
    "driver-folder": (
        "gpuhook.tools.cli.driver_folder",
        "Copy the driver into one folder, for runtimes without GPU support.",
        "Folders and units",
    ),
    "explain": ("gpuhook.tools.cli.explain", "Show what a container would get, and why.", "Look"),
    "files": ("gpuhook.tools.cli.files", "Print a shipped file, such as a unit or man page.", ""),
    "help": ("gpuhook.tools.cli.help", "Show the help of a command.", "Look"),
    "install": ("gpuhook.tools.cli.install", "Set up container engines to use gpu-py.", "Set up"),
    "info": ("gpuhook.tools.cli.info", "Show the driver and the GPUs of this host.", "Look"),
    "list": ("gpuhook.tools.cli.list", "List GPUs and the containers that use them.", "Look"),
    "mps": (
        "gpuhook.tools.cli.mps",
        "Share GPUs between containers with NVIDIA MPS.",
        "Share and repair",
    ),
    "repair": (
        "gpuhook.tools.cli.repair",
        "Restore GPU access of running containers.",
        "Share and repair",
    ),
    "refresh": (
        "gpuhook.tools.cli.refresh",
        "Save the host's device inventory before containers start.",
        "Share and repair",
    ),
    "uninstall": ("gpuhook.tools.cli.uninstall", "Remove the changes of install.", "Set up"),
    "runtime": (
        "gpuhook.tools.cli.runtime",
        "Configure an engine with the options of nvidia-ctk.",
        "Set up",
    ),
    "simulate": (
        "gpuhook.tools.cli.simulate",
        "Build a simulated driver with GPUs that don't exist.",
        "Folders and units",
    ),
    "watch": (
        "gpuhook.tools.cli.watch",
        "Keep the saved inventory up to date, as a service.",
        "Services",
    ),
}


def _commands() -> extensions.Commands:
    """Return all commands: ours, and those of the installed packages."""
    return {**_COMMANDS, **extensions.commands()}


class _LazyGroup(Group):
    """A group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _commands():
            if not ctx.resilient_parsing:
                extensions.check_command(cmd_name)
            return None
        module = importlib.import_module(_commands()[cmd_name][0])
        # A command named like a Python builtin (list) has a trailing _ in its module.
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(module, name, None) or getattr(module, f"{name}_")
        return command

    def groups(self) -> dict[str, list[str]]:
        """Return the names of the commands by the title of their group, "" for hidden ones."""
        commands = _commands()
        titles = dict.fromkeys([*_GROUPS, *(row[2] for row in commands.values() if row[2]), ""])
        found = {
            title: [name for name in sorted(commands) if commands[name][2] == title]
            for title in titles
        }
        return {title: group for title, group in found.items() if group}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of commands without importing any."""
        del ctx
        commands, groups = _commands(), self.groups()
        groups.pop("", None)
        longest = max(len(name) for group in groups.values() for name in group)
        for title, group in groups.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), commands[name][1]) for name in group])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name without importing any."""
        commands = _commands()
        shown = (name for name in sorted(commands) if commands[name][2])
        names = [name for name in shown if name.startswith(incomplete)]
        found = [CompletionItem(name, help=commands[name][1]) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples={
        "gpuhook doctor": "Show what is wrong on this host, and how to fix it",
        "gpuhook list": "Show the devices and the containers that use them",
        "gpuhook install --engine docker --dry-run": "Show what an installation would change",
        "gpuhook help install": "Show a command's description, options and examples",
    },
)
@click.version_option(__version__, prog_name="gpuhook")
@click.option("--debug", is_flag=True, help="Print each step to standard error, with its time.")
def cli(debug: bool) -> None:
    """Put GPUs into containers."""
    if debug:
        from gpuhook.tools.cli import _debug  # noqa: PLC0415 - rarely needed

        _debug.start()


def main() -> NoReturn:
    """Run the command line and exit."""
    if os.geteuid() == 0:
        os.umask(names.UMASK)
    if _COMPLETE in os.environ:
        _completion.register()
    streams.run("gpuhook", _carry_out)


def _carry_out() -> None:
    """Run the command; the only place where an error becomes exit status 1."""
    try:
        cli(prog_name="gpuhook")
    except GpuhookError as error:
        click.echo(f"gpuhook: {error}", err=True)
        sys.exit(1)
