"""Options and plan of the commands that print settings for systemd."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpuhook.base.config.loader import load
from gpuhook.core.plan.operations import Plan
from gpuhook.hpc.rootfs import requests
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._output import warn
from gpuhook.tools.root_folder.request import CallerRequest, settings

Command = TypeVar("Command", bound=Callable[..., Any])


def request_options(function: Command) -> Command:
    """Add -e, --device and --rootfs."""
    for add in (
        click.option(
            "-e", "--env", "variables", metavar="NAME[=VALUE]", multiple=True,
            shell_complete=completing.variables,
            help="Environment variable that requests devices (repeatable).",
        ),
        click.option(
            "--device", "devices", metavar="KIND=NAME", multiple=True,
            help="CDI name of a device, such as nvidia.com/gpu=0 (repeatable).",
        ),
        click.option(
            "--rootfs", metavar="DIR", default="",
            help="Root folder, whose loader must find the libraries.",
        ),
    ):  # fmt: skip
        function = add(function)
    return function


def plan(
    rootfs: str,
    variables: tuple[str, ...],
    devices: tuple[str, ...],
    config_path: str | None,
    warnings: Callable[[Plan], list[str]],
) -> tuple[Plan, list[str]]:
    """Return the plan for a request, and its variables; warn of missing parts.

    ``warnings`` returns those of the format.
    """
    asked = CallerRequest(settings(variables), devices, privileged=True)
    done, made = requests.planned(rootfs or None, asked, load(config_path))
    for warning in (*done.warnings, *warnings(made)):
        warn(warning)
    return made, done.environment
