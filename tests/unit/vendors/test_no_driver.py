"""A machine without a vendor's driver, which isn't one whose driver fails."""

from pathlib import Path
from types import ModuleType

import pytest

from gpuhook.config import loads
from gpuhook.errors import NoDriverError
from gpuhook.vendors import seam


@pytest.mark.parametrize("names", seam.KNOWN.values(), ids=seam.KNOWN)
@pytest.mark.parametrize("folder", [".", "missing"])
def test_an_empty_driver_root_has_no_driver(names: ModuleType, folder: str, tmp_path: Path) -> None:
    root = tmp_path / folder
    text = (
        f'[nvidia-container-cli]\nroot = "{root}"\nload-kmods = false\n'
        f'[gpuhook]\nstate-dir = "{tmp_path}/state"\ndriver-roots = ["{names.NAME}={root}"]\n'
    )
    with pytest.raises(NoDriverError):
        seam.load(names).discover(loads(text))
