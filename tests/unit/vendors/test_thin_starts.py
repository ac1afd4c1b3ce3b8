"""Modules imported by a start with a vendor's devices and a saved inventory."""

from pathlib import Path

import paper
import pytest
from isolated_starts import started
from samples import SAMPLES

from gpuhook.base.config.model import Config
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.vendors import registry


@pytest.mark.parametrize("vendor", SAMPLES)
def test_a_start_with_a_saved_inventory_loads_few_modules(tmp_path: Path, vendor: str) -> None:
    [variable, *_] = registry.BUILT_IN[vendor].VARIABLES
    paper.machine(vendor, tmp_path / "root", 2)
    config = Config()
    config.state_dir = str(tmp_path / "state")
    config.driver_roots = (f"{vendor}={tmp_path}/root",)
    cache.get_inventory(config, contract.load(registry.BUILT_IN[vendor]))
    answer, loaded = started(config.state_dir, *config.driver_roots, f"{variable}=0")
    assert "has no node /dev/" in answer  # the devices exist only below tmp_path
    own = f"gpuhook.vendors.{vendor}."
    mine = {name.removeprefix(own) for name in loaded if name.startswith(own)}
    assert mine == SAMPLES[vendor].imported
    others = {name for name in loaded if name.startswith("gpuhook.vendors.")}
    assert {name for name in others if name.endswith(".vendor")} == {f"{own}vendor"}
    assert not {"_ctypes", "re", "json", "gpuhook.core.plan.operations"} & loaded
