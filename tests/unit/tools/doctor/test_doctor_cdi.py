"""Findings of the doctor on CDI specs and on the engines that read them, on fake machines.

tests/integration/test_doctor_cdi.py tests faulty CDI specs of a (simulated) driver.
"""

import json
import os
from pathlib import Path
from typing import Any

import machines
import pytest
from fabricated import Tree, said

from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.inventory import cache
from gpuhook.tools.cdi import managed_specs
from gpuhook.tools.doctor import Finding, cdi, cdi_engines
from gpuhook.vendors.nvidia.vendor import VENDOR


def document(*, version: str = "0.5.0", kind: str = "maker.example/card", **edits: Any) -> str:
    edits = edits or {"mounts": [{"hostPath": "/opt/x", "containerPath": "/opt/x"}]}
    device = {"name": "a", "containerEdits": edits}
    return json.dumps({"cdiVersion": version, "kind": kind, "devices": [device]})


def readers(tree: Tree) -> dict[str, Finding]:
    return {finding.check: finding for finding in cdi_engines.readers(tree.case)}


def engine(tree: Tree, name: str, says: str, folder: str = "/usr/bin") -> None:
    tree.program(f"{folder}/{name}", f"#!/bin/sh\necho '{says}'\n")


def podman(tree: Tree, version: str) -> None:
    engine(tree, "podman", f"podman version {version}")


def dockerd(tree: Tree, version: str) -> None:
    engine(tree, "dockerd", f"Docker version {version}, build abcdef")


def test_doctor_reports_nothing_without_cdi_specs(tree: Tree) -> None:
    tree.write("/etc/cdi/README", "not a document")
    podman(tree, "5.4.2")
    checks = (cdi.files, cdi.paths, cdi.numbers, cdi.names, cdi.conflicts, cdi.refresh_errors)
    for check in (*checks, cdi_engines.readers):
        assert said(check(tree.case)) == {}


@pytest.mark.parametrize("edits", [
    {"mounts": [{"hostPath": "/opt/x", "containerPath": "/x"}]},
    {"deviceNodes": [{"path": "/opt/x"}]},
    {"deviceNodes": [{"path": "/dev/y", "hostPath": "/opt/x"}]},
    {"hooks": [{"hookName": "createContainer", "path": "/opt/x"}]},
])  # fmt: skip
def test_missing_paths_in_a_cdi_spec_give_a_warning(tree: Tree, edits: dict[str, Any]) -> None:
    tree.write("/etc/cdi/x.yaml", document(**edits))
    status, words = said(cdi.paths(tree.case))["cdi-paths"]
    assert status == "warning"
    assert words.startswith("/etc/cdi/x.yaml is stale: ")
    assert "/opt/x doesn't exist" in words
    tree.program("/opt/x")
    assert said(cdi.paths(tree.case))["cdi-paths"] == (
        "ok", "All files exist that are named in /etc/cdi/x.yaml (1 CDI device)"
    )  # fmt: skip


def test_the_remedy_for_a_managed_cdi_spec_is_refresh(tree: Tree) -> None:
    """gpuhook cdi refresh writes only managed CDI specs again; others need gpuhook cdi generate."""
    for folder in ("/etc/cdi", "/var/run/cdi"):
        tree.write(f"{folder}/x.yaml", document())
    state = str(tree.root / "var/lib/gpuhook")
    managed_specs.save(
        state, managed_specs.ManagedSpecs("/var/run/cdi", None, "yaml", ("podman",), "/bin/true")
    )
    [first, second] = cdi.paths(tree.case)
    assert first.remedy.startswith("Generate it again: gpuhook cdi generate")
    assert second.remedy == "Run gpuhook cdi refresh"


def test_a_removed_gpuhook_cdi_hook_gives_a_warning(tree: Tree) -> None:
    path = "/opt/old/bin/gpuhook-cdi-hook"
    tree.write("/etc/cdi/x.yaml", document(hooks=[{"hookName": "createContainer", "path": path}]))
    [found] = cdi.paths(tree.case)
    assert f"the hook {path} doesn't exist" in found.message
    assert found.remedy.startswith("If gpuhook was moved or removed")
    tree.write(path)
    assert said(cdi.paths(tree.case))["cdi-paths"][0] == "warning", "it can't be executed"


