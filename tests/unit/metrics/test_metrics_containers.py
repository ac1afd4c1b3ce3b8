"""From cgroups to containers and pods, and from device ids to GPUs."""

from typing import Any

import pytest

from gpuhook.ground.host import proc
from gpuhook.tools.metrics import containers
from gpuhook.tools.metrics.containers import Assigned, Owner

Case = dict[str, Any]

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
UID = "12345678-1234-1234-1234-123456789012"
SLICE = UID.replace("-", "_")


@pytest.mark.vectors("metrics_cgroup", "metrics.pod_of_cgroup")
def test_pods(case: Case) -> None:
    assert containers.pod_uid(case["input"]["path"]) == case["expected"]["pod_uid"]


@pytest.mark.vectors("metrics_cgroup", "metrics.pod_of_process")
def test_pods_of_processes(case: Case) -> None:
    given = case["input"]
    assert containers.pod_of(given["v1"], given["v2"]) == case["expected"]["pod_uid"]


@pytest.mark.vectors("metrics_cgroup", "metrics.container_of_cgroup")
def test_containers(case: Case) -> None:
    found = containers.owner(case["input"]["path"])
    known = {"container": found.id or None, "engine": found.engine, "pod_uid": found.pod_uid}
    assert {key: known[key] for key in case["expected"]} == case["expected"]


@pytest.mark.vectors("metrics_cgroup", "metrics.device_id")
def test_device_ids(case: Case) -> None:
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
def test_further_paths(path: str, expected: Owner) -> None:
    assert containers.owner(path) == expected


def owner_of(text: str) -> Owner:
    return containers.owner_of(proc.cgroups(text.encode()))


def test_whose_a_process_is() -> None:
    text = f"12:devices:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/a:b\n"
    assert owner_of(text) == Owner("docker", ID)
    assert owner_of(f"0::/docker/{ID}\n") == Owner("docker", ID)
    assert owner_of("0::/user.slice\nnonsense\n") == Owner()
    assert owner_of("") == Owner()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU-1::0", Assigned("GPU-1", replica="0")),
        ("MIG-5c89852c::2", Assigned("MIG-5c89852c", replica="2")),
        ("MIG-GPU-5c89852c-d268/7/0", Assigned("GPU-5c89852c-d268", gi="7", ci="0")),
        ("3", Assigned(index="3")),
        ("3::1", Assigned(index="3", replica="1")),
        ("nvidia0", Assigned("nvidia0", "0")),
        ("nvidia12/gi3/vgpu1", Assigned(index="12", gi="3", replica="1")),
        ("nvidia0/other", Assigned("nvidia0/other")),
        ("", Assigned()),
    ],
)
def test_further_device_ids(text: str, expected: Assigned) -> None:
    assert containers.assigned(text) == expected
