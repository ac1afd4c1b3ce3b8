"""How devices are, by files of sysfs: of simulated machines, and of ones with strange files."""

import os
from pathlib import Path

import pytest
from paper import machine

from gpuhook.tools.vendors import sensors
from gpuhook.tools.vendors.amd import telemetry as amd
from gpuhook.tools.vendors.intel_gpu import telemetry as intel


def test_amd(tmp_path: Path) -> None:
    found = machine("amd", tmp_path / "amd", 2)
    values = amd.read(found)
    assert values.keys() == {device.id for device in found.devices}
    assert values[found.devices[0].id] == {
        "temperature_celsius": 38, "power_watts": 140, "utilization": 0,
        "memory_total_bytes": 192 << 30, "memory_used_bytes": 285 << 20,
    }  # fmt: skip


def test_parts_of_one_device_have_none(tmp_path: Path) -> None:
    found = machine("amd", tmp_path / "amd", 1, split="0", partitions=2)
    assert len(found.devices) == 2
    assert amd.read(found) == {}


def test_intel(tmp_path: Path) -> None:
    found = machine("intel_gpu", tmp_path / "intel", 1, vfs=1)
    whole, part = found.devices
    expected = {"temperature_celsius": 41, "energy_joules": 90}
    assert intel.read(found) == {whole.id: expected, part.id: {}}


@pytest.mark.parametrize("text", ["", "n/a\n", "1" * 5000, "٣\n", "0x10\n", "-\n"])
def test_what_is_no_number_is_no_value(tmp_path: Path, text: str) -> None:
    found = machine("intel_gpu", tmp_path / "intel", 1)
    [device] = found.devices
    [path] = (tmp_path / "intel").glob("sys/devices/*/*/hwmon/hwmon0/temp2_input")
    path.unlink()
    path.write_text(text)
    assert sensors.read(found)[device.id].keys() == {"energy_joules"}


def test_a_file_that_leads_elsewhere(tmp_path: Path) -> None:
    """A link below a driver root stays below it."""
    found = machine("intel_gpu", tmp_path / "intel", 1)
    [device] = found.devices
    (tmp_path / "secret").write_text("1000\n")
    [path] = (tmp_path / "intel").glob("sys/devices/*/*/hwmon/hwmon0/temp2_input")
    path.unlink()
    os.symlink(tmp_path / "secret", path)
    assert sensors.read(found)[device.id].keys() == {"energy_joules"}


def test_a_root_that_is_gone(tmp_path: Path) -> None:
    found = machine("intel_gpu", tmp_path / "intel", 1)
    (tmp_path / "intel").rename(tmp_path / "away")
    assert sensors.read(found) == {}
