"""packaging/helm: the chart, and the folders of packaging/kubernetes that are rendered from it."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import render_manifests
import yaml
from harness.helm import CHART, fetch, helm, rendered
from harness.manifests import (
    MANIFESTS,
    VARIANTS,
    Document,
    containers,
    overlay,
    pod_of,
    render,
)

from gpuhook import __version__
from gpuhook.tools.engines import distributions

# A mode of the chart -> the folder that means the same.
MODES = {
    "cdi": "overlays/cdi",
    "cdi-pod": "overlays/cdi-pod",
    "dra": "overlays/dra",
    "nri": "overlays/nri",
    "mounts": "overlays/mounts",
    "runtime": "base",
    "environment": "overlays/environment",
    "remove": "overlays/remove",
}


def sorted_by_name(value: Any) -> Any:
    """Return a value with lists of what has names in the names' order, which means nothing.

    Lists of nothing are left out, as kubectl writes some.
    """
    if isinstance(value, dict):
        return {key: sorted_by_name(each) for key, each in value.items() if each != []}
    if not isinstance(value, list):
        return value
    found = [sorted_by_name(each) for each in value]
    if all(isinstance(each, dict) and "name" in each for each in found):
        return sorted(found, key=lambda each: each["name"])
    return found


def comparable(documents: list[Document]) -> dict[tuple[str, str], Document]:
    """Return them by kind and name, without the namespace, which Helm doesn't make itself."""
    found = {(each["kind"], each["metadata"]["name"]): sorted_by_name(each) for each in documents}
    found.pop(("Namespace", "gpuhook"), None)
    return found


@pytest.mark.parametrize("folder", render_manifests.FOLDERS)
def test_folders_are_rendered_from_the_chart(folder: str) -> None:
    """Byte for byte: python3 scripts/lib/render_manifests.py writes them."""
    text = (MANIFESTS / folder / render_manifests.FILE).read_text()
    assert text == render_manifests.rendered(str(fetch()), folder)


def test_kubectl_applies_what_helm_installs() -> None:
    """And nothing is in a folder that the script doesn't render, except the namespace."""
    assert {*render_manifests.FOLDERS} == {*VARIANTS}
    for mode, folder in MODES.items():
        assert comparable(rendered(f"--set=mode={mode}")) == comparable(render(folder))


def test_mps() -> None:
    gone = rendered("--set=mode=remove", "--set=mps=true")
    assert comparable(gone) == comparable(render("overlays/remove"))
    refused = helm("template", "--set=mps=true").failed()
    assert "mps needs mode runtime or environment" in refused.stderr


def test_the_default_is_what_is_recommended() -> None:
    assert rendered() == rendered("--set=mode=cdi")
    assert {*MODES} == {*helm_modes()}


def helm_modes() -> list[str]:
    refused = helm("template", "--set=mode=other").failed()
    return refused.stderr.partition("must be one of ")[2].splitlines()[0].split()


def test_metrics(tmp_path: Path) -> None:
    made = overlay(tmp_path / "overlay", "overlays/metrics-operator", "web-config")
    options = ["enabled=true", "serviceMonitor=true", "webConfigSecret=gpuhook-metrics"]
    both = comparable(rendered(*(f"--set=metrics.{each}" for each in options)))
    assert both == {**comparable(render("overlays/cdi")), **comparable(render(made))}


