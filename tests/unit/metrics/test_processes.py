"""Whose processes are, also of those that have just ended."""

import subprocess

from gpuhook.tools.metrics import processes
from gpuhook.tools.metrics.processes import Processes, find, poses

ID = "0123456789abcdef" * 4


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
