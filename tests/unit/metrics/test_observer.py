"""Whose a process' use is."""

from pathlib import Path

import pytest

from gpuhook.ground.config.loader import load
from gpuhook.tools.metrics import observer as observers
from gpuhook.tools.metrics.containers import Owner
from gpuhook.tools.metrics.model import Container
from gpuhook.tools.metrics.observer import Observer
from gpuhook.tools.metrics.processes import Processes

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


def test_unknown_containers_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may make cgroups has no more series than there may be."""
    monkeypatch.setattr(observers, "LIMIT", 3)
    (tmp_path / "config.toml").touch()
    observer = Observer(load(str(tmp_path / "config.toml")))
    ids = [f"{number:064x}" for number in range(5)]
    known = {-at: ("", f"/docker/{each}", Owner("docker", each)) for at, each in enumerate(ids)}
    observer._processes._known = dict(known)
    said = {"processes": [(-number, 1 << 20) for number in range(5)]}
    problems: list[str] = []
    containers, usages = observer._assemble([], {"GPU-1": said}, problems)
    assert len(containers) == 3
    assert {each.container: each.processes for each in usages}[""] == 2
    [problem] = problems
    assert "without a record use devices" in problem
    said = {"processes": said["processes"][:3]}
    problems.clear()
    observer._processes._known = dict(known)
    containers, _ = observer._assemble([], {"GPU-1": said}, problems)
    assert (len(containers), problems) == (3, [])
