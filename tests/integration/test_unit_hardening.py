"""The hardening of the shipped systemd units, as `systemd-analyze security` rates it."""

import re
from pathlib import Path

import pytest
from harness.commands import run

UNITS = Path(__file__).parents[2] / "packaging/systemd"
# The highest exposure of each service, from 0 to 10. The watch can't have settings that create
# a mount namespace. Neither can MPS, which mounts files for containers.
EXPOSURE = {
    "gpuhook-cdi-refresh.service": 4.9,
    "gpuhook-device-plugin.service": 5.2,
    "gpuhook-metrics.service": 3.7,
    "gpuhook-mps.service": 6.7,
    "gpuhook-nri.service": 3.8,
    "gpuhook-watch.service": 7.0,
}


def exposure(unit: Path) -> float:
    words = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit)]
    line = run(words).stdout.rstrip().rpartition("\n")[2]  # its exit status depends on the rating
    return float(line.partition("exposure level for ")[2].split(" ")[1])


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_units_are_no_more_exposed_than_recorded(unit: str) -> None:
    assert exposure(UNITS / unit) <= EXPOSURE[unit]


@pytest.mark.parametrize("unit", EXPOSURE)
def test_a_missing_hardening_setting_raises_the_exposure(unit: str, tmp_path: Path) -> None:
    text = (UNITS / unit).read_text()
    for key in ("CapabilityBoundingSet", "RestrictAddressFamilies", "SystemCallFilter"):
        without = re.sub(f"(?m)^{key}=.*\n", "", text)
        assert without != text
        (tmp_path / unit).write_text(without)
        assert exposure(tmp_path / unit) > EXPOSURE[unit], key