@pytest.mark.parametrize("mode", ["runtime", "environment", "remove"])
@pytest.mark.parametrize("distribution", [each.name.lower() for each in distributions.ALL])
def test_distributions(tmp_path: Path, mode: str, distribution: str) -> None:
    """The folders are those that gpuhook install knows."""
    both = rendered(f"--set=mode={mode}", f"--set=installer.distribution={distribution}")
    made = overlay(tmp_path / "overlay", MODES[mode], distribution)
    assert comparable(both) == comparable(render(made))
    pod = pod_of(comparable(both)["DaemonSet", "gpuhook-installer"])
    owner = distributions.named(distribution)
    folders = {each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    tasks = f"{owner.state}/io.containerd.runtime.v2.task"
    assert {os.path.dirname(owner.read), tasks} < folders
    assert not {"/etc/containerd", "/run/containerd/io.containerd.runtime.v2.task"} & folders
    mounts = {each["mountPath"] for each in containers(pod)["installer"]["volumeMounts"]}
    assert {os.path.dirname(owner.read), tasks} < mounts
    assert environment(containers(pod)["installer"])["INSTALL_NODE_DISTRIBUTION"] == distribution


def test_who_may_ask_for_metrics() -> None:
    """Nobody but Prometheus, where nothing else is said."""
    [policy] = policies("--set=metrics.enabled=true")
    assert policy["spec"]["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "gpuhook-metrics"
    }
    [rule] = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": "metrics"}]
    [peer] = rule["from"]
    assert [*peer["namespaceSelector"]["matchLabels"].values()] == ["monitoring"]
    assert policies("--set=metrics.enabled=true", "--set-json=metrics.from=[]") == []
    assert policies() == []


def policies(*options: str) -> list[Document]:
    return [each for each in rendered(*options) if each["kind"] == "NetworkPolicy"]


def test_values(tmp_path: Path) -> None:
    """A file for all nodes, options of the plugin, a registry and nodes of yours."""
    config = '# ours\n[nvidia-container-cli]\nroot = "/run/nvidia/driver"\n'
    options = "version: v1\nflags:\n  migStrategy: mixed\n"
    env = {"GDS_ENABLED": True, "FAIL_ON_INIT_ERROR": "true", "GPUHOOK_INTERVAL": 10_000_000}
    values = {
        "config": config,
        "devicePluginConfig": options,
        "driverRoot": "/run/nvidia/driver",
        "image": {"repository": "registry.example/gpuhook", "tag": "9"},
        "imagePullSecrets": [{"name": "registry"}],
        "devicePlugin": {"env": env},
        "nodeSelector": {"gpus": "yes"},
        "installer": {"engine": "crio", "restart": "systemd", "env": {"INSTALL_NODE_UNIT": "crio"}},
    }
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    documents = comparable(rendered(f"--values={path}", "--set=mode=runtime"))
    data = documents["ConfigMap", "gpuhook-config"]["data"]
    assert data == {"config.toml": config, "device-plugin.yaml": options}
    plugin = pod_of(documents["DaemonSet", "gpuhook"])
    installer = pod_of(documents["DaemonSet", "gpuhook-installer"])
    for pod in (plugin, installer):
        assert pod["nodeSelector"]["gpus"] == "yes"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        for each in containers(pod).values():
            assert each["image"] == "registry.example/gpuhook:9"
    assert "--driver-root=/run/nvidia/driver" in containers(plugin)["device-plugin"]["args"]
    variables = environment(containers(plugin)["device-plugin"])
    assert variables["GDS_ENABLED"] == "true"
    assert variables["FAIL_ON_INIT_ERROR"] == "true"
    assert variables["GPUHOOK_INTERVAL"] == "10000000"
    assert variables["CONFIG_FILE"] == "/etc/gpuhook/device-plugin.yaml"
    assert environment(containers(installer)["installer"])["INSTALL_NODE_UNIT"] == "crio"
    assert {"name": "crio", "mountPath": "/etc/crio"} in containers(installer)["installer"][
        "volumeMounts"
    ]
    # With a change of a file the pods are replaced.
    changed = copy.deepcopy(values)
    changed["config"] = config.replace("ours", "theirs")
    path.write_text(yaml.safe_dump(changed))
    after = comparable(rendered(f"--values={path}", "--set=mode=runtime"))
    for name in ("gpuhook", "gpuhook-installer"):
        before = documents["DaemonSet", name]["spec"]["template"]["metadata"]["annotations"]
        assert after["DaemonSet", name]["spec"]["template"]["metadata"]["annotations"] != before


HOSTILE = " a: {b}, 'c' \"d\" \\ {{ .Values.mode }} #e\n\t- f\r\n "


def hostile(value: Any, texts: list[str]) -> Any:
    """Return the chart's own values with a text of its own, in ``texts``, wherever one may be."""
    if isinstance(value, dict) and value:
        return {key: hostile(each, texts) for key, each in value.items()}
    if isinstance(value, bool) or (isinstance(value, list) and value):
        return value
    texts.append(f"<{len(texts)}>{HOSTILE}")
    if isinstance(value, dict):
        return {"x": texts[-1]}
    return [texts[-1]] if isinstance(value, list) else texts[-1]


def leaves(value: Any) -> list[str]:
    """Return all texts in a document."""
    if isinstance(value, dict | list):
        each = value.values() if isinstance(value, dict) else value
        return [text for one in each for text in leaves(one)]
    return [value] if isinstance(value, str) else []


def test_every_text_arrives_as_it_is(tmp_path: Path) -> None:
    texts: list[str] = []
    values = hostile(yaml.safe_load((CHART / "values.yaml").read_text()), texts)
    words = {"engine": "containerd", "restart": "none", "distribution": "k3s"}
    values["installer"].update(words)  # of a list each
    values["metrics"].update(enabled=True, serviceMonitor=True)
    path, found = tmp_path / "values.yaml", list[str]()
    for values["mode"] in ("runtime", "dra"):
        path.write_text(yaml.safe_dump(values))
        found += leaves(rendered(f"--values={path}"))
    missing = [text for text in texts if not any(text in each for each in found)]
    assert len(missing) == 4  # mode, engine, restart and distribution
    assert len(texts) > 12


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("installer.engine=docker", "installer.engine is docker and must be one of containerd"),
        (
            "installer.distribution=kind",
            "installer.distribution is kind and must be one of k0s k3s",
        ),
        (
            "installer.distribution=k3s,installer.engine=crio",
            "installer.distribution is k3s, whose engine is containerd and not crio",
        ),
        ("installer.restart=false", "installer.restart is false and must be one of signal systemd"),
        ("image.tag=9", "image.tag is 9 and must be a text"),
        ("config.a=1", "config is map[a:1] and must be a text"),
        ("devicePluginConfig.version=v1", "devicePluginConfig is map[version:v1] and must be"),
    ],
)
def test_a_wrong_value_is_refused(value: str, sentence: str) -> None:
    assert sentence in helm("template", "--set=mode=runtime", f"--set={value}").failed().stderr


