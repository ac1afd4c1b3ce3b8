"""Shared parts of the NRI plugin's tests: a simulated machine with GPUs."""

import os
from pathlib import Path

import paper
import pytest

from gpuhook.base.config.model import Config
from gpuhook.cluster.nri.answer import InjectionMode
from gpuhook.core.inventory import cache


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InjectionMode:
    """A simulated machine with four AMD GPUs, whose nodes have the numbers of /dev/null."""
    inventory = paper.machine("amd", tmp_path)
    monkeypatch.setattr(cache, "get_inventory", lambda *_, **__: inventory)
    status = os.stat("/dev/null")
    real = os.stat
    monkeypatch.setattr(
        "gpuhook.cluster.nri.service.os.stat",
        lambda path, *rest, **more: status if "/dev/" in str(path) else real(path, *rest, **more),
    )
    return InjectionMode(Config(), "/opt/gpuhook/bin/gpuhook-cdi-hook")
