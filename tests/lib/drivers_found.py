"""A machine whose vendors' drivers report the state that a test sets."""

from collections.abc import Callable

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core import contract
from gpuhook.core.inventory.model import Inventory
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.vendor import VENDOR as NVIDIA


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that sets a machine's NVIDIA devices, and optionally a driver that fails."""

    def have(found: Inventory, failing: contract.Vendor | None = None) -> None:
        def look(vendor: contract.Vendor, _: Config) -> Inventory:
            if vendor is NVIDIA:
                return found
            kind = DriverError if vendor is failing else NoDriverError
            raise kind(f"{vendor.names.TITLE}?", "Mend it")

        for names in registry.BUILT_IN.values():
            monkeypatch.setattr(type(contract.load(names)), "discover", look)

    return have
