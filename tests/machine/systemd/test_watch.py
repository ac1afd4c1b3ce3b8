"""Messages of gpuhook watch as a service: without devices, and with a broken driver."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import DRIVER, GPUS, call, set_config

UNIT = "gpuhook-watch.service"
OTHER = Path("/srv/other")  # a driver root


def restart() -> None:
    """Start the service again, however often that was done in the last seconds."""
    call("systemctl", "reset-failed", UNIT)
    call("systemctl", "restart", UNIT)


def started_again() -> list[str]:
    """Start the service again, and return the messages that it has printed once it is ready."""
    restart()
    number = call("systemctl", "show", "--property=InvocationID", "--value", UNIT).strip()
    call("journalctl", "--sync")
    words = ("--quiet", "--output=cat", f"_SYSTEMD_INVOCATION_ID={number}")
    return call("journalctl", *words).splitlines()


@pytest.fixture
def elsewhere(installed: None) -> Iterator[Path]:
    """A driver root that is configured, and still empty."""
    OTHER.mkdir()
    set_config(f"nvidia-container-cli.root={OTHER}")
    yield OTHER
    set_config(f"nvidia-container-cli.root={DRIVER}")
    restart()
    call("rm", "--recursive", OTHER)


def test_watch_without_devices_reports_the_missing_driver_in_one_line(elsewhere: Path) -> None:
    [line] = started_again()
    assert f"There is no NVIDIA driver below the driver root {elsewhere}" in line


def test_a_broken_driver_is_reported_despite_absent_vendors(elsewhere: Path) -> None:
    call("gpuhook", "simulate", elsewhere, "--gpus", str(GPUS))
    [library] = {path.resolve() for path in elsewhere.rglob("libnvidia-ml.so.1")}
    whole = library.read_bytes()
    library.write_bytes(whole[:100])
    [line] = started_again()
    assert "libnvidia-ml" in line
    library.write_bytes(whole)
    [line] = started_again()
    assert f"{GPUS} GPUs" in line
