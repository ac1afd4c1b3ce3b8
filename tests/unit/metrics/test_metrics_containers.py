"""From cgroups to containers and pods, from device ids to GPUs, and owners of processes."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.config.loader import load
from gpuhook.base.host import proc
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.metrics import containers, pods, processes
from gpuhook.metrics import observer as observers
from gpuhook.metrics.containers import DeviceReference, Owner
from gpuhook.metrics.model import Container
from gpuhook.metrics.observer import Observer
from gpuhook.metrics.pods import Pod
from gpuhook.metrics.processes import Processes, find, poses

Case = dict[str, Any]

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
UID = "12345678-1234-1234-1234-123456789012"
SLICE = UID.replace("-", "_")


@pytest.mark.vectors("metrics_cgroup", "metrics.pod_of_cgroup")
def test_pod_uids_of_cgroups_match_the_vectors(case: Case) -> None:
    assert containers.pod_uid(case["input"]["path"]) == case["expected"]["pod_uid"]


@pytest.mark.protects(
    "own-job-name",
    "a container's own cgroup name isn't mistaken for a Slurm job",
    instead='return next((match[1] for path in paths if (match := _JOB.search(path))), "")',
)
@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("/slurm/uid_1000/job_41/step_0/task_0", "41"),
        ("/slurm_node7/uid_0/job_41", "41"),
        ("/system.slice/slurmstepd.scope/job_41/step_batch/user/task_0", "41"),
        ("/system.slice/node7_slurmstepd.scope/job_41/step_0", "41"),
        ("/system.slice/slurmd.service", ""),
        ("/slurm/uid_1000/job_x", ""),
        # As seen by a container with its own cgroup namespace.
        ("/../../slurm/uid_1000/job_41/step_0", "41"),
        ("/../../system.slice/slurmstepd.scope/job_41", "41"),
        ("/../node7_slurmstepd.scope/job_41", "41"),
        (f"/../{ID}/slurm/uid_0/job_41", ""),
        (f"/../docker-{ID}.scope/slurmstepd.scope/job_41", ""),
        # Names that a container may choose for its own cgroups.
        (f"/docker/{ID}/slurm/uid_0/job_41", ""),
        ("/user.slice/user@1000.service/slurm/uid_0/job_41", ""),
        ("/box/system.slice/slurmstepd.scope/job_41", ""),
        ("/slurm/uid_0/job_7/step_0/slurm/uid_0/job_41", "7"),
    ],
)
def test_slurm_jobs_are_identified_by_slurms_own_cgroups_only(path: str, job: str) -> None:
    for groups in ({"devices": path, "": "/"}, {"": path}):
        found = containers.owner_of(groups)
        assert found.job == job
        if not found.id or found.engine == "slurm":
            assert (found.engine, found.id) == (("slurm", f"slurm:{job}") if job else ("", ""))


def test_a_container_within_a_slurm_job_keeps_its_own_identity() -> None:
    found = containers.owner_of({"": f"/system.slice/slurmstepd.scope/job_41/docker-{ID}.scope"})
    assert (found.engine, found.id, found.job) == ("docker", ID, "41")


@pytest.mark.vectors("metrics_cgroup", "metrics.pod_of_process")
def test_pod_uids_of_processes_match_the_vectors(case: Case) -> None:
    given = case["input"]
    assert containers.pod_of(given["v1"], given["v2"]) == case["expected"]["pod_uid"]


@pytest.mark.vectors("metrics_cgroup", "metrics.container_of_cgroup")
def test_containers_of_cgroups_match_the_vectors(case: Case) -> None:
    found = containers.owner(case["input"]["path"])
    known = {"container": found.id or None, "engine": found.engine, "pod_uid": found.pod_uid}
    assert {key: known[key] for key in case["expected"]} == case["expected"]


@pytest.mark.vectors("metrics_cgroup", "metrics.device_id")
def test_device_ids_match_the_vectors(case: Case) -> None:
    for text, expected in zip(
        case["input"]["device_ids"], case["expected"]["devices"], strict=True
    ):
        found = containers.assigned(text)
        known = {
            "gpu": found.gpu,
            "gpu_index": found.index,
            "gi": found.gi,
            "ci": found.ci,
            "replica": found.replica,
        }
        assert {key: known[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/docker/{ID}", Owner("docker", ID)),
        (f"/system.slice/docker-{ID}.scope", Owner("docker", ID)),
        (f"/system.slice/docker-{ID}.scope/init.scope", Owner("docker", ID)),
        (f"/kubepods/pod{UID}/{ID}", Owner("kubernetes", ID, UID)),
        (
            f"/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope/container",
            Owner("cri-o", ID, UID),
        ),
        (f"/kubepods.slice/kubepods-pod{SLICE}.slice/crio-conmon-{ID}.scope", Owner(pod_uid=UID)),
        (
            f"/system.slice/containerd/kubepods-burstable-pod{SLICE}.slice:cri-containerd:{ID}",
            Owner("kubernetes", ID, UID),
        ),
        (
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope",
            Owner("podman", ID),
        ),
        (f"/kubepods/besteffort/pod{UID}/{ID}/docker/{OTHER}", Owner("kubernetes", ID, UID)),
        (f"/kubepods/burstable/pod{UID}", Owner(pod_uid=UID)),
        (f"/docker/{ID[:-1]}", Owner()),
        (f"/docker/{ID}0", Owner()),
        ("/kubepods/burstable/podinfo-service", Owner()),
        ("/", Owner()),
    ],
)
def test_further_cgroup_paths_identify_their_containers(path: str, expected: Owner) -> None:
    assert containers.owner(path) == expected


def owner_of(text: str) -> Owner:
    return containers.owner_of(proc.cgroups(text.encode()))


def test_a_process_belongs_to_the_container_in_its_cgroup_path() -> None:
    text = f"12:devices:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/a:b\n"
    assert owner_of(text) == Owner("docker", ID)
    assert owner_of(f"0::/docker/{ID}\n") == Owner("docker", ID)
    assert owner_of("0::/user.slice\nnonsense\n") == Owner()
    assert owner_of("") == Owner()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU-1::0", DeviceReference("GPU-1", replica="0")),
        ("MIG-5c89852c::2", DeviceReference("MIG-5c89852c", replica="2")),
        ("MIG-GPU-5c89852c-d268/7/0", DeviceReference("GPU-5c89852c-d268", gi="7", ci="0")),
        ("3", DeviceReference(index="3")),
        ("3::1", DeviceReference(index="3", replica="1")),
        ("nvidia0", DeviceReference("nvidia0", "0")),
        ("nvidia12/gi3/vgpu1", DeviceReference(index="12", gi="3", replica="1")),
        ("nvidia0/other", DeviceReference("nvidia0/other")),
        ("", DeviceReference()),
    ],
)
def test_further_forms_of_device_ids_are_parsed(text: str, expected: DeviceReference) -> None:
    assert containers.assigned(text) == expected


# Whose a process is ---------------------------------------------------------------------------


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
def test_a_container_id_in_another_cgroup_path_does_not_count(
    tmp_path: Path, group: str, expected: str
) -> None:
    (tmp_path / "config.toml").touch()
    observer = Observer(load(str(tmp_path / "config.toml")))
    known = {ID: Container(ID, "docker")}
    # A process of this cgroup, with the owner that was found when the process started.
    processes = Processes()
    processes._known[0] = ("", group, Owner("docker", ID))
    observer._processes = processes
    assert observer._container_of(0, {f"/system.slice/{SCOPE}": ID}, known) == expected


def test_unknown_containers_beyond_the_maximum_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who may create cgroups gets no more series than the maximum."""
    monkeypatch.setattr(observers, "MAX_CONTAINERS", 3)
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


