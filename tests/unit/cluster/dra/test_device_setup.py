"""Rollback of a claim's changes to devices, even if the driver doesn't respond."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError
from gpuhook.cluster.dra.device_setup import Effects
from gpuhook.cluster.vendors.nvidia import claim_config
from gpuhook.monitor.ledger.records import COMPLETED, ChangedSetting, OwnerRecord

NONE = OwnerRecord("gpu.nvidia.com", "u", "ns", "a", COMPLETED, "boot")
SLICE = replace(NONE, settings=(ChangedSetting("nvidia", "GPU-a", "time-slice", 0, 1),))


def mps(folder: Path) -> OwnerRecord:
    words = {"devices": ["GPU-a"], "threads": 0, "memory": 0, "folder": str(folder)}
    return replace(NONE, effects=({"vendor": "nvidia", "do": "mps", **words},))


def effects(**failures: DriverError) -> Effects:
    """Return the effects of a host without any inventory, as at a start."""
    machine = SimpleNamespace(found=[], failures=lambda: failures)
    devices: Any = SimpleNamespace(config=Config(), observed=SimpleNamespace(machine=machine))
    return Effects(devices)


@pytest.mark.protects("dra-undone", "changes for a DRA claim stay recorded while the driver fails")
def test_changes_are_not_forgotten_while_the_driver_fails(tmp_path: Path) -> None:
    failing = effects(nvidia=DriverError("it hangs", "wait"))
    for record in (SLICE, mps(tmp_path)):
        with pytest.raises(DriverError, match="it hangs"):
            failing.undo(record, print)


@pytest.mark.protects("dra-undone", "changes for a DRA claim stay recorded while the driver fails")
def test_without_a_driver_mps_daemons_are_still_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []

    class MpsController:
        def __init__(self, config: Config, *_: object, **__: object) -> None:
            self.stop = lambda: stopped.append(config.state_dir)

    monkeypatch.setattr(claim_config, "MpsController", MpsController)
    folder = tmp_path / "mps"
    folder.mkdir()
    effects().undo(SLICE, print)
    effects().undo(mps(folder), print)
    assert stopped == [str(folder)]
    assert not folder.exists()