def test_an_nvidia_cdi_hook_linked_to_gpuhook_gives_a_warning(tree: Tree) -> None:
    path = "/usr/bin/nvidia-cdi-hook"
    tree.write("/etc/cdi/x.yaml", document(hooks=[{"hookName": "createContainer", "path": path}]))
    program = tree.program(path)
    assert "cdi-foreign-hook" not in said(cdi.paths(tree.case)), "it is its own"
    program.unlink()
    tree.link(path, str(tree.program("/opt/gpuhook/bin/gpuhook-cdi-hook")))
    status, words = said(cdi.paths(tree.case))["cdi-foreign-hook"]
    assert status == "warning"
    assert path in words


def test_device_numbers_differing_from_the_host_give_a_warning(tree: Tree) -> None:
    """The test uses the null device, because its numbers are the same on every host."""
    null = {"path": "/dev/card", "hostPath": "/dev/null", "type": "c", "major": 1, "minor": 3}
    tree.link("/dev/null", "/dev/null")
    tree.write("/etc/cdi/x.yaml", document(deviceNodes=[null]))
    assert said(cdi.numbers(tree.case)) == {}
    tree.write("/etc/cdi/x.yaml", document(deviceNodes=[{**null, "minor": 7}]))
    assert said(cdi.numbers(tree.case))["cdi-numbers"] == (
        "warning", "/etc/cdi/x.yaml is stale: in it /dev/null is 1:7, and is 1:3 on this host"
    )  # fmt: skip
    tree.write("/etc/cdi/x.yaml", document(deviceNodes=[{"path": "/dev/null"}]))
    assert said(cdi.numbers(tree.case)) == {}


def test_broken_cdi_specs_are_named_with_their_line(tree: Tree) -> None:
    tree.write("/etc/cdi/x.yaml", "cdiVersion: 0.5.0\nkind: [\n")
    [found] = cdi.files(tree.case)
    assert (found.check, found.status) == ("cdi-broken", "warning")
    assert "/etc/cdi/x.yaml, line " in found.message
    assert "gpuhook cdi validate /etc/cdi/x.yaml" in found.remedy


@pytest.mark.parametrize("name", ["x.yml", "x.YAML", "x.Json"])
def test_cdi_file_names_that_no_engine_reads_give_a_warning(tree: Tree, name: str) -> None:
    tree.write(f"/etc/cdi/{name}", document())
    [found] = cdi.files(tree.case)
    assert (found.check, found.status) == ("cdi-ignored", "warning")
    assert found.remedy == f"Run mv /etc/cdi/{name} /etc/cdi/x.yaml"


def test_a_cdi_spec_readable_only_by_root_is_reported(tree: Tree) -> None:
    tree.write("/etc/cdi/x.yaml", document(), 0o600)
    assert said(cdi.files(tree.case))["cdi-mode"][0] == "note", "no user runs an engine"
    podman(tree, "4.3.1")
    [found] = cdi.files(tree.case)
    assert (found.check, found.status) == ("cdi-mode", "warning")
    assert found.remedy == "Run chmod 644 /etc/cdi/x.yaml"


def test_a_device_name_in_two_cdi_specs_of_one_folder_gives_a_warning(tree: Tree) -> None:
    tree.write("/etc/cdi/x.yaml", document())
    tree.write("/etc/cdi/y.yaml", document())
    status, words = said(cdi.conflicts(tree.case))["cdi-conflict"]
    assert status == "warning"
    assert words.startswith("maker.example/card=a can't be used: ")
    assert "/etc/cdi/x.yaml and /etc/cdi/y.yaml" in words


def test_a_cdi_spec_overridden_by_a_later_folder_gives_a_warning(tree: Tree) -> None:
    tree.write("/etc/cdi/x.yaml", document())
    tree.write("/var/run/cdi/x.yaml", document())
    assert said(cdi.conflicts(tree.case)) == {}, "both say the same"
    tree.write("/var/run/cdi/x.yaml", document(env=["A=b"]))
    status, words = said(cdi.conflicts(tree.case))["cdi-hidden"]
    assert status == "warning"
    assert "of /etc/cdi/x.yaml isn't used: /var/run/cdi/x.yaml has it" in words


@pytest.mark.parametrize(("version", "seen"), [
    ("5.3.2", True), ("5.4.2", False), ("5.6.0", False), ("5.7.0", True), ("4.3.1", True),
])  # fmt: skip
def test_a_cdi_folder_that_podman_ignores_gives_a_warning(
    tree: Tree, version: str, seen: bool
) -> None:
    podman(tree, version)
    tree.write("/var/run/cdi/x.yaml", document())
    found = readers(tree)
    assert ("cdi-folder" in found) != seen
    if not seen:
        assert found["cdi-folder"].status == "warning"
        assert "/var/run/cdi/x.yaml" in found["cdi-folder"].message
        assert found["cdi-folder"].remedy == "Run gpuhook cdi generate --output /etc/cdi"
        tree.write("/etc/cdi/x.yaml", document())
        assert "cdi-folder" not in readers(tree), "it has the same names"


