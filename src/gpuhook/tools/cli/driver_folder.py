"""gpuhook driver-folder: a copy of the driver in one folder, for runtimes without GPU support."""

import sys
from typing import Any

import click

from gpuhook.base.config.loader import load
from gpuhook.base.errors import NoDriverError
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json, say
from gpuhook.tools.driver_folder import keep as keeping
from gpuhook.tools.vendors.nvidia.driver_folder import content_of
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.names import NAME

_GONE = "; an existing driver folder is kept unchanged"


@command(
    "driver-folder",
    examples={
        "gpuhook driver-folder /srv/nvidia": "Create or update the folder",
        "gpuhook driver-folder --check --format json /srv/nvidia": "Compare it, for programs",
        "gpuhook driver-folder --remove /srv/nvidia": "Remove it",
    },
)
@click.argument("directory", metavar="DIR")
@click.option(
    "--capabilities", metavar="LIST", default="all", show_default=True,
    shell_complete=completing.capabilities,
    help="Driver capabilities to include, as in a container's request.",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Only check: exit with status 1 if DIR is out of date.")
@click.option("--remove", "removing", is_flag=True, help="Remove the folder.")
@config_option
@format_option
def driver_folder(
    directory: str,
    capabilities: str,
    check: bool,
    removing: bool,
    config_path: str | None,
    output_format: str,
) -> None:
    """Copy this host's NVIDIA driver into DIR: bin, lib (32-bit) and lib64.

    Mounted read-only at /usr/local/nvidia, it provides nvidia-smi, CUDA and the rest of the
    driver to a container of a CUDA image with any runtime. Run it again when the driver has
    changed. DIR is replaced atomically: running containers keep the old driver, new ones get
    the new one.
    """
    as_json = output_format == "json"
    if removing:
        _remove(directory, as_json=as_json)
        return
    config = load(config_path)
    vendor = contract.load(registry.all_vendors(config)[NAME])
    try:
        inventory = cache.get_inventory(config, vendor)
    except NoDriverError as error:
        raise NoDriverError(error.cause + _GONE, error.remedy) from None
    words = [word.strip() for word in capabilities.split(",")]
    wanted = content_of(config, inventory, [word for word in words if word])
    found = {"path": directory, "version": wanted.version, "files": len(wanted.files)}
    driver = f"driver {wanted.version}"
    if check:
        is_current = keeping.is_current(directory, wanted)
        state = f"unchanged, {driver}" if is_current else f"differs from {driver}"
        _report({**found, "changed": False, "current": is_current}, state, as_json=as_json)
        sys.exit(0 if is_current else 1)
    changed = keeping.update(directory, wanted)
    state = f"{driver}, {len(wanted.files)} files" if changed else f"unchanged, {driver}"
    _report({**found, "changed": changed}, state, as_json=as_json)


def _report(found: dict[str, Any], state: str, *, as_json: bool) -> None:
    """Print the result, as docs/json.md describes it or as a line."""
    if as_json:
        print_json(found)
    else:
        say(f"{found['path']}: {state}")


def _remove(directory: str, *, as_json: bool) -> None:
    stay = keeping.remove(directory)
    _report({"path": directory, "removed": True, "in_use": stay}, "removed", as_json=as_json)
    if stay and not as_json:
        click.echo(
            f"Running containers may still use its content ({stay} left): run this again on the "
            "host when they have exited, or after a reboot"
        )
