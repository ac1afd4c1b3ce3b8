"""Which of the kernel's events are about GPUs."""

import pytest

from gpuhook.start.watch import concerns_us


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
    assert concerns_us(event)


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
    assert not concerns_us(event)
