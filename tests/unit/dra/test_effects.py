"""What was done to devices for a claim is undone, also where their driver doesn't answer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import DriverError
from gpuhook.tools.dra.effects import Effects
from gpuhook.tools.vendors.nvidia import claim_config

SLICE = {"vendor": "nvidia", "do": "time-slice", "devices": ["GPU-a"], "slice": 1}
MPS = {"vendor": "nvidia", "do": "mps", "devices": ["GPU-a"], "threads": 0, "memory": 0}


def effects(**failures: DriverError) -> Effects:
    """Return those of a machine without any inventory, as at a start."""
    machine = SimpleNamespace(found=[], failures=lambda: failures)
    devices: Any = SimpleNamespace(config=Config(), observed=SimpleNamespace(machine=machine))
    return Effects(devices)


@pytest.mark.parametrize("effect", [SLICE, MPS])
def test_while_the_driver_fails_nothing_is_forgotten(
    effect: dict[str, Any], tmp_path: Path
) -> None:
    failing = effects(nvidia=DriverError("it hangs", "wait"))
    with pytest.raises(DriverError, match="it hangs"):
        failing.undo({**effect, "folder": str(tmp_path)}, [])


def test_without_a_driver_daemons_end_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []

    class Keeper:
        def __init__(self, config: Config, *_: object) -> None:
            self.stop = lambda **_: stopped.append(config.state_dir)

    monkeypatch.setattr(claim_config, "Keeper", Keeper)
    folder = tmp_path / "mps"
    folder.mkdir()
    effects().undo(SLICE, [])
    effects().undo({**MPS, "folder": str(folder)}, [])
    assert stopped == [str(folder)]
    assert not folder.exists()