def test_podmans_cdi_spec_dirs_setting_is_respected(tree: Tree) -> None:
    podman(tree, "5.4.2")
    tree.write("/var/run/cdi/x.yaml", document())
    text = '[engine]\ncdi_spec_dirs = ["/run/cdi"]\n'
    tree.write("/etc/containers/containers.conf", text)
    assert "cdi-folder" not in readers(tree)


@pytest.mark.parametrize(("version", "cdi_version", "taken"), [
    ("4.3.1", "0.5.0", True), ("4.3.1", "0.6.0", False), ("5.4.2", "0.8.0", True),
    ("5.4.2", "1.0.0", False), ("5.6.0", "1.0.0", True), ("3.4.4", "1.0.0", True),
])  # fmt: skip
def test_a_cdi_version_too_new_for_podman_gives_a_warning(
    tree: Tree, version: str, cdi_version: str, taken: bool
) -> None:
    podman(tree, version)
    tree.write("/etc/cdi/x.yaml", document(version=cdi_version))
    found = readers(tree)
    assert ("cdi-version" in found) != taken
    if not taken:
        assert found["cdi-version"].status == "warning"
        assert found["cdi-version"].message.endswith(f"/etc/cdi/x.yaml has {cdi_version}")
        assert (
            found["cdi-version"].remedy
            == "Set cdiVersion to 0.3.0, which is enough for its content"
        )


def test_remedy_for_a_needed_cdi_version_is_a_podman_update(tree: Tree) -> None:
    podman(tree, "4.3.1")
    tree.write("/etc/cdi/x.yaml", document(version="0.7.0", additionalGids=[44]))
    remedy = readers(tree)["cdi-version"].remedy
    assert remedy.startswith("Update podman; or set no-additional-gids-for-device-nodes")


def test_cdi_version_limit_of_debians_podman_is_known(tree: Tree) -> None:
    podman(tree, "5.6.0")
    tree.write("/etc/cdi/x.yaml", document(version="1.0.0"))
    assert "cdi-version" not in readers(tree)
    tree.write("/etc/os-release", "ID=debian\nVERSION_CODENAME=trixie\n")
    assert "cdi-version" not in readers(tree), "it is not Debian's"
    tree.write("/var/lib/dpkg/info/podman.list")
    assert "up to version 0.8.0" in readers(tree)["cdi-version"].message
    tree.write("/etc/debian_version", "forky/sid\n")
    assert "cdi-version" not in readers(tree)


@pytest.mark.parametrize(("version", "settings", "is_on"), [
    ("26.1.5", {}, False), ("26.1.5", {"features": {"cdi": True}}, True),
    ("28.5.2", {}, True), ("28.5.2", {"features": {"cdi": False}}, False),
    ("28.5.2", {"cdi-spec-dirs": []}, False), ("20.10.24", {}, True),
])  # fmt: skip
def test_docker_with_cdi_disabled_is_reported(
    tree: Tree, version: str, settings: dict[str, Any], is_on: bool
) -> None:
    dockerd(tree, version)
    tree.write("/etc/docker/daemon.json", json.dumps(settings))
    assert readers(tree) == {}, "nobody has documents"
    tree.write("/etc/cdi/x.yaml", document())
    found = readers(tree)
    assert ("cdi-engine" in found) != is_on
    if not is_on:
        assert found["cdi-engine"].status == "note", "nobody may want it"
        assert "gpuhook install --cdi --engine docker" in found["cdi-engine"].remedy
        state = str(tree.root / "var/lib/gpuhook")
        managed_specs.save(
            state, managed_specs.ManagedSpecs("/etc/cdi", None, "yaml", ("docker",), "/bin/true")
        )
        assert readers(tree)["cdi-engine"].status == "warning", "it was asked for"


def test_cdi_settings_are_asked_of_the_running_docker(tree: Tree) -> None:
    tree.process(9, "dockerd")
    tree.write("/etc/cdi/x.yaml", document(version="1.0.0"))
    answer: dict[str, Any] = {"ServerVersion": "26.1.5", "CDISpecDirs": []}
    with tree.docker_answers("/var/run/docker.sock", answer):
        assert set(readers(tree)) == {"cdi-engine"}
    (tree.root / "var/run/docker.sock").unlink()
    answer["CDISpecDirs"] = ["/var/run/cdi"]
    with tree.docker_answers("/var/run/docker.sock", answer):
        assert set(readers(tree)) == {"cdi-folder", "cdi-version"}


