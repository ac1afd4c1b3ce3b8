"""What tests of commands share: a configuration of their own, and a machine's drivers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core import contract
from gpuhook.core.inventory.model import Inventory
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.vendor import VENDOR as NVIDIA


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Words that name a configuration with a state folder of its own."""
    monkeypatch.setattr("gpuhook.tools.cli.cdi_generate.our_program", lambda *_: "/bin/true")
    path = tmp_path / "config.toml"
    path.write_text(f'[gpuhook]\nstate-dir = "{tmp_path}/state"\n')
    return ["--config", str(path)]


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have a machine with devices of NVIDIA's, and perhaps another driver that fails."""

    def have(found: Inventory, failing: contract.Vendor | None = None) -> None:
        def look(vendor: contract.Vendor, _: Config) -> Inventory:
            if vendor is NVIDIA:
                return found
            kind = DriverError if vendor is failing else NoDriverError
            raise kind(f"{vendor.names.TITLE}?", "Mend it")

        for names in registry.KNOWN.values():
            monkeypatch.setattr(type(contract.load(names)), "discover", look)

    return have
