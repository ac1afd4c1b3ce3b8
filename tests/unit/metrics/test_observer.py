"""Whose a process' use is."""

import subprocess
from pathlib import Path

import pytest

from gpuhook.ground.config.loader import load
from gpuhook.tools.metrics import observer as observers
from gpuhook.tools.metrics import processes
from gpuhook.tools.metrics.containers import Owner
from gpuhook.tools.metrics.model import Container
from gpuhook.tools.metrics.observer import Observer
from gpuhook.tools.metrics.processes import Processes, find, poses

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


# Processes ------------------------------------------------------------------------------------


def test_a_process_that_has_just_ended_is_known_for_one_more_look() -> None:
    with subprocess.Popen(["sleep", "1000"]) as running:
        known = Processes()
        before = known.place(running.pid)
        text = processes.started(running.pid)
        assert text.isdecimal()
        known.forget()
        running.kill()
    assert processes.started(running.pid) == ""
    assert known.place(running.pid) == known.place(running.pid) == before
    known.forget()
    assert running.pid not in known._known
    assert known.place(running.pid)[1].id == ""


def test_a_process_belongs_to_the_group_that_is_nearest() -> None:
    groups = {"/a": "one", "/a/b": "two"}
    assert find("/a/b/c", groups) == "two"
    assert find("/a/bc", groups) == "one"
    assert find("/ab", groups) == ""
    assert find("", groups) == ""


def test_a_cgroup_is_no_container_that_is_elsewhere() -> None:
    groups = {f"/system.slice/docker-{ID}.scope/init.scope": ID, "/user.slice/box": "box"}
    assert not poses(f"/system.slice/docker-{ID}.scope/system.slice/a.service", ID, groups)
    assert poses(f"/user.slice/user-1000.slice/user@1000.service/docker-{ID}.scope", ID, groups)
    assert poses("/user.slice", ID, groups)  # it is called so in another hierarchy
    assert not poses(f"/user.slice/docker-{ID}.scope", ID, {})
