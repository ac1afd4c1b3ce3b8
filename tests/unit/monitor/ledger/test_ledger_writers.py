"""Changes of device settings, for which every module uses the ledger."""

import re
from pathlib import Path

import pytest

import gpuhook

PACKAGE = Path(gpuhook.__file__).parent
# Calls that change a device's state for all its users -> the modules that may make them.
WRITERS = {
    r"nvmlDeviceSet(?!MemoryLimits)\w+\(|--set-timeslice|compute-policy": {
        "monitor/vendors/nvidia/settings.py"
    },
    r"\bvendor_parts\.settings\(": {"monitor/ledger/settings.py"},
}


@pytest.mark.parametrize("pattern", WRITERS)
def test_device_settings_are_changed_only_by_known_modules(pattern: str) -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text())
    }
    assert found == WRITERS[pattern]
