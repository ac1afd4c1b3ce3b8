"""The simulators of vendors other than NVIDIA: one module each, called as the vendor's folder."""

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Protocol

from gpuhook.start import contract
from gpuhook_simulate.tree import Tree


class Simulator(Protocol):
    """What simulates the devices of a vendor: its module, or what the module's ``of`` returns."""

    def simulate(self, tree: Tree, count: int, settings: dict[str, str], /) -> Iterable[str]:
        """Fill a tree with that many devices; return lines that say what was made."""


def simulator(names: ModuleType) -> Simulator | None:
    """Return what makes a vendor's simulated devices; ``names`` is that of ``registry.known``.

    Where one module serves several vendors, it has a function ``of``, and what that returns for
    this one stands for the module. What the module itself raises is passed on.
    """
    whole = f"{__name__}.{contract.package(names).rpartition('.')[2]}"
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:  # it is there, and lacks a module that it imports
            raise
        return None
    found: Simulator = module.of(names) if hasattr(module, "of") else module
    return found
