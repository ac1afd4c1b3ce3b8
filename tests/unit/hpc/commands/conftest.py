"""Shared parts of these commands' tests: a configuration of their own, and a machine's drivers."""

from pathlib import Path

import pytest
from drivers_found import finds

__all__ = ["finds"]


@pytest.fixture
def config(tmp_path: Path) -> list[str]:
    """Words that name a configuration with a state folder of its own."""
    path = tmp_path / "config.toml"
    path.write_text(f'[gpuhook]\nstate-dir = "{tmp_path}/state"\n')
    return ["--config", str(path)]
