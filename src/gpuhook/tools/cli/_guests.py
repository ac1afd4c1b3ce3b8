"""Engines that are installed for one machine or container at a time: nspawn and LXC.

``told`` are the options of ``gpuhook install``.
"""

import os
from typing import Any

import click

from gpuhook.base.config.loader import PATH_VARIABLE
from gpuhook.tools import extensions
from gpuhook.tools.cli import _engines as shared
from gpuhook.tools.cli._output import warn
from gpuhook.tools.engines.prefix import state_folder
from gpuhook.tools.root_folder.request import settings

# Engine -> the option that names a machine or container, and the engine in words.
NSPAWN, LXC = "nspawn", "lxc"
ENGINES = {NSPAWN: ("machine", "systemd-nspawn"), LXC: ("container", "LXC")}


def support(engine: str) -> Any:
    """Return an engine's module; MissingPackageError without it."""
    return extensions.needed(engine, f"Support for {ENGINES[engine][1]}")


def of(told: Any) -> Any:
    """Return the given machine or container, None if none is; UsageError for wrong options."""
    for engine, (option, _) in ENGINES.items():
        name = getattr(told, option)
        if (engine in told.engines) != bool(name) or (name and len(told.engines) != 1):
            raise click.UsageError(f"--{option} and --engine {engine} need each other.")
        if name:
            return _guest(engine, name, told)
    if told.variables or told.devices or told.rootfs:
        raise click.UsageError("-e, --device and --rootfs need --machine or --container.")
    return None


def _guest(engine: str, name: str, told: Any) -> Any:
    module = support(engine)
    config, file = (shared.absolute(path) for path in (os.environ.get(PATH_VARIABLE), told.config))
    rootfs, prefix = (path and os.path.abspath(path) for path in (told.rootfs, told.prefix))
    asked = settings(told.variables), told.devices
    return module.guest(module.FolderRequest(name, *asked, rootfs, config, file or ""), prefix)


def units(told: Any, guest: Any) -> tuple[tuple[str, str], ...]:
    """Return a guest's files, and warn of features that don't work there; none without it."""
    if guest is None:
        return ()
    prefix = told.prefix and os.path.abspath(told.prefix)
    found = support(*told.engines).files(guest, state_folder(told.state_dir, prefix), prefix)
    for warning in found.warnings:
        warn(warning)
    made: tuple[tuple[str, str], ...] = found.units
    return made
