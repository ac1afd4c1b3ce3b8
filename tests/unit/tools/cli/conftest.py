"""Shared parts of commands' tests: a configuration for the tests, and drivers of a host."""

from pathlib import Path

import pytest
from drivers_found import finds

__all__ = ["finds"]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Command-line words that name a configuration with a state folder for the test."""
    monkeypatch.setattr("gpuhook.tools.cli.cdi_generate.our_program", lambda *_: "/bin/true")
    path = tmp_path / "config.toml"
    path.write_text(f'[gpuhook]\nstate-dir = "{tmp_path}/state"\n')
    return ["--config", str(path)]
