"""Device metadata of claims: the files that Kubernetes 1.37 defines, and their readers."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dra_kubelet import Claim
from harness.commands import run, wait_until
from harness.dra import GPU_DRIVER, Node, one_node, result, slice_name
from harness.driver import Driver, simulate
from harness.installation import Installation

INSIDE = "/var/run/kubernetes.io/dra-device-attributes"
ON: dict[str, Any] = {"device_metadata": True}
TEMPLATE = "resource.kubernetes.io/pod-claim-name"


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    return simulate(installation, tmp_path / "root", "--gpus", "4")


@pytest.fixture
def node(installation: Installation, workspace: Path, driver: Driver) -> Iterator[Node]:
    with one_node(workspace, installation, driver.root) as made:
        yield made


def folder(node: Node) -> Path:
    return node.kubelet.plugins / GPU_DRIVER / "device-metadata"


def files(node: Node) -> list[str]:
    return sorted(each.name for each in folder(node).iterdir()) if folder(node).exists() else []


def objects(path: str) -> list[Any]:
    """Return the objects of a stream, which a JSON decoder reads one after another."""
    text, found = Path(path).read_text(), []
    while text := text.lstrip():
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def mounts(node: Node, claim: Claim) -> dict[str, str]:
    """Return the files that a claim's CDI spec mounts, by their paths in the container."""
    document = node.document(claim)
    every = [
        mount
        for device in document["devices"]
        for mount in device["containerEdits"].get("mounts", ())
        if mount["containerPath"].startswith(INSIDE)
    ]
    assert all({"ro", "nosuid", "nodev", "noexec"} <= {*mount["options"]} for mount in every)
    found = {mount["containerPath"]: mount["hostPath"] for mount in every}
    assert len(found) == len(every)
    return found


def prepared(node: Node, claim: Claim) -> None:
    found = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
    assert not isinstance(found, str), found


def published(node: Node, name: str) -> Any:
    """Return the attributes that the node publishes for a device, from the command's output."""
    words = ("dra", "--dry-run", "--node", "n1", "--format", "json", "--config", node.config)
    every = json.loads(run([node.installation.command, *words]).ok().stdout)["items"]
    slices = [each["spec"] for each in every if each["kind"] == "ResourceSlice"]
    [device] = [one for each in slices for one in each["devices"] if one["name"] == name]
    return device["attributes"]


def test_metadata_files_are_written_per_request_and_removed_with_the_claim(
    node: Node, driver: Driver
) -> None:
    """Each request has one file for all its devices, in both API versions."""
    names = [slice_name(driver.gpus[number].uuid) for number in range(3)]
    results = (result(names[0]), result(names[1]), result(names[2], "other/sub"))
    claim = node.claim("train", *results)
    with node.service(options=ON):
        prepared(node, claim)
        found = mounts(node, claim)
        place = f"{INSIDE}/resourceclaims/train"
        end = f"{GPU_DRIVER}-metadata.json"
        assert {*found} == {f"{place}/gpu/{end}", f"{place}/other/{end}"}
        newest, older = objects(found[f"{place}/gpu/{end}"])
        assert newest.pop("apiVersion") == "metadata.resource.k8s.io/v1beta1"
        assert older.pop("apiVersion") == "metadata.resource.k8s.io/v1alpha1"
        assert newest == older
        about = {"name": "train", "namespace": "ns", "uid": claim.uid, "generation": 1}
        devices = [
            {"driver": GPU_DRIVER, "pool": "n1", "name": name, "attributes": published(node, name)}
            for name in names[:2]
        ]
        assert newest == {
            "kind": "DeviceMetadata",
            "metadata": about,
            "requests": [{"name": "gpu", "devices": devices}],
        }
        assert devices[0]["attributes"]["uuid"] == {"string": driver.gpus[0].uuid}
        [request] = objects(found[f"{place}/other/{end}"])[0]["requests"]
        assert request["name"] == "other/sub"
        assert [each["name"] for each in request["devices"]] == names[2:]
        for path in found.values():
            assert os.stat(path).st_mode & 0o777 == 0o644, "programs of any user read it"
        before = [os.stat(path).st_mtime_ns for path in found.values()]
        prepared(node, claim)
        assert [os.stat(path).st_mtime_ns for path in found.values()] == before
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert files(node) == node.left() == []


def test_a_claim_from_a_template_uses_the_pods_claim_name(node: Node, driver: Driver) -> None:
    """The pod knows only its own name for the claim."""
    about = {"namespace": "ns", "name": "pod-mine-x7k2p", "uid": "0-1"}
    metadata = {**about, "annotations": {TEMPLATE: "mine"}}
    found = result(slice_name(driver.gpus[0].uuid))
    claim = node.claim("pod-mine-x7k2p", found, uid="0-1", metadata=metadata)
    with node.service(options=ON):
        prepared(node, claim)
        place = f"{INSIDE}/resourceclaimtemplates/mine/gpu/{GPU_DRIVER}-metadata.json"
        [(inside, path)] = mounts(node, claim).items()
        assert inside == place
        assert objects(path)[0]["podClaimName"] == "mine"


@pytest.mark.parametrize("name", ["../../../../etc", "a/b", ".", "..", "A", "x" * 300, "a\n"])
def test_a_claim_name_unsafe_as_a_path_is_refused(node: Node, driver: Driver, name: str) -> None:
    """The author of a claim also writes its annotations."""
    about = {"namespace": "ns", "name": "a", "uid": "0-1"}
    metadata = {**about, "annotations": {TEMPLATE: name}}
    found = result(slice_name(driver.gpus[0].uuid))
    claim = node.claim("a", found, uid="0-1", metadata=metadata)
    with node.service(options=ON):
        said = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
        assert isinstance(said, str)
        assert "can't be part of the path of device metadata" in said
        assert files(node) == node.left() == []


def test_lost_metadata_files_are_rewritten_and_stale_ones_removed(
    node: Node, driver: Driver
) -> None:
    """A prepare request rewrites lost files; the next start removes files of deleted claims."""
    claim = node.claim("a", result(slice_name(driver.gpus[0].uuid)))
    with node.service(options=ON):
        prepared(node, claim)
        [name] = files(node)
        (folder(node) / name).unlink()
        prepared(node, claim)
        assert files(node) == [name]
    for left in ("0-2_gpu.json", ".0-2_gpu.json.1f"):
        (folder(node) / left).write_text("{}")
    with node.service(options=ON):
        other = node.claim("b", result(slice_name(driver.gpus[1].uuid)))
        prepared(node, other)
        wait_until(lambda: not [each for each in files(node) if "0-2_" in each], "it is swept")
        assert name in files(node)


def test_metadata_is_written_only_if_enabled(node: Node, driver: Driver) -> None:
    """A claim that was prepared earlier gets its files after the service restarts with metadata."""
    claim = node.claim("a", result(slice_name(driver.gpus[0].uuid)))
    with node.service():
        prepared(node, claim)
        assert mounts(node, claim) == {}
        assert files(node) == []
    with node.service(options=ON):
        prepared(node, claim)
        assert len(mounts(node, claim)) == len(files(node)) == 1
    with node.service():
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert files(node) == []
