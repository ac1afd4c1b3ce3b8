"""packaging/kubernetes: the objects that kubectl renders, and a reason for each part."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.commands import run
from harness.manifests import (
    MANIFESTS,
    VARIANTS,
    Document,
    containers,
    daemon_set,
    daemon_sets,
    pod_of,
    render,
)

from gpuhook import __version__

WITH_RUNTIME = ("base", "overlays/environment", "overlays/mps", "overlays/remove")
WITH_UNIT = ("overlays/cdi", "overlays/mps", "overlays/nri")
# Objects for restarting the engines of one node after another.
LEASE = ["Lease", "Role", "RoleBinding", "ServiceAccount"]
LABELS = ("overlays/labels", "overlays/labels-remove")
METRICS = ("overlays/metrics", "overlays/metrics-operator")
# Objects that only claims need: an account with its rights, the policies that limit the account,
# and device classes.
POLICY = "ValidatingAdmissionPolicy"
CLAIMS = ["ServiceAccount", "ClusterRole", "ClusterRoleBinding", *(POLICY, f"{POLICY}Binding") * 2]
CLAIMS += ["DeviceClass"] * 8
# Capabilities of containers that run the node's systemctl.
ENTERS = ["SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE"]
IMAGE = f"localhost/gpuhook:{__version__}"
FILES = sorted(MANIFESTS.rglob("*.yaml"))
# Lines of a manifest that give a pod more rights than usual.
PRIVILEGE = re.compile(
    r"^\s*(privileged: true|hostPID: true|hostNetwork|hostIPC|add:|runAsUser: 0)"
)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_each_variant_renders_exactly_the_expected_kinds(variant: str) -> None:
    kinds = [document["kind"] for document in render(variant)]
    runtime = ["RuntimeClass"] if variant in WITH_RUNTIME[:3] else []
    single = ("overlays/mounts", *WITH_UNIT, *METRICS, *LABELS)
    sets = ["DaemonSet"] * (1 if variant in single else 2)
    service = ["Service", "NetworkPolicy"] if variant in METRICS else []
    monitor = ["ServiceMonitor", "PrometheusRule"] if variant == METRICS[1] else []
    expected = [*sets, "Namespace", *runtime, *service, "ServiceAccount", *monitor]
    claims = CLAIMS if variant == "overlays/dra" else []
    lease = LEASE if variant in WITH_RUNTIME else []
    assert sorted(kinds) == sorted([*expected, *claims, *lease])


def test_each_daemon_set_selects_only_its_own_pods(variant: str) -> None:
    labels = [each["spec"]["selector"]["matchLabels"] for each in daemon_sets(variant)]
    names = [each["metadata"]["name"] for each in daemon_sets(variant)]
    assert labels == [{"app.kubernetes.io/name": name} for name in names]
    for each in daemon_sets(variant):
        template = each["spec"]["template"]["metadata"]["labels"]
        assert template == each["spec"]["selector"]["matchLabels"]


def test_pods_have_minimal_privileges(variant: str) -> None:
    for document in daemon_sets(variant):
        pod = pod_of(document)
        is_installers = "installer" in containers(pod)
        assert not {"hostNetwork", "hostIPC"} & pod.keys()
        signals = is_installers and variant in (*WITH_RUNTIME, *WITH_UNIT)
        assert pod.get("hostPID", False) == (signals or variant in METRICS)
        asks = "dra" in containers(pod) or (is_installers and variant in WITH_RUNTIME)
        assert pod["automountServiceAccountToken"] is asks
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for name, container in containers(pod).items():
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            is_removed = variant in ("overlays/remove", "overlays/labels-remove")
            if name in ("device-plugin", "dra", "metrics", "labels") and not is_removed:
                assert security["privileged"] is True
                continue
            assert security["allowPrivilegeEscalation"] is False
            enters = name == "installer" and variant in (*WITH_UNIT, "overlays/remove")
            added = {"add": ENTERS} if enters else {}
            assert security["capabilities"] == {"drop": ["ALL"], **added}
            profile = {"type": "Unconfined"} if name == "installer" and signals else None
            assert security.get("appArmorProfile") == profile
            assert "privileged" not in security


def test_every_container_has_limits_and_the_released_image(variant: str) -> None:
    for pod in map(pod_of, daemon_sets(variant)):
        assert pod["priorityClassName"] == "system-node-critical"
        for container in containers(pod).values():
            assert container["image"] == IMAGE
            assert container["resources"].keys() == {"limits", "requests"}
            for amounts in container["resources"].values():
                assert amounts.keys() == {"cpu", "memory"}


def test_every_volume_is_used_and_every_mount_has_one(variant: str) -> None:
    for pod in map(pod_of, daemon_sets(variant)):
        named = [volume["name"] for volume in pod.get("volumes", [])]
        used = {
            mount["name"]
            for container in containers(pod).values()
            for mount in container.get("volumeMounts", [])
        }
        assert len(named) == len(set(named))
        assert set(named) == used


def test_service_monitor_matches_the_service_and_its_pods() -> None:
    """The operator must select the Service and its port by the names that the Service has."""
    documents = {each["kind"]: each for each in render("overlays/metrics-operator")}
    service, monitor = documents["Service"], documents["ServiceMonitor"]
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    [endpoint], [port] = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    pod = documents["DaemonSet"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [container] = pod["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports[port["targetPort"]] == port["port"]
    assert f"--listen=$(POD_IP):{port['port']}" in container["args"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(MANIFESTS)))
def test_every_privilege_and_host_folder_has_a_comment_with_its_reason(path: Path) -> None:
    """The comment is on the line or above it; for hostPath it is above the name."""
    lines = path.read_text().splitlines()
    for at, line in enumerate(lines):
        above = at - 2 if "hostPath:" in line else at - 1
        if PRIVILEGE.match(line) or "hostPath:" in line:
            assert " # " in line or lines[above].lstrip().startswith("#"), f"{path}:{at + 1}"


def test_daemon_set_fields_are_known_to_kubectl(variant: str, tmp_path: Path) -> None:
    """kubectl drops a field that the API doesn't have when it reads and writes the object."""
    for document in daemon_sets(variant):
        assert missing(document, through_kubectl(document, tmp_path / "sent.yaml")) == []


