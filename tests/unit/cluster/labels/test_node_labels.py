"""Labels of a node: AMD's, equal to those of AMD's labeller, and updates in the API server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machines
import paper
import pytest
from api_server import GARBAGE, ApiServer, serving

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import PluginError
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.dra.access import Access
from gpuhook.cluster.dra.api_client import ApiClient
from gpuhook.cluster.labels.node_labels import OURS, ClusterNode, labels, text
from gpuhook.cluster.vendors.nvidia import labels as nvidia
from gpuhook.core import contract
from gpuhook.core.inventory.model import Inventory
from gpuhook.vendors import registry


def made(*inventories: Inventory) -> dict[str, str]:
    found = [(contract.load(registry.BUILT_IN[each.vendor]), each) for each in inventories]
    made, warnings, failed = labels(found, Settings(), Config())
    assert not warnings
    assert not failed
    return made


def test_amd_labels_equal_those_of_amds_labeller(tmp_path: Path) -> None:
    """AMD's labeller writes these labels for eight identical GPUs, except family and firmware."""
    found = made(paper.machine("amd", tmp_path, 8, model="AMD Instinct MI308X (OAM)"))
    assert found == {
        "amd.com/compute-memory-partition": "spx_nps1",
        "amd.com/compute-partitioning-supported": "true",
        "amd.com/memory-partitioning-supported": "true",
        "amd.com/gpu.device-id": "74a2",
        "amd.com/gpu.driver-version": "6.12.12",
        "amd.com/gpu.product-name": "AMD_Instinct_MI308X_OAM",
        "amd.com/gpu.simd-count": "320",
        "amd.com/gpu.vram": "192G",
        "beta.amd.com/gpu.device-id": "74a2",
        "beta.amd.com/gpu.device-id.74a2": "8",
        "beta.amd.com/gpu.product-name": "AMD_Instinct_MI308X_OAM",
        "beta.amd.com/gpu.product-name.AMD_Instinct_MI308X_OAM": "8",
        "beta.amd.com/gpu.simd-count": "320",
        "beta.amd.com/gpu.simd-count.320": "8",
        "beta.amd.com/gpu.vram": "192G",
        "beta.amd.com/gpu.vram.192G": "8",
    }
    assert [*found] == sorted(found)


def test_different_amd_gpus_give_labels_with_counts(tmp_path: Path) -> None:
    found = made(paper.machine("amd", tmp_path, 2, split="0"))
    assert found["amd.com/gpu.vram.24G"] == found["beta.amd.com/gpu.vram.24G"] == "8"
    assert found["amd.com/gpu.vram.192G"] == "1"
    assert "amd.com/gpu.vram" not in found
    assert "amd.com/compute-memory-partition" not in found


def test_a_failing_driver_is_reported_and_gives_no_labels(tmp_path: Path) -> None:
    vendor = contract.load(registry.BUILT_IN["nvidia"])
    found, _, failed = labels(
        [(vendor, machines.machine(machines.gpu(0, 0)))], Settings(), Config()
    )
    assert found == {}
    assert len(failed) == 1


def test_an_invalid_label_value_is_left_out_with_a_warning(tmp_path: Path) -> None:
    machine = paper.machine("amd", tmp_path, 1, model="Ätna/1")
    vendor = contract.load(registry.BUILT_IN["amd"])
    found, warnings, _ = labels([(vendor, machine)], Settings(), Config())
    assert "amd.com/gpu.product-name" not in found
    assert any("amd.com/gpu.product-name" in each for each in warnings)
    word = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
    assert all(word.fullmatch(value) for value in found.values())


@pytest.mark.parametrize(
    ("classes", "mode"),
    [
        (("0x030200", "0x030200"), "compute"),
        (("0x030000", "0x030000"), "graphics"),
        (("0x030200", "0x030000"), "unknown"),
        (("0x030200", ""), "unknown"),
        (("0x060400",), "unknown"),
    ],
)
def test_the_mode_label_depends_on_all_gpus(
    classes: tuple[str, ...], mode: str, tmp_path: Path
) -> None:
    machine = machines.machine(*(machines.gpu(n, n) for n in range(len(classes))))
    for device, word in zip(machine.devices, classes, strict=True):
        file = tmp_path / f"sys/bus/pci/devices/{device.bus_id}/class"
        file.parent.mkdir(parents=True)
        file.write_text(f"{word}\n")
    with Rootfs(str(tmp_path)) as root:
        assert nvidia._mode(machine.devices, root) == mode


