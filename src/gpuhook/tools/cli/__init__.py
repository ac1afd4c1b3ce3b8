"""The gpuhook command line: one click command per file, imported only when it is called."""

import importlib
import os
import sys
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from gpuhook import __version__
from gpuhook.ground import names
from gpuhook.ground.errors import GpuhookError
from gpuhook.tools.cli import _completion
from gpuhook.tools.cli._help import Group
from gpuhook.tools.host import streams

_COMPLETE = "_GPUHOOK_COMPLETE"  # what the shells' scripts set
# name -> (module, one line for --help); the module holds a click command of that name.
_COMMANDS = {
    "apply": ("gpuhook.tools.cli.apply", "Give a root folder its devices, without an engine."),
    "cdi": ("gpuhook.tools.cli.cdi", "Make and check the CDI documents that engines read."),
    "completion": ("gpuhook.tools.cli.completion", "Print the script for a shell's completion."),
    "config": ("gpuhook.tools.cli.config", "Show, check and change the configuration."),
    "device-plugin": (
        "gpuhook.tools.cli.device_plugin",
        "Hand the devices to a Kubernetes cluster.",
    ),
    "doctor": ("gpuhook.tools.cli.doctor", "Check everything and say what to do about it."),
    "dra": ("gpuhook.tools.cli.dra", "Describe the devices to a Kubernetes cluster."),
    "driver-folder": (
        "gpuhook.tools.cli.driver_folder",
        "Put the driver into one folder, for runtimes without GPU support.",
    ),
    "explain": ("gpuhook.tools.cli.explain", "Show what a container would get, and why."),
    "files": ("gpuhook.tools.cli.files", "Print a file that comes along: a page, a unit."),
    "help": ("gpuhook.tools.cli.help", "Show what a command does."),
    "install": ("gpuhook.tools.cli.install", "Set up container engines to use gpu-py."),
    "info": ("gpuhook.tools.cli.info", "Show the driver and the GPUs of this machine."),
    "labels": ("gpuhook.tools.cli.labels", "Label a cluster's node as the makers' programs do."),
    "list": ("gpuhook.tools.cli.list", "Show the GPUs and which container has which."),
    "metrics": (
        "gpuhook.tools.cli.metrics",
        "Tell Prometheus how much of each GPU every container uses.",
    ),
    "mps": ("gpuhook.tools.cli.mps", "Share GPUs between containers by NVIDIA's MPS."),
    "nspawn-arguments": (
        "gpuhook.tools.cli.nspawn_arguments",
        "Print the arguments that give a machine of systemd-nspawn devices.",
    ),
    "nri": ("gpuhook.tools.cli.nri", "Give pods their devices as a plugin of the engine."),
    "repair": ("gpuhook.tools.cli.repair", "Give back GPUs to running containers that lost them."),
    "refresh": (
        "gpuhook.tools.cli.refresh",
        "Save what the machine has, before containers start.",
    ),
    "uninstall": ("gpuhook.tools.cli.uninstall", "Undo what install did."),
    "runtime": (
        "gpuhook.tools.cli.runtime",
        "Do what install does, with the options of nvidia-ctk.",
    ),
    "simulate": (
        "gpuhook.tools.cli.simulate",
        "Build a simulated driver with GPUs that don't exist.",
    ),
    "slurm": ("gpuhook.tools.cli.slurm", "Write Slurm's gres.conf, and ask for a job's devices."),
    "stats": ("gpuhook.tools.cli.stats", "Show live how much of each GPU every container uses."),
    "unit-lines": (
        "gpuhook.tools.cli.unit_lines",
        "Print the lines by which a unit of systemd has devices.",
    ),
    "watch": ("gpuhook.tools.cli.watch", "Keep the saved inventory fresh, as a service."),
}


class _LazyGroup(Group):
    """A group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        # A command that Python has a word for already (list) ends in _ there.
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(module, name, None) or getattr(module, f"{name}_")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write which commands there are, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name, without importing any."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=_COMMANDS[name][1]) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples={
        "gpuhook doctor": "Say what is wrong with this machine, and what to do",
        "gpuhook list": "Show the devices, and which container has which",
        "gpuhook install --engine docker --dry-run": "Show what an installation would change",
        "gpuhook help install": "Show what a command does, with its options and examples",
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
    """Carry out the command; the one place where errors become exit status 1."""
    try:
        cli(prog_name="gpuhook")
    except GpuhookError as error:
        click.echo(f"gpuhook: {error}", err=True)
        sys.exit(1)