def test_an_unknown_field_is_noticed(tmp_path: Path) -> None:
    document = daemon_set("base", "installer")
    pod_of(document)["hostPid"] = True
    lost = missing(document, through_kubectl(document, tmp_path / "sent.yaml"))
    assert lost == ["spec.template.spec.hostPid"]


def through_kubectl(document: Document, path: Path) -> Document:
    """Return a DaemonSet that kubectl has read into its own types, without a server."""
    [name] = [each["name"] for each in pod_of(document)["containers"]]
    path.write_text(yaml.safe_dump(document))
    words = ["kubectl", "set", "image", "--local", f"--filename={path}", f"{name}=other:1"]
    written: Document = yaml.safe_load(run([*words, "--output=yaml"]).ok().stdout)
    return written


def missing(sent: Any, came: Any, at: str = "") -> list[str]:
    """Return the paths of values that didn't come back; the changed image doesn't count."""
    if isinstance(sent, dict) and isinstance(came, dict):
        parts = [(f"{at}.{key}".lstrip("."), sent[key], came.get(key)) for key in sent]
    elif isinstance(sent, list) and isinstance(came, list) and len(sent) == len(came):
        parts = [(f"{at}[{n}]", *pair) for n, pair in enumerate(zip(sent, came, strict=True))]
    else:
        same = sent == came or (sent == [] and came is None)
        return [] if same or at.endswith(".image") else [at]
    return [place for part in parts for place in missing(part[1], part[2], part[0])]
