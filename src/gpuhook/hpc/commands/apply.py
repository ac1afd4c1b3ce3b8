"""gpuhook apply: give a root folder its devices, for programs that are no container engine."""

import os
from typing import Any

import click

from gpuhook.base.config.loader import load
from gpuhook.base.errors import FolderError
from gpuhook.core.resolve import Progress, resolve
from gpuhook.hpc.rootfs import appended, work
from gpuhook.hpc.rootfs import fstab as fstab_lines
from gpuhook.hpc.slurm import job
from gpuhook.tools import root_folder
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._explanation import Explanation
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json, say, warn
from gpuhook.tools.engines.prefix import state_folder
from gpuhook.tools.root_folder.request import STDOUT, CallerRequest, environment, settings
from gpuhook.vendors import registry

_VARIABLE = next(iter(registry.BUILT_IN["nvidia"].VARIABLES))
_KIND = registry.BUILT_IN["nvidia"].KIND


@command(
    examples={
        f"gpuhook apply --rootfs /srv/root -e {_VARIABLE}=0": "Give the folder the first GPU",
        f"gpuhook apply --rootfs /srv/root --device {_KIND}=all --dry-run": "Show each step",
        "gpuhook apply --rootfs /srv/root --undo": "Make the folder what it was",
        f"gpuhook apply --rootfs . -e {_VARIABLE}=all --fstab - --environ -": "Print what to mount",
    },
)
@click.option("--rootfs", metavar="DIR", required=True, help="The root folder.")
@click.option(
    "-e", "--env", "variables", metavar="NAME[=VALUE]", multiple=True,
    shell_complete=completing.variables,
    help="A variable that asks, as a container's would; may be repeated.",
)  # fmt: skip
@click.option(
    "--device", "devices", metavar="KIND=NAME", multiple=True,
    help="A device by its CDI name, such as nvidia.com/gpu=0; may be repeated.",
)  # fmt: skip
@click.option(
    "--environ", metavar="FILE", default="",
    help="The folder's environment, NAME=VALUE lines: it may ask for devices, and variables that "
    "they need are added; - prints these.",
)  # fmt: skip
@click.option(
    "--fstab", metavar="FILE", default="",
    help="Write fstab entries to this file instead of mounting; - prints them.",
)  # fmt: skip
@click.option("--privileged", is_flag=True, help="As if a privileged container asked.")
@click.option(
    "--default", "defaults", metavar="NAME=VALUE", multiple=True,
    help="Default for an unset variable; may be repeated.",
)  # fmt: skip
@click.option(
    "--own-environment", "own", is_flag=True,
    help="Take the vendors' variables in the caller's environment, before those of --environ.",
)  # fmt: skip
@click.option(
    "--slurm", is_flag=True,
    help="Give the devices that Slurm has given to this job, whatever else is asked for.",
)  # fmt: skip
@click.option("--undo", is_flag=True, help="Remove the devices.")
@click.option("--no-undo", is_flag=True, help="Store nothing: the devices can't be removed later.")
@click.option("--dry-run", is_flag=True, help="Show every step, and change nothing.")
@click.option("--state-dir", metavar="DIR", help="The folder of the data for --undo.")
@config_option
@format_option
def apply(
    rootfs: str,
    environ: str,
    fstab: str,
    undo: bool,
    no_undo: bool,
    dry_run: bool,
    state_dir: str | None,
    slurm: bool,
    config_path: str | None,
    output_format: str,
    **asked: Any,
) -> None:
    """Give a root folder the requested devices, as the hook gives them to a container.

    They are mounted in the folder, in the current mount namespace. Works as root of a user
    namespace as well. Groups and the device cgroup are left to the program that starts processes
    there. Nothing in the folder is trusted, and nothing is created where a volume is mounted in
    it. A folder that has devices gets the new ones in their place.
    """
    if not rootfs:
        raise click.UsageError("--rootfs names no folder: it is empty, as of a variable not set.")
    rootfs = os.path.abspath(rootfs)
    state = "" if no_undo else state_folder(state_dir, "")
    if undo:
        _undo(rootfs, state)
        return
    given = _asked(rootfs, environ, **asked)
    if dry_run and not fstab:
        _explain(rootfs, given, config_path, output_format)
        return
    config = load(config_path)
    root_folder.settle(config)
    vendors = registry.all_vendors(config)
    spec = given.spec(config, vendors)
    if slurm:
        spec = job.given(spec, config)
    resolved = resolve(spec.data, config, vendors, Progress())
    if resolved is None or not (resolved.grants or resolved.cdi_devices):
        # protects: devices-of-before
        said = work.take_back(rootfs, state) if state and not fstab else []
        said = [*(resolved.absent if resolved else []), *said]
        _say(work.WorkResult(warnings=said), rootfs, output_format)
        return
    if fstab:
        done = work.lines(rootfs, resolved, config, spec)
    else:
        done = work.give(rootfs, resolved, config, spec, state)
    before = environment(environ, rootfs) if environ else {}
    done.environment = fstab_lines.settings(done.operations, before)
    if not dry_run:
        _add(fstab, done.fstab, rootfs)
        _add(environ, done.environment, rootfs)
    _say(done, rootfs, output_format, printed=(fstab == STDOUT, environ == STDOUT))


def _asked(
    rootfs: str,
    environ: str,
    *,
    variables: tuple[str, ...],
    devices: tuple[str, ...],
    defaults: tuple[str, ...],
    privileged: bool,
    own: bool,
) -> CallerRequest:
    usual = tuple((name, value or "") for name, value in settings(defaults))
    return CallerRequest(settings(variables), devices, environ, privileged, usual, own, rootfs)


def _undo(rootfs: str, state: str) -> None:
    if not state:
        raise click.UsageError("--undo needs what --no-undo forgets: give one of them.")
    say(f"{rootfs}: {work.undo(rootfs, state)}")


def _explain(
    rootfs: str, given: CallerRequest, config_path: str | None, output_format: str
) -> None:
    """Print what would be done, as gpuhook explain --rootfs does; status 1 if it would fail."""
    explanation = Explanation()
    config = load(config_path)
    spec = given.spec(config, registry.all_vendors(config))
    explanation.follow(spec, rootfs, config_path, folder=True)
    if output_format == "json":
        print_json(explanation.to_json())
    else:
        click.echo(explanation.to_text())
    if explanation.error:
        raise SystemExit(1)


def _add(path: str, lines: list[str], rootfs: str) -> None:
    """Append lines to a file, or print them; FolderError on failure."""
    text = "".join(f"{line}\n" for line in lines)
    if not path or not text:
        return
    if path == STDOUT:
        click.echo(text, nl=False)
        return
    try:
        appended.append(path, text, rootfs)
    except OSError as error:
        raise FolderError(
            f"{path} can't be written: {error.strerror}", "Name a file that can be written to"
        ) from None


def _say(
    done: work.WorkResult,
    rootfs: str,
    output_format: str,
    printed: tuple[bool, bool] = (False, False),
) -> None:
    """Print what was done; printed lines are the only text on standard output."""
    if output_format == "json":
        print_json(
            {
                "rootfs": rootfs,
                "operations": [op.to_json() for op in done.operations],
                "undone": [op.to_json() for op in done.undone],
                "fstab": done.fstab,
                "environment": done.environment,
                "warnings": done.warnings,
            }
        )
        return
    for warning in done.warnings:
        warn(warning)
    if any(printed):
        return
    if not done.operations:
        say(f"{rootfs}: no device is asked for")
        return
    what = "lines for" if done.fstab else "given"
    say(f"{rootfs}: {what} {len(done.operations)} steps")