def test_vendors_without_labels_give_none(tmp_path: Path) -> None:
    assert made(paper.machine("gaudi", tmp_path)) == {}


def test_labels_are_printed_as_lines() -> None:
    assert text({"a/b": "c", "d/e": ""}) == "a/b=c\nd/e=\n"


# The API server ---------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with serving(tmp_path) as made:
        made.add("nodes", "n1", {"metadata": {"labels": {"kubernetes.io/os": "linux"}}})
        yield made


@pytest.fixture
def node(api: ApiServer, tmp_path: Path) -> ClusterNode:
    access = Access(api.url, f"{tmp_path}/ca.crt", token=f"{tmp_path}/token")
    return ClusterNode("n1", ApiClient(access))


def metadata(api: ApiServer) -> dict[str, Any]:
    found: dict[str, Any] = api.objects["nodes", "", "n1"]["metadata"]
    return found


def test_a_node_gets_the_wanted_labels(api: ApiServer, node: ClusterNode) -> None:
    assert node.keep({"amd.com/a": "1", "amd.com/b": "2"})
    assert metadata(api)["labels"] == {
        "kubernetes.io/os": "linux", "amd.com/a": "1", "amd.com/b": "2",
    }  # fmt: skip
    assert [each[:2] for each in api.asked] == [
        (method, "/api/v1/nodes/n1") for method in ("GET", "PATCH")
    ]


def test_unchanged_labels_are_not_written_again(api: ApiServer, node: ClusterNode) -> None:
    node.keep({"amd.com/a": "1"})
    api.asked.clear()
    assert not node.keep({"amd.com/a": "1"})
    assert [method for method, *_ in api.asked] == ["GET"]


def test_only_labels_written_by_gpuhook_are_removed_from_a_node(
    api: ApiServer, node: ClusterNode
) -> None:
    metadata(api)["labels"]["amd.com/theirs"] = "x"
    node.keep({"amd.com/a": "1", "amd.com/b": "2"})
    node.keep({"amd.com/b": "3", "amd.com/c": "4"})
    assert metadata(api)["labels"] == {
        "kubernetes.io/os": "linux", "amd.com/theirs": "x", "amd.com/b": "3", "amd.com/c": "4",
    }  # fmt: skip
    node.keep({})
    assert metadata(api)["labels"] == {"kubernetes.io/os": "linux", "amd.com/theirs": "x"}
    assert OURS not in metadata(api)["annotations"]


@pytest.mark.protects(
    "labels-makers",
    "a node's annotation can cause the removal only of vendor labels",
    instead="before = {key for key in noted.split(',') if key}",
)
def test_a_node_annotation_removes_only_vendor_labels(api: ApiServer, node: ClusterNode) -> None:
    """An account that may annotate but not label a node must not be able to remove other labels."""
    others = {
        f"{domain}/x": "y"
        for domain in (
            "node-restriction.kubernetes.io", "kubernetes.io", "topology.kubernetes.io",
            "xnvidia.com", "nvidia.com.example.org", "intel.com", "com",
        )
    }  # fmt: skip
    ours = {"nvidia.com/gpu.count": "8", "beta.amd.com/gpu.cu-count": "304", "amd.com/a": "1"}
    about = metadata(api)
    about["labels"] = {**others, "plain": "z", "amd.com": "no prefix", **ours}
    about["annotations"] = {OURS: ",".join(about["labels"])}
    assert node.keep({"amd.com/b": "1"})
    assert metadata(api)["labels"] == {
        **others, "plain": "z", "amd.com": "no prefix", "amd.com/b": "1",
    }  # fmt: skip


@pytest.mark.parametrize("what", [403, 500, GARBAGE])
def test_a_refusal_by_the_api_server_is_an_error(
    what: Any, api: ApiServer, node: ClusterNode
) -> None:
    api.fail(what)
    with pytest.raises(PluginError):
        node.keep({"amd.com/a": "1"})
