"""PCI devices that are plugged and unplugged while the machine runs, as its kernel reports them.

The emulator plugs them in. Its monitor is at a virtual serial port of the machine.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from booted import call
from harness.commands import run, wait_until
from kubelet import Kubelet

MONITOR = Path("/dev/virtio-ports/monitor")
CONFIG = Path("/etc/gpuhook/config.toml")
PLUGINS = Path("/var/lib/kubelet/device-plugins")
DEVICES = Path("/sys/bus/pci/devices")
# A name of the tests -> the emulator's name of a device, and the vendor id on the PCI bus.
VENDORS = {"first": ("pci-testdev", "1b36"), "second": ("edu", "1234")}
TABLE = """
[[gpuhook.vendors]]
name = "{name}"
kind = "{name}.example/card"
variable = "{variable}_VISIBLE_DEVICES"
nodes = ["/dev/{name}{{n}}"]
present = "pci:{vendor}"
"""
NEVER = "86400"  # seconds between two checks that no event triggers
SOON = 45.0  # seconds; 0.1 s of work takes a few on an emulated machine


def is_there(name: str) -> bool:
    """Tell whether the PCI bus has a device of a vendor."""
    vendors = []
    for path in DEVICES.glob("*/vendor"):
        with contextlib.suppress(OSError):  # the device may be removed during the read
            vendors.append(path.read_text().strip())
    return f"0x{VENDORS[name][1]}" in vendors


def ask(line: str, done: Callable[[], bool]) -> None:
    """Send a line to the emulator's monitor, and wait until the kernel shows the result."""
    monitor = os.open(MONITOR, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(monitor, f"{line}\n".encode())
        wait_until(done, line, timeout=SOON)
    finally:
        os.close(monitor)


def plug(name: str) -> None:
    ask(f"device_add {VENDORS[name][0]},id={name}", lambda: is_there(name))


def unplug(name: str) -> None:
    ask(f"device_del {name}", lambda: not is_there(name))


@pytest.fixture(autouse=True)
def declared(installed: None) -> Iterator[None]:
    """Two declared vendors with device nodes, whose PCI devices are absent at first."""
    before = CONFIG.read_text()
    call("gpuhook", "config", "set", "gpuhook.driver-roots=first=/:second=/")
    tables = [
        TABLE.format(name=name, variable=name.upper(), vendor=vendor)
        for name, (_, vendor) in VENDORS.items()
    ]
    CONFIG.write_text(CONFIG.read_text() + "".join(tables))
    nodes = [Path(f"/dev/{name}0") for name in VENDORS]
    for minor, node in enumerate(nodes):
        call("mknod", node, "c", "240", str(minor))
    call("systemctl", "stop", "gpuhook-watch")
    try:
        yield
    finally:
        for name in filter(is_there, VENDORS):
            unplug(name)
        for node in nodes:
            node.unlink()
        CONFIG.write_text(before)
        call("systemctl", "start", "gpuhook-watch")


def said(unit: str) -> list[str]:
    """Return the lines that a unit has printed."""
    return call("journalctl", f"--unit={unit}", "--output=cat", "--no-pager").splitlines()


def test_the_watch_notices_each_plugged_device() -> None:
    unit = "hotplug-watch"
    call(
        *("systemd-run", f"--unit={unit}", "--service-type=notify"),
        *("/usr/bin/gpuhook", "watch", "--interval", NEVER),
    )

    def count(words: str) -> int:
        return sum(words in line for line in said(unit))

    try:
        for name in VENDORS:
            assert count(f"{name}: driver") == 0
        for time in (1, 2):
            for name in VENDORS:
                plug(name)
                line = f"{name}: driver unknown, 1 devices"
                wait_until(lambda: count(line) >= time, f"{name} is seen", timeout=SOON)  # noqa: B023
            for name in VENDORS:
                line = f"{name.capitalize()}'s driver isn't loaded"
                unplug(name)
                wait_until(lambda: count(line) >= time, f"{name} is missed", timeout=SOON)  # noqa: B023
    finally:
        call("systemctl", "stop", unit)


def test_the_device_plugin_notices_each_plugged_device() -> None:
    unit = "hotplug-plugin"
    with Kubelet(PLUGINS) as kubelet:
        kubelet.start()
        call(
            *("systemd-run", f"--unit={unit}"),
            *("/usr/bin/gpuhook", "device-plugin", "--interval", NEVER),
        )
        try:
            kubelet.wait_for("nvidia.com/gpu", healthy=4)
            for name in VENDORS:
                plug(name)
                kubelet.wait_for(f"{name}.example/card", healthy=1)
            for name in VENDORS:
                unplug(name)
                kubelet.wait_for(f"{name}.example/card", healthy=0)
        finally:
            run(["systemctl", "stop", unit])
