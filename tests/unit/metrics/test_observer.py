"""Whose a process' use is."""

from pathlib import Path

import pytest

from gpuhook.config import load
from gpuhook.metrics.containers import Owner
from gpuhook.metrics.model import Container
from gpuhook.metrics.observer import Observer
from gpuhook.metrics.processes import Processes

ID = "0123456789abcdef" * 4
SCOPE = f"docker-{ID}.scope"
USERS = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (f"/system.slice/{SCOPE}", ID),
        (f"/system.slice/{SCOPE}/below", ID),
        (f"{USERS}/{SCOPE}", ""),
    ],
)
def test_nobody_uses_a_device_in_anothers_name(tmp_path: Path, group: str, expected: str) -> None:
    (tmp_path / "config.toml").touch()
    observer = Observer(load(str(tmp_path / "config.toml")))
    known = {ID: Container(ID, "docker")}
    # A process of this cgroup, as it was found when it began.
    processes = Processes()
    processes._known[0] = ("", group, Owner("docker", ID))
    observer._processes = processes
    assert observer._container_of(0, {f"/system.slice/{SCOPE}": ID}, known) == expected