def test_an_ended_process_is_remembered_for_one_more_snapshot() -> None:
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


def test_a_process_belongs_to_the_innermost_known_cgroup() -> None:
    groups = {"/a": "one", "/a/b": "two"}
    assert find("/a/b/c", groups) == "two"
    assert find("/a/bc", groups) == "one"
    assert find("/ab", groups) == ""
    assert find("", groups) == ""


def test_a_cgroup_named_like_a_container_elsewhere_is_detected() -> None:
    groups = {f"/system.slice/docker-{ID}.scope/init.scope": ID, "/user.slice/box": "box"}
    assert not poses(f"/system.slice/docker-{ID}.scope/system.slice/a.service", ID, groups)
    assert poses(f"/user.slice/user-1000.slice/user@1000.service/docker-{ID}.scope", ID, groups)
    assert poses("/user.slice", ID, groups)  # the id comes from another hierarchy's path
    assert not poses(f"/user.slice/docker-{ID}.scope", ID, {})


# Pods -----------------------------------------------------------------------------------------


GPU_0, GPU_1, PART_0, PART_1 = "GPU-aa-0", "GPU-aa-1", "MIG-bb-0", "MIG-bb-1"
NVIDIA = Inventory(
    "nvidia", "/", "1",
    (
        Device(GPU_0, "0", {"index": ("0",), "uuid": (GPU_0,)}, ("/dev/nvidia3",)),
        Device(GPU_1, "1", {"index": ("1",), "uuid": (GPU_1,)}, ("/dev/nvidia4",)),
        Device(PART_0, "1:0", {"mig": ("1:0",), "uuid": (PART_0,)}, parent=GPU_1),
        Device(PART_1, "1:1", {"mig": ("1:1",), "uuid": (PART_1,)}, parent=GPU_1),
    ), (),
)  # fmt: skip
AMD = Inventory("amd", "/", "1", (Device("0000:03:00.0", "0", {"index": ("0",)}),), ())
FACTS: dict[str, dict[str, Any]] = {
    GPU_0: {"minor": 3}, GPU_1: {"minor": 4},
    PART_0: {"minor": 4, "gpu_instance": 7}, PART_1: {"minor": 4, "gpu_instance": 9},
}  # fmt: skip
FOUND = [("nvidia.com/gpu", NVIDIA, FACTS), ("amd.com/gpu", AMD, {})]
POD = Container("c1", "kubernetes", pod_uid="uid", devices=(GPU_0,))


