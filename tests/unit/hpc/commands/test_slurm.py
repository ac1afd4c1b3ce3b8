"""gpuhook slurm: the written file, and the messages."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from machines import gpu, machine, mig

from gpuhook.base.errors import DriverError, GpuhookError
from gpuhook.core.inventory.model import Inventory
from gpuhook.tools.cli import cli
from gpuhook.vendors.amd.vendor import VENDOR as AMD
from gpuhook.vendors.nvidia.vendor import VENDOR as NVIDIA

Call = Callable[..., Result]


@pytest.fixture
def found() -> Inventory:
    """Devices of the host: GPUs in another order than their addresses, the middle one lost."""
    there = machine(gpu(2, 0), gpu(0, 3))
    there.lost = (1,)
    return there


@pytest.fixture
def call(finds: Callable[..., None], config: list[str], found: Inventory) -> Call:
    """A function that runs a Slurm command of gpuhook on a host with the devices ``found``."""
    finds(found)
    return lambda *words: CliRunner().invoke(cli, ["slurm", *words, *config])


def test_gres_lines_are_in_device_order_and_a_lost_gpu_is_warned_of(call: Call) -> None:
    done = call("gres", "--node", "n1")
    assert done.exit_code == 0
    lines = [line for line in done.stdout.splitlines() if " Name=" in line]
    assert [line.partition(" File=")[2].split()[0] for line in lines] == [
        "/dev/nvidia3", "/dev/nvidia0",
    ]  # fmt: skip
    assert "NodeName=n1 Gres=gpu:h200:2" in done.stdout
    assert "warning" in done.stderr
    assert "1 has fallen off the bus" in done.stderr


def test_the_default_node_name_is_the_short_host_name(call: Call) -> None:
    short = os.uname().nodename.partition(".")[0]
    assert f"\nNodeName={short} AutoDetect=off\n" in call("gres").stdout


def test_an_unchanged_gres_conf_is_not_rewritten(
    call: Call, tmp_path: Path, found: Inventory
) -> None:
    path = tmp_path / "etc/gres.conf"
    words = ("gres", "--node", "n1", "--output", str(path))
    assert call(*words).stdout == f"wrote {path}\n"
    before = path.stat()
    assert call(*words).stdout == f"{path}: unchanged\n"
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.write_text("something else")
    assert call(*words).stdout == f"wrote {path}\n"
    assert [each.name for each in path.parent.iterdir()] == ["gres.conf"]
    assert "Name=gpu" in path.read_text()


def test_a_gpu_with_mig_devices_is_written_only_as_its_parts(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = machine(gpu(0, 0), gpu(3, 3, (mig(0, 1, 12, 13), mig(1, 2, 21, 22))))
    monkeypatch.setattr(type(NVIDIA), "discover", lambda *_: there)
    text = call("gres", "--node", "n1").stdout
    assert "Gres=gpu:h200:1,gpu:h200_1g.18gb:2" in text
    caps = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in (12, 13)]
    assert f"MultipleFiles=/dev/nvidia3,{','.join(caps)} " in text
    assert " File=/dev/nvidia3" not in text


def test_a_failing_driver_is_reported_after_other_devices_are_written(
    call: Call, finds: Callable[..., None], found: Inventory
) -> None:
    finds(found, failing=AMD)
    done = call("gres", "--node", "n1")
    assert "/dev/nvidia0" in done.stdout
    assert isinstance(done.exception, GpuhookError)
    assert "AMD?" in str(done.exception)


def test_a_failing_driver_leaves_gres_conf_unchanged(
    call: Call, finds: Callable[..., None], found: Inventory, tmp_path: Path
) -> None:
    """Every job may open a device that the file lacks."""
    path = tmp_path / "gres.conf"
    path.write_text("as it was")
    finds(found, failing=AMD)
    assert "AMD?" in str(call("gres", "--node", "n1", "--output", str(path)).exception)
    assert path.read_text() == "as it was"


@pytest.mark.protects(
    "gres-whole",
    "gres.conf isn't written by a process that can access only some of the devices",
    instead="if False:",
)
@pytest.mark.parametrize("output", [True, False])
def test_no_gres_lines_are_written_while_devices_are_withheld(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: bool
) -> None:
    monkeypatch.setattr(type(NVIDIA), "withheld", lambda *_: ["/dev/nvidia7"])
    path = tmp_path / "gres.conf"
    done = call("gres", "--node", "n1", *(("--output", str(path)) if output else ()))
    said = "A device cgroup denies this process access to /dev/nvidia7, and Slurm would leave"
    assert str(done.exception).startswith(said)
    assert not path.exists()
    assert "nvidia" not in done.stdout


def test_device_links_are_written_where_known_and_failures_warned_of(
    call: Call, monkeypatch: pytest.MonkeyPatch, found: Inventory
) -> None:
    first, second = (device.id for device in found.devices)
    scores = {first: {second: 250}, second: {first: 250}}
    module = SimpleNamespace(PER_LINK=100, links=lambda *_: scores)
    monkeypatch.setattr("gpuhook.monitor.vendor_parts.part", lambda *_: module)
    text = call("gres", "--node", "n1").stdout
    assert re.findall(r"Links=(\S+)", text) == ["-1,2", "2,-1"]
    scores[first][second] = scores[second][first] = 50  # close to each other, but not linked
    assert "Links=" not in call("gres", "--node", "n1").stdout

    def fails(*_: object) -> None:
        raise DriverError("it hangs", "Mend it")

    module.links = fails
    done = call("gres", "--node", "n1")
    assert done.exit_code == 0
    assert "are unknown: it hangs" in done.stderr
