"""The modules that a vendor may have here for one command, imported when that command runs."""

import importlib
from types import ModuleType
from typing import Any

from gpuhook.start import contract


def part(names: ModuleType, what: str) -> Any:
    """Return the module ``what`` (doctor, simulate) of a vendor's folder here, None without one.

    ``names`` is the vendor's of ``registry.known``. Where one module serves several vendors, it
    has a function ``of``, and what that returns for this one stands for the module. What the
    module itself raises is passed on.
    """
    folder = f"gpuhook.tools.vendors.{contract.package(names).rpartition('.')[2]}"
    whole = f"{folder}.{what}"
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name not in (folder, whole):  # it is there, and lacks a module that it imports
            raise
        return None
    return module.of(names) if hasattr(module, "of") else module
