"""The gpuhook command line: one click command per file, imported only when it is called."""

import importlib
import os
import sys
from collections.abc import Mapping
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
# name -> (module, one line for --help); the module holds a click command of that name.
_COMMANDS = {
    "cdi": ("gpuhook.tools.cli.cdi", "Generate and check CDI specs for container engines."),
    "completion": ("gpuhook.tools.cli.completion", "Print a shell's completion script."),
    "config": ("gpuhook.tools.cli.config", "Show, check and change the configuration."),
    "doctor": ("gpuhook.tools.cli.doctor", "Check the installation and suggest fixes."),
    "driver-folder": (
        "gpuhook.tools.cli.driver_folder",
        "Copy the driver into one folder, for runtimes without GPU support.",
    ),
    "explain": ("gpuhook.tools.cli.explain", "Show what a container would get, and why."),
    "files": ("gpuhook.tools.cli.files", "Print a shipped file, such as a unit or man page."),
    "help": ("gpuhook.tools.cli.help", "Show the help of a command."),
    "install": ("gpuhook.tools.cli.install", "Set up container engines to use gpu-py."),
    "info": ("gpuhook.tools.cli.info", "Show the driver and the GPUs of this host."),
    "list": ("gpuhook.tools.cli.list", "List GPUs and the containers that use them."),
    "mps": ("gpuhook.tools.cli.mps", "Share GPUs between containers with NVIDIA MPS."),
    "repair": ("gpuhook.tools.cli.repair", "Restore GPU access of running containers."),
    "refresh": (
        "gpuhook.tools.cli.refresh",
        "Save the host's device inventory before containers start.",
    ),
    "uninstall": ("gpuhook.tools.cli.uninstall", "Remove the changes of install."),
    "runtime": ("gpuhook.tools.cli.runtime", "Configure an engine with the options of nvidia-ctk."),
    "simulate": (
        "gpuhook.tools.cli.simulate",
        "Build a simulated driver with GPUs that don't exist.",
    ),
    "watch": ("gpuhook.tools.cli.watch", "Keep the saved inventory up to date, as a service."),
}


def _commands() -> Mapping[str, tuple[str, str]]:
    """Return all commands: ours, and those of the installed packages."""
    return {**_COMMANDS, **extensions.commands()}


class _LazyGroup(Group):
    """A group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _commands():
            return None
        module = importlib.import_module(_commands()[cmd_name][0])
        # A command named like a Python builtin (list) has a trailing _ in its module.
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(module, name, None) or getattr(module, f"{name}_")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _commands()[name][1]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name without importing any."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=_commands()[name][1]) for name in names]
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
def cli() -> None:
    """Put GPUs into containers."""


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
