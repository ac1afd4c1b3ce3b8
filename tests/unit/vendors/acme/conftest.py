"""Registration of the second vendor, and machines with its devices."""

from pathlib import Path

import machines
import pytest
import second_vendor
from second_vendor import Inventories

from gpuhook.core.inventory.model import Inventory


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    second_vendor.know(monkeypatch)


@pytest.fixture
def npus(tmp_path: Path) -> Inventory:
    """Four NPUs on two boards (0 and 2, 1 and 3); 1 is split, 3 is being reset."""
    return second_vendor.machine(tmp_path / "acme", boards="2", split="1", reset="3")


@pytest.fixture
def both(npus: Inventory) -> Inventories:
    """Inventories of a machine with both vendors' devices."""
    return {"nvidia": machines.machine(machines.gpu(0, 3), machines.gpu(1, 0)), "acme": npus}