@pytest.mark.parametrize(("version", "text", "is_on"), [
    ("1.7.24~ds1", "", False),
    ("1.7.24~ds1", '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n', True),
    ("2.1.4", "", True),
    ("2.1.4", '[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = false\n', False),
])  # fmt: skip
def test_containerd_with_cdi_disabled_gives_a_note(
    tree: Tree, version: str, text: str, is_on: bool
) -> None:
    engine(tree, "containerd", f"containerd github.com/containerd/containerd/v2 {version} x")
    tree.write("/etc/containerd/config.toml", text)
    tree.write("/etc/cdi/x.yaml", document())
    found = readers(tree)
    assert ("cdi-engine" in found) != is_on
    if not is_on:
        assert found["cdi-engine"].status == "note"


def test_an_unused_cdi_spec_is_a_note_not_a_warning(tree: Tree) -> None:
    engine(tree, "containerd", "containerd github.com/containerd/containerd 2.1.4 x")
    tree.write("/etc/cdi/x.yaml", document(version="1.1.0"))
    assert readers(tree)["cdi-version"].status == "note"
    tree.write("/var/lib/kubelet/config.yaml")
    assert readers(tree)["cdi-version"].status == "warning"


def test_the_last_refresh_error_gives_a_warning(tree: Tree) -> None:
    state = tree.root / "var/lib/gpuhook"
    assert said(cdi.refresh_errors(tree.case)) == {}
    managed_specs.save_errors(
        str(state), [managed_specs.RefreshFailure(1.0, "nvidia.com/gpu", "It broke", "Mend it")]
    )
    [found] = cdi.refresh_errors(tree.case)
    assert (found.check, found.status) == ("cdi-refresh", "warning")
    assert found.message == "The last refresh of the CDI spec of nvidia.com/gpu failed: It broke"
    assert found.remedy == "Mend it; then run gpuhook cdi refresh"
    (state / "cdi-error.json").write_text("[")
    [found] = cdi.refresh_errors(tree.case)
    assert "is damaged" in found.message


def test_fifos_and_link_loops_as_cdi_specs_are_reported_as_broken(tree: Tree) -> None:
    """A FIFO must not make the doctor wait, and a link loop must not stop it."""
    folder: Path = tree.write("/etc/cdi/README").parent
    os.mkfifo(folder / "pipe.yaml")
    (folder / "loop.json").symlink_to("loop.json")
    found = [finding for check in (cdi.files, cdi.paths) for finding in check(tree.case)]
    assert [each.check for each in found] == ["cdi-broken", "cdi-broken"]


def test_a_cdi_spec_with_a_device_now_shared_by_mps_is_stale(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old CDI spec would allocate the device without the limits of MPS.

    A new CDI spec therefore leaves the device out.
    """
    inventory = machines.machine(machines.gpu(0, 0), machines.gpu(1, 1))
    source = SpecSource(VENDOR, inventory, tree.case.config, "/opt/gpuhook-cdi-hook")
    whole = json.dumps(generate(source).document)
    tree.write("/etc/cdi/nvidia.json", whole)
    monkeypatch.setattr(cache, "get_inventory", lambda *_, **__: inventory)
    assert {each.check: each.status.value for each in cdi.names(tree.case)} == {"cdi-names": "ok"}
    tree.case.config.mps_devices = "1"
    [one] = cdi.names(tree.case)
    assert (one.check, one.status.value) == ("cdi-kept-devices", "warning")
    assert one.message.startswith("/etc/cdi/nvidia.json is stale: GPU 1 is shared by MPS")
    tree.write("/etc/cdi/nvidia.json", json.dumps(generate(source).document))
    assert {each.check: each.status.value for each in cdi.names(tree.case)} == {"cdi-names": "ok"}


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("names", [(), ("memlock",), ("memlock", "stack"), ("shm_size",)])
def test_resource_limits_that_cdi_specs_cannot_raise_are_reported(
    tree: Tree, names: tuple[str, ...], is_there: bool
) -> None:
    if is_there:
        hook = {"hookName": "createContainer", "path": "/usr/bin/gpuhook-cdi-hook"}
        tree.write("/etc/cdi/x.yaml", document(hooks=[hook]))
    for name in names:
        setattr(tree.case.config, name, "1GiB")
    found = said(cdi.resource_limits(tree.case))
    told = [name for name in names if name != "shm_size"]
    assert [*found] == (["cdi-limits"] if is_there and told else [])
    for _, words in found.values():
        assert " and ".join(told) in words
