"""Moved roots in CDI specs: the shared cases, and cases that they leave open."""

from typing import Any

import pytest

from gpuhook.base.errors import CdiError
from gpuhook.tools.cdi import transform

Case = dict[str, Any]


def moved(case: Case, relative_to: str) -> Any:
    given = case["input"]
    found = transform.root(given["document"], given["from"], given["to"], relative_to)
    found.pop("cdiVersion")
    return found


@pytest.mark.vectors("cdi_transform", "cdi.transform_host")
def test_transformed_host_paths_match_the_vectors(case: Case) -> None:
    assert moved(case, "host") == case["expected"]["document"]


@pytest.mark.vectors("cdi_transform", "cdi.transform_container")
def test_transformed_container_paths_match_the_vectors(case: Case) -> None:
    assert moved(case, "container") == case["expected"]["document"]


@pytest.mark.vectors("cdi_transform", "cdi.transform_path_more")
def test_transformed_paths_match_the_detailed_vectors(case: Case) -> None:
    move = transform.mover(case["input"]["from"], case["input"]["to"])
    assert move(case["input"]["path"]) == case["expected"]["path"]


@pytest.mark.vectors("cdi", "cdi.transform_path")
def test_transformed_paths_match_the_short_vectors(case: Case) -> None:
    test_transformed_paths_match_the_detailed_vectors(case)


@pytest.mark.vectors("cdi", "cdi.transform_hook")
def test_transformed_hooks_match_the_vectors(case: Case) -> None:
    given = case["input"]
    hook = {key: given[key] for key in ("hookName", "path", "args")}
    document = {"containerEdits": {"hooks": [hook]}}
    found = transform.root(document, given["from"], given["to"], given["relative_to"])
    [after] = found["containerEdits"]["hooks"]
    assert {key: after[key] for key in ("path", "args")} == case["expected"]


def two_roots(document: Case, driver: tuple[str, str], dev: tuple[str, str]) -> Case:
    """Move the folder of device nodes, then the driver root, as NVIDIA's installer does."""
    old, new = (f"{root.rstrip('/')}/dev" for root in dev)
    if dev[0]:
        document = transform.root(document, old, new, "host")
    return transform.root(document, *driver, "host")


@pytest.mark.vectors("cdi_transform", "cdi.transform_driver_document")
def test_moving_two_roots_matches_the_detailed_vectors(case: Case) -> None:
    given = case["input"]
    dev = (given["dev_root"], given["dev_to"])
    found = two_roots(given["document"], (given["driver_root"], given["to"]), dev)
    found.pop("cdiVersion")
    assert found == case["expected"]["document"]


@pytest.mark.vectors("cdi", "cdi.transform_driver")
def test_moving_two_roots_matches_the_short_vectors(case: Case) -> None:
    given = case["input"]
    mount = {"hostPath": given["mount_host"], "containerPath": "/m"}
    node = {"hostPath": given["node_host"], "path": "/n"}
    document = {"containerEdits": {"mounts": [mount], "deviceNodes": [node]}}
    driver = (given["driver_root"], given["target_driver_root"])
    found = two_roots(document, driver, (given["dev_root"], given["target_dev_root"]))
    edits = found["containerEdits"]
    assert edits["mounts"][0]["hostPath"] == case["expected"]["mount_host"]
    assert edits["deviceNodes"][0]["hostPath"] == case["expected"]["node_host"]


def with_node(node: Case, version: str | None = "0.3.0") -> Case:
    device = {"name": "a", "containerEdits": {"deviceNodes": [node]}}
    head = {} if version is None else {"cdiVersion": version}
    return {**head, "kind": "a.com/b", "devices": [device]}


def test_moved_device_nodes_raise_the_cdi_version() -> None:
    given = with_node({"path": "/dev/a"})
    found = transform.root(given, "/", "/host", "host")
    assert found == with_node({"path": "/dev/a", "hostPath": "/host/dev/a"}, "0.5.0")
    assert given == with_node({"path": "/dev/a"})  # the input is unchanged


@pytest.mark.parametrize("version", ["0.5.0", "v0.6.0", "1.0.0"])
def test_a_sufficient_cdi_version_stays_unchanged(version: str) -> None:
    given = with_node({"path": "/dev/a", "hostPath": "/drv/dev/a"}, version)
    assert transform.root(given, "/drv", "/", "host")["cdiVersion"] == version


def test_a_cdi_spec_without_moved_paths_stays_unchanged() -> None:
    given = with_node({"path": "/dev/a"})
    assert transform.root(given, "/drv", "/other", "host") == given
    assert transform.root(given, "/", "/", "host") == given


def test_a_node_moved_in_the_container_keeps_its_host_path() -> None:
    found = transform.root(with_node({"path": "/drv/dev/a"}), "/drv", "/", "container")
    assert found == with_node({"path": "/dev/a", "hostPath": "/drv/dev/a"}, "0.5.0")


@pytest.mark.parametrize(("old", "new"), [("", "/a"), ("a", "/a"), ("/a", "b/c")])
def test_relative_roots_are_refused(old: str, new: str) -> None:
    with pytest.raises(CdiError, match="isn't an absolute path"):
        transform.mover(old, new)
