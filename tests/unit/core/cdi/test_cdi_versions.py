"""The version that a CDI spec needs, and the engines that accept it."""

from typing import Any

import pytest

from gpuhook.core.cdi import versions

Case = dict[str, Any]


@pytest.mark.vectors("cdi_versions", "cdi.minimum_version")
def test_lowest_versions_match_the_shared_cases(case: Case) -> None:
    assert versions.needed(case["input"]["spec"]) == case["expected"]["cdiVersion"]


@pytest.mark.vectors("cdi_versions", "cdi.engine_accepts")
def test_accepted_spec_versions_match_each_cdi_library(case: Case) -> None:
    given = case["input"]
    assert versions.accepts(given["library"], given["cdiVersion"]) == case["expected"]["loads"]


@pytest.mark.parametrize(
    ("edits", "version"),
    [({"intelRdt": {}}, "0.7.0"), ({"intelRdt": {"schemata": []}}, "1.1.0"),
     ({"intelRdt": {"enableMonitoring": False}}, "0.7.0"), ({"intelRdt": None}, "0.3.0"),
     ({"additionalGids": []}, "0.3.0"), ({"netDevices": []}, "0.3.0"),
     ({"deviceNodes": [{"path": "/a", "hostPath": ""}]}, "0.3.0"),
     ({"deviceNodes": [{"path": "/a"}, {"path": "/b", "hostPath": "/b"}]}, "0.5.0")],
)  # fmt: skip
@pytest.mark.parametrize("where", ["document", "device"])
def test_most_empty_fields_need_no_newer_version(
    edits: dict[str, Any], version: str, where: str
) -> None:
    table = {"containerEdits": edits}
    document = {"devices": [{"name": "a", **table}]} if where == "device" else table
    assert versions.needed(document) == version


@pytest.mark.parametrize(
    ("kind", "version"),
    [("v.com/c", "0.3.0"), ("v.com/c.d", "0.6.0"), ("a.b", "0.3.0"), ("v.com/", "0.3.0")],
)
def test_a_dot_in_the_class_needs_a_newer_version(kind: str, version: str) -> None:
    assert versions.needed({"kind": kind}) == version


def test_version_needs_name_the_field_that_causes_them() -> None:
    document = {
        "devices": [{"name": "a"}, {"name": "0", "containerEdits": {"mounts": [{}, {"type": "x"}]}}]
    }
    assert list(versions.needs(document)) == [
        ("0.5.0", ("devices", 1, "name")),
        ("0.4.0", ("devices", 1, "containerEdits", "mounts", 1, "type")),
    ]


@pytest.mark.parametrize(
    ("library", "version", "loads"),
    [("0.8.1", "0.8.0", True), ("1.1", "1.1.0", True), ("1.1.0", "v0.5.0", True),
     ("1.1.0", "0.2.0", False), ("1.1.0", "1.2.0", False), ("9.9.9", "0.9.0", False),
     ("1.0.1", "", False), ("1.0.1", "vv0.5.0", False)],
)  # fmt: skip
def test_only_known_versions_are_accepted(library: str, version: str, loads: bool) -> None:
    assert versions.accepts(library, version) == loads


@pytest.mark.parametrize(
    ("engine", "version", "highest"),
    [("podman", "4.0.3", None), ("podman", "4.3.1", "0.5.0"), ("podman", "5.4.2", "0.8.0"),
     ("docker", "20.10.24", None), ("docker", "28.2.0-rc.1", "1.0.0"), ("docker", "30", "1.1.0"),
     ("containerd", "1.6.20", None), ("containerd", "1.7.24~ds1", "0.7.0"),
     ("containerd", "2.0.0", "0.8.0"), ("crio", "1.32.1", "0.8.0"), ("lxc", "9", None)],
)  # fmt: skip
def test_highest_accepted_spec_version_follows_the_engine_version(
    engine: str, version: str, highest: str | None
) -> None:
    assert versions.highest(engine, version) == highest


@pytest.mark.parametrize(
    ("engine", "version", "switched"),
    [("docker", "24.0.7", False), ("docker", "25.0.0", True), ("docker", "26.1.5+dfsg1", True),
     ("docker", "28.1.1", True), ("docker", "28.2.0-rc.1", False), ("docker", "29.2", False),
     ("docker", None, True), ("containerd", "1.6.20~ds1", False), ("containerd", "1.7.0", True),
     ("containerd", "1.7.24~ds1", True), ("containerd", "2.0.0", False),
     ("containerd", None, True), ("podman", "5.4.2", False), ("podman", None, False),
     ("crio", "1.31", False)],
)  # fmt: skip
def test_cdi_needs_enabling_in_some_docker_and_containerd_versions(
    engine: str, version: str | None, switched: bool
) -> None:
    assert versions.is_switched(engine, version) == switched


@pytest.mark.parametrize(
    ("engines", "folder"),
    [({}, "/var/run/cdi"), ({"podman": "4.3.1"}, "/var/run/cdi"), ({"podman": "5.4.0"}, "/etc/cdi"),
     ({"podman": "5.6.2"}, "/etc/cdi"), ({"podman": "5.7.0"}, "/var/run/cdi"),
     ({"podman": None, "docker": "28.5"}, "/var/run/cdi"),
     ({"docker": "26.1", "podman": "5.4.2"}, "/etc/cdi")],
)  # fmt: skip
def test_the_chosen_spec_folder_is_read_by_all_engines(
    engines: dict[str, str | None], folder: str
) -> None:
    assert versions.folder_for(engines) == folder


def test_the_tables_name_only_known_versions() -> None:
    tops = [top for lines in versions.ENGINES.values() for _, top in lines]
    named = {*versions.EDITS.values(), *tops, *versions.DEBIAN.values(), versions.EARLIEST}
    assert named <= set(versions.KNOWN)
