"""Which of the kernel's events are about GPUs."""

import pytest
import second_vendor

from gpuhook.ground.config.loader import loads
from gpuhook.ground.config.model import Config
from gpuhook.tools.vendors.uevents import concerns_us


@pytest.mark.parametrize(
    "event",
    [
        {"ACTION": "add", "DEVPATH": "/bus/pci/drivers/nvidia", "SUBSYSTEM": "drivers"},
        {"ACTION": "add", "DEVPATH": "/module/nvidia_uvm", "SUBSYSTEM": "module"},
        {"ACTION": "bind", "DEVPATH": "/devices/pci0000:00/0000:00:05.0", "DRIVER": "nvidia"},
        {"ACTION": "remove", "DEVPATH": "/devices/pci0000:00/0000:00:05.0", "PCI_ID": "10DE:2335"},
    ],
)
def test_events_about_gpus(event: dict[str, object]) -> None:
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
def test_other_events(event: dict[str, object]) -> None:
    assert not concerns_us(event, Config())


def test_events_about_another_vendors_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    second_vendor.know(monkeypatch)
    assert concerns_us({"DEVPATH": "/class/acme/acme0"}, Config())
    assert concerns_us({"PCI_ID": "AC3E:0001"}, Config())


def test_a_vendor_without_a_number_on_the_pci_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    second_vendor.know(monkeypatch)
    monkeypatch.setattr(second_vendor.part("names"), "PCI_VENDOR", "")
    assert not concerns_us({"DEVPATH": "/devices/virtual/mem/null", "SUBSYSTEM": "mem"}, Config())


def test_events_about_a_declared_vendors_devices() -> None:
    text = '[[gpuhook.vendors]]\nname = "maker"\nkind = "maker.com/npu"\npresent = "%s"\n'
    text += 'variable = "MAKER_VISIBLE_DEVICES"\nnodes = ["/dev/maker{n}"]\n'
    by_number, by_driver = loads(text % "pci:ab12"), loads(text % "driver:maker_npu")
    assert concerns_us({"PCI_ID": "AB12:0001"}, by_number)
    assert not concerns_us({"PCI_ID": "AB12:0001"}, by_driver)
    assert concerns_us({"DEVPATH": "/module/maker_npu"}, by_driver)
    assert not concerns_us({"DEVPATH": "/devices/virtual/mem/null"}, loads(text % ""))