def environment(container: Document) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_the_options_of_the_unit_are_the_installers() -> None:
    documents = comparable(rendered("--set=devicePlugin.env.MIG_STRATEGY=mixed"))
    installer = containers(pod_of(documents["DaemonSet", "gpuhook-installer"]))["installer"]
    assert environment(installer)["MIG_STRATEGY"] == "mixed"


def test_an_older_cluster_is_sent_no_field_that_it_refuses() -> None:
    assert unconfined("--kube-version=1.29") == (None, True)
    assert unconfined("--kube-version=1.30") == ({"type": "Unconfined"}, True)


def unconfined(*words: str) -> tuple[object, bool]:
    """Return the installer's profile of AppArmor, and whether it sees the node's processes."""
    pod = pod_of(comparable(rendered(*words))["DaemonSet", "gpuhook-installer"])
    security = containers(pod)["installer"]["securityContext"]
    return security.get("appArmorProfile"), "hostPID" in pod


@pytest.mark.parametrize(
    ("more", "expected"), [((), False), (("--set=mps=true",), True), (("--set=mode=remove",), True)]
)
def test_who_restarts_nothing_sees_no_process(more: tuple[str, ...], expected: bool) -> None:
    profile, sees = unconfined("--set=mode=runtime", "--set=installer.restart=none", *more)
    assert (profile is not None, sees) == (expected, expected)


def test_it_is_sound() -> None:
    helm("lint", "--strict").ok()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
