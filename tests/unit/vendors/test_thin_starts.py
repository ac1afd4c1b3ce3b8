"""Imports of a start with a vendor's devices, with a saved inventory."""

from pathlib import Path

import paper
import pytest
from isolated_starts import started

from gpuhook.base.config.model import Config
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.vendors import registry


@pytest.mark.parametrize(
    ("vendor", "variable", "modules"),
    [
        ("amd", "AMD_VISIBLE_DEVICES", {"names", "vendor"}),
        ("ascend", "ASCEND_VISIBLE_DEVICES", {"names", "variables", "model", "vendor"}),
        ("intel_gpu", "INTEL_VISIBLE_DEVICES", {"names", "vendor"}),
        ("intel_npu", "INTEL_VISIBLE_NPUS", {"names", "vendor"}),
    ],
)
def test_a_start_with_a_saved_inventory_is_thin(
    tmp_path: Path, vendor: str, variable: str, modules: set[str]
) -> None:
    paper.machine(vendor, tmp_path / "root", 2)
    config = Config()
    config.state_dir = str(tmp_path / "state")
    config.driver_roots = (f"{vendor}={tmp_path}/root",)
    cache.get_inventory(config, contract.load(registry.KNOWN[vendor]))
    answer, loaded = started(config.state_dir, *config.driver_roots, f"{variable}=0")
    assert "has no node /dev/" in answer  # they are on paper
    own = f"gpuhook.vendors.{vendor}."
    assert {name.removeprefix(own) for name in loaded if name.startswith(own)} == modules
    others = {name for name in loaded if name.startswith("gpuhook.vendors.")}
    assert {name for name in others if name.endswith(".vendor")} == {f"{own}vendor"}
    assert not {"_ctypes", "re", "json", "gpuhook.core.plan.operations"} & loaded
