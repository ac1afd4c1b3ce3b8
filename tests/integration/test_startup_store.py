"""The saved inventory with simulated drivers: NVML isn't called, and each change is noticed."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError
from gpuhook.core.inventory import cache
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.vendor import VENDOR
from gpuhook_simulate.vendors.nvidia import Failure, Options, build, remove

SLOW = 2.0  # seconds that starting NVML takes


class Host:
    """A simulated machine whose driver can be changed, and its inventory."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "driver"
        self.config = Config()
        self.config.driver_root = str(self.root)
        self.config.state_dir = str(folder / "state")
        self.config.nvml_timeout = 120  # on a busy machine, tests may stand still for a while

    def simulate(self, **options: Any) -> None:
        build(Options(root=str(self.root), **options))

    def inventory(self) -> NvidiaInventory:
        found = cache.get_inventory(self.config, VENDOR)
        assert isinstance(found, NvidiaInventory)
        return found


@pytest.fixture
def host(workspace: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    folder = workspace / f"store-{id(request)}"
    folder.mkdir()
    made = Host(folder)
    yield made
    if made.root.exists():
        remove(str(made.root))


def test_nvml_is_not_asked_again_for_an_unchanged_driver(host: Host) -> None:
    host.simulate(gpus=8, init_seconds=SLOW)
    began = time.monotonic()
    first = host.inventory()
    assert time.monotonic() - began >= SLOW
    host.config.nvml_timeout = 0.01  # less than NVML's start takes, so another query would fail
    assert host.inventory() == first
    assert len(first.gpus) == 8


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPU unplugged": ({"gpus": 4}, {"gpus": 4, "unplugged": frozenset({1})}),
    "GPU plugged in": ({"gpus": 2}, {"gpus": 3}),
    "driver upgraded": ({"driver_version": "570.86.15"}, {"driver_version": "580.65.06"}),
    "nodes numbered anew": ({"gpus": 2, "minors": (0, 1)}, {"gpus": 2, "minors": (1, 2)}),
    "MIG switched on": (
        {"models": ("A100",)},
        {"models": ("A100",), "mig": {0: ("3g.40gb", "1g.10gb")}},
    ),
    "MIG devices changed": (
        {"models": ("A100",), "mig": {0: ("3g.40gb", "1g.10gb")}},
        {"models": ("A100",), "mig": {0: ("1g.10gb", "1g.10gb")}},
    ),
    "other GPUs": ({"gpus": 2, "seed": "one"}, {"gpus": 2, "seed": "other"}),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_driver_gives_a_new_inventory(
    host: Host, before: dict[str, Any], after: dict[str, Any]
) -> None:
    host.simulate(**before)
    old = host.inventory()
    assert cache.saved(host.config, VENDOR) == old
    host.simulate(**after)
    assert cache.saved(host.config, VENDOR) is None
    new = host.inventory()
    assert new != old
    assert cache.saved(host.config, VENDOR) == new
    fresh = Config()
    fresh.driver_root = host.config.driver_root
    assert cache.get_inventory(fresh, VENDOR, save=False) == new


def test_a_removed_driver_gives_an_error_and_no_saved_inventory(host: Host) -> None:
    host.simulate()
    host.inventory()
    remove(str(host.root))
    with pytest.raises(DriverError):
        host.inventory()


def test_driver_that_fails_is_asked_again(host: Host) -> None:
    host.simulate(failure=Failure.NOT_LOADED)
    for _ in range(2):
        with pytest.raises(DriverError, match="NVML failed"):
            host.inventory()
    host.simulate()
    assert len(host.inventory().gpus) == 1


def test_the_refresh_command_saves_the_inventory(host: Host, installation: Any) -> None:
    from harness.commands import run  # noqa: PLC0415 - only this test starts a command

    host.simulate(gpus=3)
    config = host.root.with_name("config.toml")
    config.write_text(
        f'[nvidia-container-cli]\nroot = "{host.root}"\n'
        f'[gpuhook]\nstate-dir = "{host.config.state_dir}"\n'
    )
    left = Path(f"/run/gpuhook/launcher{config}")
    left.mkdir(parents=True)
    (left / "cache").write_text("of another config.toml with an older time\n")
    told = run([installation.command, "refresh", "--config", config]).ok().stdout
    assert "3 GPUs" in told
    assert len(told.splitlines()) == 1
    more = run([installation.command, "refresh", "--config", config, "--format=json"]).ok()
    [described] = json.loads(more.stdout)
    assert (described["vendor"], described["devices"]) == ("nvidia", 3)
    assert described["links"] == []  # the first call has made them
    assert (left / "cache").read_text().splitlines()[1] == ":runc:crun:"
    # gpuhook doesn't trust an inventory that another installation saved, but the file is complete.
    (saved,) = Path(host.config.state_dir).glob("inventory-nvidia-????????????????")
    assert saved.read_text().count('"uuid"') == 3
    host.simulate(gpus=2)
    told = run([installation.command, "refresh", "--if-stale", "--config", config]).ok().stdout
    assert "2 GPUs" in told


def test_a_saved_inventory_with_a_lost_gpu_expires(host: Host) -> None:
    """Only NVML reports that a GPU that had fallen off the bus is back."""
    host.simulate(gpus=2, lost=frozenset({1}))
    assert host.inventory().lost == (1,)
    assert cache.saved(host.config, VENDOR) is not None
    (saved,) = Path(host.config.state_dir).glob("inventory-nvidia-????????????????")
    os.utime(saved, (0, 0))
    assert cache.saved(host.config, VENDOR) is None
