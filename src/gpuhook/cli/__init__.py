"""The gpuhook command line: one click command per file, imported only when it is called."""

import importlib
import sys

import click

from gpuhook import __version__
from gpuhook.errors import GpuhookError

# name -> (module, one line for --help); the module holds a click command of that name.
_COMMANDS = {
    "cdi": ("gpuhook.cli.cdi", "Make and check the CDI documents that engines read."),
    "completion": ("gpuhook.cli.completion", "Print the script for a shell's completion."),
    "configure": ("gpuhook.cli.configure", "Tell one engine, with the options of nvidia-ctk."),
    "config": ("gpuhook.cli.config", "Show, check and change the configuration."),
    "device-plugin": ("gpuhook.cli.device_plugin", "Hand the devices to a Kubernetes cluster."),
    "doctor": ("gpuhook.cli.doctor", "Check everything and say what to do about it."),
    "driver-folder": (
        "gpuhook.cli.driver_folder",
        "Put the driver into one folder, for runtimes that know no GPUs.",
    ),
    "explain": ("gpuhook.cli.explain", "Show what a container would get, and why."),
    "install": ("gpuhook.cli.install", "Tell container engines about gpu-py."),
    "info": ("gpuhook.cli.info", "Show the driver and the GPUs of this machine."),
    "list": ("gpuhook.cli.list", "Show the GPUs and which container has which."),
    "metrics": (
        "gpuhook.cli.metrics",
        "Tell Prometheus which container uses which GPU how much.",
    ),
    "repair": ("gpuhook.cli.repair", "Give back GPUs to running containers that lost them."),
    "refresh": ("gpuhook.cli.refresh", "Save what the machine has, ahead of container starts."),
    "uninstall": ("gpuhook.cli.uninstall", "Take back what install did."),
    "runtime": ("gpuhook.cli.runtime", "Hold configure, as nvidia-ctk does."),
    "simulate": ("gpuhook.cli.simulate", "Build a simulated driver with GPUs that don't exist."),
    "slurm": ("gpuhook.cli.slurm", "Write Slurm's gres.conf, and ask for a job's devices."),
    "stats": ("gpuhook.cli.stats", "Show live which container uses which GPU how much."),
    "watch": ("gpuhook.cli.watch", "Keep the saved inventory fresh, as a service."),
}


class _LazyGroup(click.Group):
    """A group that imports a command's module when the command is used or listed."""

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


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpuhook")
def cli() -> None:
    """Put GPUs into containers."""


def main() -> None:
    """Run the command line; the one place where errors become exit status 1."""
    try:
        cli(prog_name="gpuhook")
    except GpuhookError as error:
        click.echo(f"gpuhook: {error}", err=True)
        sys.exit(1)
