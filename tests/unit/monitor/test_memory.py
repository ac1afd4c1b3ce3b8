"""Memory of containers according to cgroups, read only where it is counted."""

import os
from pathlib import Path

import pytest

from gpuhook.base.cgroup import dmem
from gpuhook.base.config.loader import load
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.monitor.containers import memory
from gpuhook.monitor.containers.device_users import RunningContainer

CARD = Inventory("intel", "/", "1", (Device("d", "0", {}, bus_id="0000:03:00.0"),), ())
LIMIT = {"id": "d", "vendor": "intel"}


def asked(monkeypatch: pytest.MonkeyPatch, *records: dict[str, object]) -> list[str]:
    """Return the containers whose cgroups were searched for."""
    seen = []

    def note(container: RunningContainer) -> None:
        seen.append(container.name)

    monkeypatch.setattr(memory, "_place", note)
    every = [
        RunningContainer(
            str(number), "docker", os.getpid(), "sh", set(), record={"given": [], **record}
        )
        for number, record in enumerate(records)
    ]
    assert memory.look(every, [CARD], load("/dev/null")) == ({}, "")
    return seen


def test_unlimited_containers_are_read_only_where_memory_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dmem, "TREE", str(tmp_path))
    assert asked(monkeypatch, {}, {"limits": []}, {"limits": [LIMIT]}) == ["2"]
    (tmp_path / dmem.CAPACITY).write_text("drm/0000:04:00.0/vram0 8\n")
    assert asked(monkeypatch, {}) == []  # another device's
    (tmp_path / dmem.CAPACITY).write_text("drm/0000:03:00.0/vram0 8\n")
    assert asked(monkeypatch, {}, {"limits": []}) == ["0", "1"]
