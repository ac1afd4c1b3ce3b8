"""The modules that a vendor's folder may have for one command, imported when that command runs."""

import importlib
from types import ModuleType

from gpuhook.vendors import seam


def part(names: ModuleType, what: str) -> ModuleType | None:
    """Return the module ``what`` (doctor, simulate) of a vendor's folder, None if it has none.

    ``names`` is the vendor's in ``seam.KNOWN``. What the module itself raises is passed on.
    """
    whole = f"{seam.package(names)}.{what}"
    try:
        return importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:  # it is there, and lacks a module that it imports
            raise
        return None
