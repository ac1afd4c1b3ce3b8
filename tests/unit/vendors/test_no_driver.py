"""A machine without a vendor's driver, which isn't one whose driver fails."""

from pathlib import Path
from types import ModuleType

import pytest

from gpuhook.ground.config.loader import loads
from gpuhook.ground.errors import NoDriverError
from gpuhook.start import contract
from gpuhook.vendors import registry


@pytest.mark.parametrize("names", registry.KNOWN.values(), ids=registry.KNOWN)
@pytest.mark.parametrize("folder", [".", "missing"])
def test_an_empty_driver_root_has_no_driver(names: ModuleType, folder: str, tmp_path: Path) -> None:
    root = tmp_path / folder
    text = (
        f'[nvidia-container-cli]\nroot = "{root}"\nload-kmods = false\n'
        f'[gpuhook]\nstate-dir = "{tmp_path}/state"\ndriver-roots = ["{names.NAME}={root}"]\n'
    )
    with pytest.raises(NoDriverError):
        contract.load(names).discover(loads(text))
