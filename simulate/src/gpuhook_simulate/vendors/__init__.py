"""The simulators of vendors other than NVIDIA: one module each, named as the vendor's folder."""

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Protocol

from gpuhook.core import contract
from gpuhook_simulate.tree import Tree


class Simulator(Protocol):
    """A simulator of a vendor's devices: its module, or the result of the module's ``of``."""

    def simulate(self, tree: Tree, count: int, settings: dict[str, str], /) -> Iterable[str]:
        """Fill a tree with ``count`` devices; return lines about them."""


def simulator(names: ModuleType) -> Simulator | None:
    """Return a vendor's simulator, None if it has none; ``names`` is from ``registry.all_vendors``.

    If one module serves several vendors, it has a function ``of`` that returns the simulator of
    each. Exceptions from the module itself are propagated.
    """
    whole = f"{__name__}.{contract.package(names).rpartition('.')[2]}"
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:  # it exists, and a module that it imports is missing
            raise
        return None
    found: Simulator = module.of(names) if hasattr(module, "of") else module
    return found
