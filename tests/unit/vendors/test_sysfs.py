"""Devices in sysfs and the kernel's events, of any vendor."""

import os
from pathlib import Path

import pytest
import second_vendor
from paper import machine

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.monitor.vendors import sensors
from gpuhook.monitor.vendors.survey import concerns_us
from gpuhook.vendors import sysfs_devices


@pytest.mark.parametrize("name", ["0000:c1:00.0", "10000:e1:00.7", "ABCD:00:1f.3"])
def test_pci_addresses_are_recognized(name: str) -> None:
    assert sysfs_devices.is_address(name)


@pytest.mark.parametrize(
    "name", ["bind", "c1:00.0", "0000:c1:00", "0000:c1:00.", "0:g:0.0", "::.", "a.b.c.d"]
)
def test_names_that_are_not_pci_addresses_are_rejected(name: str) -> None:
    assert not sysfs_devices.is_address(name)


def test_devices_of_a_driver_are_listed_by_address(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/drivers/xe"
    for name in ("0000:03:00.0", "module", "0000:02:00.0"):
        (folder / name).mkdir(parents=True)
    (folder / "bind").touch()
    with Rootfs(str(tmp_path)) as root:
        found = sysfs_devices.devices(root, "xe")
        assert sysfs_devices.devices(root, "other") == []
    assert [path.rpartition("/")[2] for path in found] == ["0000:02:00.0", "0000:03:00.0"]
    assert all(path.startswith("/sys/bus/pci/drivers/xe/") for path in found)


@pytest.mark.parametrize(
    ("name", "number"),
    [("card12", 12), ("card0", 0), ("card", None), ("card1-DP-1", None), ("xcard1", None),
     ("card٣", None), ("card1234567890", None), ("card01", None), ("card_1", None)],
)  # fmt: skip
def test_numbers_are_read_from_names_and_malformed_ones_ignored(
    name: str, number: int | None
) -> None:
    assert sysfs_devices.number(name, "card") == number


def test_numbered_names_are_sorted_numerically(tmp_path: Path) -> None:
    for name in ("card10", "card9", "card1", "renderD128", "card"):
        (tmp_path / "drm" / name).mkdir(parents=True)
    with Rootfs(str(tmp_path)) as root:
        assert sysfs_devices.numbered(root, "/drm", "card") == [1, 9, 10]
        assert sysfs_devices.numbered(root, "/drm", "renderD") == [128]
        assert sysfs_devices.numbered(root, "/nothing", "card") == []


def test_small_files_are_read_and_other_entries_give_empty_text(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text(" 0x8086\n")
    (tmp_path / "large").write_bytes(bytes(1 << 17))
    (tmp_path / "folder").mkdir()
    (tmp_path / "away").symlink_to("/../../nowhere")
    with Rootfs(str(tmp_path)) as root:
        assert sysfs_devices.text(root, "/plain") == "0x8086"
        for name in ("large", "folder", "away", "none"):
            assert sysfs_devices.text(root, f"/{name}") == ""


def test_wrong_node_numbers_are_reported() -> None:
    node = DeviceNode("/dev/dri/card0", 226, 0)
    assert sysfs_devices.wrong_numbers(node, "226:0") == ""
    assert sysfs_devices.wrong_numbers(node, "") == ""
    assert sysfs_devices.wrong_numbers(None, "226:0") == ""
    assert sysfs_devices.wrong_numbers(node, "226:1") == (
        "/dev/dri/card0 has the numbers 226:0, but its driver's are 226:1"
    )


# Sensors --------------------------------------------------------------------------------------


def every(device: str) -> bool:
    """Return true for each device, so that its files are read."""
    return bool(device)


def test_amd_sensors_are_read(tmp_path: Path) -> None:
    found = machine("amd", tmp_path / "amd", 2)
    values = sensors.read(found, every)
    assert values.keys() == {device.id for device in found.devices}
    assert values[found.devices[0].id] == {
        "temperature_celsius": 38, "power_watts": 140, "utilization": 0,
        "memory_total_bytes": 192 << 30, "memory_used_bytes": 285 << 20,
    }  # fmt: skip


def test_partitions_of_one_device_have_no_sensor_values(tmp_path: Path) -> None:
    found = machine("amd", tmp_path / "amd", 1, split="0", partitions=2)
    assert len(found.devices) == 2
    assert sensors.read(found, every) == {}


def test_intel_sensors_are_read_for_whole_gpus_only(tmp_path: Path) -> None:
    found = machine("intel_gpu", tmp_path / "intel", 1, vfs=1)
    whole, part = found.devices
    expected = {"temperature_celsius": 41, "energy_joules": 90}
    assert sensors.read(found, every) == {whole.id: expected, part.id: {}}


@pytest.mark.parametrize("text", ["", "n/a\n", "1" * 5000, "9" * 20, "٣\n", "0x10\n", "-\n"])
def test_sensor_values_that_are_not_numbers_are_omitted(tmp_path: Path, text: str) -> None:
    found = machine("intel_gpu", tmp_path / "intel", 1)
    [device] = found.devices
    [path] = (tmp_path / "intel").glob("sys/devices/*/*/hwmon/hwmon0/temp2_input")
    path.unlink()
    path.write_text(text)
    assert sensors.read(found, every)[device.id].keys() == {"energy_joules"}


def test_a_sensor_file_linked_out_of_the_root_is_ignored(tmp_path: Path) -> None:
    """A link below a driver root is resolved below that root."""
    found = machine("intel_gpu", tmp_path / "intel", 1)
    [device] = found.devices
    (tmp_path / "secret").write_text("1000\n")
    [path] = (tmp_path / "intel").glob("sys/devices/*/*/hwmon/hwmon0/temp2_input")
    path.unlink()
    os.symlink(tmp_path / "secret", path)
    assert sensors.read(found, every)[device.id].keys() == {"energy_joules"}


def test_sensors_of_excluded_devices_are_not_read(tmp_path: Path) -> None:
    """gpuhook doesn't even open their files, because the driver may hang in them."""
    found = machine("amd", tmp_path / "amd", 3)
    asked: list[str] = []

    def asking(device: str) -> bool:
        asked.append(device)
        return device != found.devices[1].id

    first, second, third = (device.id for device in found.devices)
    assert sensors.read(found, asking).keys() == {first, third}
    assert asked == [first, second, third]


def test_a_missing_driver_root_gives_no_sensor_values(tmp_path: Path) -> None:
    found = machine("intel_gpu", tmp_path / "intel", 1)
    (tmp_path / "intel").rename(tmp_path / "away")
    assert sensors.read(found, every) == {}


# Events ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        {"ACTION": "add", "DEVPATH": "/bus/pci/drivers/nvidia", "SUBSYSTEM": "drivers"},
        {"ACTION": "add", "DEVPATH": "/module/nvidia_uvm", "SUBSYSTEM": "module"},
        {"ACTION": "bind", "DEVPATH": "/devices/pci0000:00/0000:00:05.0", "DRIVER": "nvidia"},
        {"ACTION": "remove", "DEVPATH": "/devices/pci0000:00/0000:00:05.0", "PCI_ID": "10DE:2335"},
    ],
)
def test_events_about_gpus_are_relevant(event: dict[str, object]) -> None:
    assert concerns_us(event, Config())


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"DEVPATH": "/devices/virtual/mem/null", "SUBSYSTEM": "mem"},
        {"DEVPATH": "/devices/pci0000:00/0000:00:04.0", "PCI_ID": "8086:10DE", "DRIVER": "e1000"},
        {"header": {"message": "nvidia"}},
    ],
)
def test_events_about_other_devices_are_ignored(event: dict[str, object]) -> None:
    assert not concerns_us(event, Config())


