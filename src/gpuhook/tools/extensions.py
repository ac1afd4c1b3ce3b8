"""The additions of the packages cluster, metrics and hpc to the command line.

Each of them has a module ``extension`` with its ``COMMANDS``, and may have ``CHECKS``, the module
with its checks for the doctor, and ``MODULES``, which other commands use. A system package may
leave out any of the three packages, so nothing here imports them by name.
"""

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from gpuhook.base.errors import EngineError, listed

# Package -> the system package that has it.
PACKAGES = {
    "cluster": "gpuhook-kubernetes",
    "metrics": "gpuhook-metrics",
    "hpc": "gpuhook-hpc",
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
    """Return ``module(name)``; EngineError, naming ``what``, if its package isn't installed."""
    found = module(name)
    if found is None:
        raise EngineError(
            f"{what} isn't part of this installation of gpuhook",
            f"Install the packages {listed([*PACKAGES.values()])} that are missing",
        )
    return found
