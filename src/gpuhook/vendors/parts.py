"""The modules that a vendor's folder may have for one command, imported when that command runs."""

import importlib
from types import ModuleType
from typing import Any

from gpuhook.vendors import seam


def part(names: ModuleType, what: str) -> Any:
    """Return the module ``what`` (doctor, simulate) of a vendor's folder, None if it has none.

    ``names`` is the vendor's of ``seam.known``. Where one module serves several vendors, it has a
    function ``of``, and what that returns for this one stands for the module. What the module
    itself raises is passed on.
    """
    whole = f"{seam.package(names)}.{what}"
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:  # it is there, and lacks a module that it imports
            raise
        return None
    return module.of(names) if hasattr(module, "of") else module