@pytest.mark.parametrize(
    ("resource", "device", "expected"),
    [
        ("nvidia.com/gpu", GPU_0, {GPU_0}),
        ("nvidia.com/gpu.shared", f"{GPU_0}::3", {GPU_0}),
        ("nvidia.com/gpu", "1", {GPU_1}),
        ("amd.com/gpu", "0", {"0000:03:00.0"}),
        ("amd.com/gpu", "0000:03:00.0", {"0000:03:00.0"}),
        ("nvidia.com/mig-1g.10gb", PART_0, {PART_0}),
        ("nvidia.com/mig-1g.10gb", "1:1", {PART_1}),
        ("nvidia.com/mig-1g.10gb", f"MIG-{GPU_1}/9/0", {PART_1}),
        ("nvidia.com/gpu", "nvidia3", {GPU_0}),
        ("nvidia.com/gpu", "nvidia4/gi7", {PART_0}),
        ("nvidia.com/gpu", "nvidia3/vgpu1", {GPU_0}),
        ("nvidia.com/gpu", "GPU-other", set()),
        ("other.example/gpu", GPU_0, set()),
        ("notnvidia.com/gpu", GPU_0, set()),
    ],
)
def test_device_ids_from_the_kubelet_are_mapped_to_devices(
    resource: str, device: str, expected: set[str]
) -> None:
    found = pods.read([["space", "pod", "web", [[resource, device]]]], FOUND)
    assert {name for each in found for name in each.devices} == expected


def pod(name: str, *devices: str) -> Pod:
    return Pod("space", name, "web", frozenset(devices))


def test_a_pod_is_matched_to_the_only_container_with_its_devices() -> None:
    other = Container("c2", "docker", devices=(GPU_0,))
    found = pods.name([POD, other], [pod("a", GPU_0)])
    named = replace(POD, pod="a", namespace="space", container="web")
    assert {each.id: each for each in found} == {"c1": named, "c2": other}


def test_a_pod_of_a_known_container_is_listed_once() -> None:
    known = replace(POD, pod="a", namespace="space", container="web")
    assert pods.name([known], [pod("a", GPU_0)]) == [known]


def test_pods_that_share_devices_are_not_matched_to_containers() -> None:
    two = [POD, replace(POD, id="c2")]
    found = pods.name(two, [pod("a", GPU_0), pod("b", GPU_0)])
    assert {(each.id, each.pod, each.devices) for each in found} == {
        ("c1", "", ()), ("c2", "", ()), ("", "a", (GPU_0,)), ("", "b", (GPU_0,)),
    }  # fmt: skip


def test_a_pod_without_a_known_container_gets_an_entry_of_its_own() -> None:
    [found] = pods.name([], [pod("a", GPU_1, GPU_0)])
    expected = Container("", "kubernetes", "", "a", "space", "web", devices=(GPU_0, GPU_1))
    assert found == expected