def test_events_about_every_known_vendors_devices_are_relevant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second_vendor.know(monkeypatch)
    assert concerns_us({"DEVPATH": "/class/acme/acme0"}, Config())
    assert concerns_us({"PCI_ID": "AC3E:0001"}, Config())


def test_a_vendor_without_a_pci_number_matches_no_other_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second_vendor.know(monkeypatch)
    monkeypatch.setattr(second_vendor.part("names"), "PCI_VENDOR", "")
    assert not concerns_us({"DEVPATH": "/devices/virtual/mem/null", "SUBSYSTEM": "mem"}, Config())


def test_events_about_a_declared_vendors_devices_are_relevant() -> None:
    text = '[[gpuhook.vendors]]\nname = "maker"\nkind = "maker.com/npu"\npresent = "%s"\n'
    text += 'variable = "MAKER_VISIBLE_DEVICES"\nnodes = ["/dev/maker{n}"]\n'
    by_number, by_driver = loads(text % "pci:ab12"), loads(text % "driver:maker_npu")
    assert concerns_us({"PCI_ID": "AB12:0001"}, by_number)
    assert not concerns_us({"PCI_ID": "AB12:0001"}, by_driver)
    assert concerns_us({"DEVPATH": "/module/maker_npu"}, by_driver)
    assert not concerns_us({"DEVPATH": "/devices/virtual/mem/null"}, loads(text % ""))
