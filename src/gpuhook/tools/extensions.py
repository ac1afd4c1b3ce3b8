"""The additions of the packages cluster, metrics and hpc to the command line.

Each of them has a module ``extension`` with its ``COMMANDS``, and may have ``CHECKS``, the module
with its checks for the doctor, and ``MODULES``, which other commands use: ``engine-NAME`` has an
``ENGINE`` of that name. A system package may leave out any of the three packages, so nothing here
imports them by name.
"""

import importlib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from gpuhook.base.errors import MissingPackageError

MAIN = "gpuhook"  # the system package of everything else
# Package -> the system package that has it.
PACKAGES = {
    "cluster": "gpuhook-kubernetes",
    "metrics": "gpuhook-metrics",
    "hpc": "gpuhook-hpc",
}
# The commands and modules of each package, known also where it isn't installed.
COMMANDS: Mapping[str, Collection[str]] = {
    "cluster": ("device-plugin", "dra", "labels", "nri"),
    "metrics": ("metrics", "ps", "stats", "top"),
    "hpc": ("apply", "lxc-lines", "nspawn-arguments", "slurm", "unit-lines"),
}
MODULES: Mapping[str, Collection[str]] = {
    "cluster": (),
    "metrics": ("pod-names",),
    "hpc": ("engine-lxc", "engine-nspawn", "lxc", "nspawn"),
}
# Command -> its module, one line for --help, and its group there ("": not listed).
Commands = Mapping[str, tuple[str, str, str]]


@cache
def installed() -> tuple[ModuleType, ...]:
    """Return the modules ``extension`` of the packages that are installed."""
    return tuple(found for name in PACKAGES if (found := _extension(name)) is not None)


def _extension(package: str) -> ModuleType | None:
    whole = f"gpuhook.{package}.extension"
    try:
        return importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name not in (f"gpuhook.{package}", whole):  # a module that it imports is missing
            raise
        return None


def commands() -> dict[str, tuple[str, str, str]]:
    """Return the commands of all installed packages."""
    return {name: row for each in installed() for name, row in each.COMMANDS.items()}


def package_of(command: str) -> str:
    """Return the system package that has a command."""
    return next((PACKAGES[name] for name, every in COMMANDS.items() if command in every), MAIN)


def folders() -> dict[str, str]:
    """Return the folders below gpuhook/ of the installed packages, each with its system package."""
    found = {each.__name__.split(".")[1] for each in installed()}
    return {"tools/cli": MAIN} | {
        name: package for name, package in PACKAGES.items() if name in found
    }


def check_command(name: str, why: str = "") -> None:
    """Raise MissingPackageError for a command of a package that isn't installed.

    ``why`` is a clause about the command, if the user hasn't called it.
    """
    package = package_of(name)
    if package != MAIN and name not in commands():
        raise _missing(f"gpuhook {name}{why}", package)


def check_modules() -> Iterator[ModuleType]:
    """Yield the modules with checks for the doctor; each has ``STEPS``."""
    for each in installed():
        if name := getattr(each, "CHECKS", ""):
            yield importlib.import_module(name)


def module(name: str) -> Any:
    """Return the module that a package has under this name, None if none is installed."""
    for each in installed():
        if whole := getattr(each, "MODULES", {}).get(name):
            return importlib.import_module(whole)
    return None


def needed(name: str, what: str) -> Any:
    """Return ``module(name)``; MissingPackageError, naming ``what``, without its package."""
    found = module(name)
    if found is None:
        [package] = [PACKAGES[each] for each, every in MODULES.items() if name in every]
        raise _missing(what, package)
    return found


def _missing(what: str, package: str) -> MissingPackageError:
    return MissingPackageError(
        f"{what} is in the package {package}, which isn't installed", f"Install {package}"
    )
