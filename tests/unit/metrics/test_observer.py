"""Owners of the processes that a driver lists, and the containers' data."""

from typing import Any

import pytest

from gpuhook.base.config.loader import load
from gpuhook.metrics.assigned import ContainerCgroup
from gpuhook.metrics.containers import owner_of
from gpuhook.metrics.model import Usage
from gpuhook.metrics.observer import Observer
from gpuhook.monitor.containers import device_users, memory

ID = "a" * 64


@pytest.fixture
def observer() -> Observer:
    return Observer(load("/dev/null"))


def holder(name: str, group: str, *devices: str, engine: str = "") -> ContainerCgroup:
    return ContainerCgroup(
        device_users.RunningContainer(name, engine, 1, "sh"), group, "", "", "", devices, ""
    )


def assembled(observer: Observer, found: list[ContainerCgroup], **processes: Any) -> Any:
    """Return the devices of each container, and each container's use of G0, both by id.

    ``processes`` are what the driver reports of G0; the id of each is the index of its cgroup.
    """
    containers, usages = observer._assemble(found, {"G0": processes}, [])
    return {each.id: each.devices for each in containers}, {each.container: each for each in usages}


@pytest.mark.protects(
    "same-id",
    "metrics keep the devices of all containers that share an id",
    instead="known[made.id] = made",
)
def test_containers_with_the_same_id_are_merged(observer: Observer) -> None:
    """runc may have the same id in two root folders; neither container loses its devices."""
    found = [holder("same", "/a/same", "G0", "G2"), holder("same", "/b/same", "G1", "G2")]
    devices, _ = assembled(observer, found)
    assert devices == {"same": ("G0", "G2", "G1")}


def test_processes_of_a_slurm_job_without_a_container_are_the_jobs(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are processes of a container without its own cgroup, and of another task of the job."""
    paths = {7: "/slurm/uid_5/job_41/step_0/task_0", 8: "/slurm/uid_5/job_41/step_0/task_1",
             9: "/slurm/uid_5/job_42/step_0/task_0", 10: f"/user/docker/{ID}"}  # fmt: skip
    place = {pid: (path, owner_of({"": path})) for pid, path in paths.items()}
    monkeypatch.setattr(observer._processes, "place", place.__getitem__)
    found = [holder("slurm:41", paths[7], "G0", engine="slurm"), holder(ID, f"/docker/{ID}")]
    _, used = assembled(observer, found, processes=[[7, 1], [8, 2], [9, 4], [10, 8]])
    by_id = {each: (usage.memory_bytes, usage.processes) for each, usage in used.items()}
    # A process whose cgroup only has another container's name is in no container.
    assert by_id == {"slurm:41": (3, 2), "slurm:42": (4, 1), "": (8, 1)}


def test_usage_is_unknown_without_the_drivers_process_list(observer: Observer) -> None:
    """Processes may exist, so neither use nor idleness is known."""
    _, used = assembled(observer, [holder("web", "/web", "G0")], sm={})
    assert used == {}
    _, used = assembled(observer, [holder("web", "/web", "G0")], sm={"0": 0.5})
    assert used == {"": Usage("", "G0", None, 0.5, None)}
    _, used = assembled(observer, [holder("web", "/web", "G0")], processes=[])
    assert used == {"web": Usage("web", "G0", 0, None, 0)}


@pytest.mark.parametrize(("took", "left"), [(0.0, 4.0), (1.0, 3.0), (4.5, 0.5)])
def test_memory_reading_gets_only_the_time_the_driver_left(
    observer: Observer, monkeypatch: pytest.MonkeyPatch, took: float, left: float
) -> None:
    """Otherwise a scrape with memory limits takes longer than Prometheus waits."""
    asked: list[object] = []

    def look(*words: object) -> Any:
        asked.append(words[-1])
        return {}, ""

    monkeypatch.setattr(memory, "look", look)
    observer._durations["driver"] = took
    assembled(observer, [])
    assert asked == [left]
