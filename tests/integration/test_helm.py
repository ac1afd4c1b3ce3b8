"""packaging/helm: the chart, and the folders of packaging/kubernetes that are rendered from it."""

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import machines
import paper
import plugin_settings
import pytest
import render_manifests
import yaml
from harness.commands import run
from harness.helm import CHART, fetch, helm, hooks, rendered
from harness.manifests import (
    MANIFESTS,
    VARIANTS,
    Document,
    containers,
    daemon_sets,
    overlay,
    pod_of,
    render,
)

from gpuhook import __version__
from gpuhook.base.config.model import Config
from gpuhook.cluster.device_plugin.resources import resources
from gpuhook.cluster.vendors import cluster
from gpuhook.core import contract
from gpuhook.tools.engines import distributions
from gpuhook.vendors import registry

# A mode of the chart -> the folder of manifests with the same meaning.
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
    """Return a value in which each list of named objects is sorted by name.

    The order of these lists means nothing. Empty lists are left out, because kubectl writes
    some.
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
    """Return objects by kind and name, without the namespace, which Helm doesn't create itself."""
    found = {(each["kind"], each["metadata"]["name"]): sorted_by_name(each) for each in documents}
    found.pop(("Namespace", "gpuhook"), None)
    return found


@pytest.mark.parametrize("folder", render_manifests.FOLDERS)
def test_folders_are_rendered_from_the_chart(folder: str) -> None:
    """python3 scripts/lib/render_manifests.py writes the folders, so every byte must match."""
    text = (MANIFESTS / folder / render_manifests.FILE).read_text()
    assert text == render_manifests.rendered(str(fetch()), folder)


def test_kubectl_and_helm_apply_the_same_objects() -> None:
    """Each folder contains only objects that the script renders, and the namespace."""
    assert {*render_manifests.FOLDERS} == {*VARIANTS}
    for mode, folder in MODES.items():
        assert comparable(rendered(f"--set=mode={mode}")) == comparable(render(folder))


def test_mps_is_removed_with_the_rest_and_refused_in_other_modes() -> None:
    gone = rendered("--set=mode=remove", "--set=mps=true")
    assert comparable(gone) == comparable(render("overlays/remove"))
    refused = helm("template", "--set=mps=true").failed()
    assert "mps needs mode runtime or environment" in refused.stderr


def test_the_default_mode_is_cdi() -> None:
    assert rendered() == rendered("--set=mode=cdi")
    assert {*MODES} == {*helm_modes()}


@pytest.mark.parametrize("mode", MODES)
def test_pods_have_a_token_where_their_account_has_rights(mode: str) -> None:
    """The job of helm uninstall needs a token, too, because it asks the API server."""
    options = (f"--set=mode={mode}", "--set=labels.enabled=true", "--set=metrics.enabled=true")
    documents = [*rendered(*options), *hooks(*options)]
    bindings = [each for each in documents if each["kind"].endswith("RoleBinding")]
    asking = {subject["name"] for each in bindings for subject in each["subjects"]}
    pods = {
        each["metadata"]["name"]: each["spec"] if each["kind"] == "Pod" else pod_of(each)
        for each in documents
        if each["kind"] in ("DaemonSet", "Job", "Pod")
    }
    tokens = {name for name, pod in pods.items() if pod["automountServiceAccountToken"]}
    named = {name for name, pod in pods.items() if pod.get("serviceAccountName") in asking}
    assert tokens == named
    assert ("gpuhook-uninstall" in tokens) == (mode != "remove")


def helm_modes() -> list[str]:
    refused = helm("template", "--set=mode=other").failed()
    return re.findall(r"'([a-z-]+)'", refused.stderr.partition("must be one of ")[2])


def test_metrics_options_give_the_objects_of_the_overlay(tmp_path: Path) -> None:
    made = overlay(tmp_path / "overlay", "overlays/metrics-operator", "web-config")
    options = ["enabled=true", "serviceMonitor=true", "webConfigSecret=gpuhook-metrics"]
    both = comparable(rendered(*(f"--set=metrics.{each}" for each in options)))
    assert both == {**comparable(render("overlays/cdi")), **comparable(render(made))}


@pytest.mark.parametrize("mode", ["runtime", "environment", "remove"])
@pytest.mark.parametrize("distribution", [each.name.lower() for each in distributions.ALL])
def test_distributions_set_the_folders_of_their_containerd(
    tmp_path: Path, mode: str, distribution: str
) -> None:
    """The chart uses the folders that gpuhook install knows."""
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


def test_network_policy_admits_only_prometheus_by_default() -> None:
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


def test_values_give_the_objects_of_the_overlay(tmp_path: Path) -> None:
    """The values are a file for all nodes, plugin options, a registry and a selector of nodes."""
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
    # A change of the file replaces the pods.
    changed = copy.deepcopy(values)
    changed["config"] = config.replace("ours", "theirs")
    path.write_text(yaml.safe_dump(changed))
    after = comparable(rendered(f"--values={path}", "--set=mode=runtime"))
    for name in ("gpuhook", "gpuhook-installer"):
        before = documents["DaemonSet", name]["spec"]["template"]["metadata"]["annotations"]
        assert after["DaemonSet", name]["spec"]["template"]["metadata"]["annotations"] != before


HOSTILE = " a: {b}, 'c' \"d\" \\ {{ .Values.mode }} #e\n\t- f\r\n "


def hostile(value: Any, texts: list[str]) -> Any:
    """Return the chart's values with a hostile text wherever one may be; add each to ``texts``."""
    if isinstance(value, dict) and value:
        return {key: hostile(each, texts) for key, each in value.items()}
    if isinstance(value, bool | int) or (isinstance(value, list) and value):
        return value
    texts.append(f"<{len(texts)}>{HOSTILE}")
    if isinstance(value, dict):
        return {"x": texts[-1]}
    return [texts[-1]] if isinstance(value, list) else texts[-1]


def leaves(value: Any) -> list[str]:
    """Return all texts in an object."""
    if isinstance(value, dict | list):
        each = value.values() if isinstance(value, dict) else value
        return [text for one in each for text in leaves(one)]
    return [value] if isinstance(value, str) else []


def test_every_value_is_rendered_unchanged(tmp_path: Path) -> None:
    texts: list[str] = []
    values = hostile(yaml.safe_load((CHART / "values.yaml").read_text()), texts)
    repository = values["image"]["repository"]  # a colon in it would start a tag
    texts[texts.index(repository)] = values["image"]["repository"] = repository.replace(":", ";")
    words = {"engine": "containerd", "restart": "none", "distribution": "k3s"}
    values["installer"].update(words)  # the chart accepts only listed values here
    values["metrics"].update(enabled=True, serviceMonitor=True)
    path, found = tmp_path / "values.yaml", list[str]()
    for values["mode"] in ("runtime", "dra"):
        path.write_text(yaml.safe_dump(values))
        found += leaves(rendered(f"--values={path}"))
    missing = [text for text in texts if not any(text in each for each in found)]
    assert len(missing) == 6  # mode, engine, restart, distribution, and two for helm test
    assert len(texts) > 12


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("installer.engine=docker", "at '/installer/engine': value must be one of 'containerd'"),
        ("installer.distribution=kind", "at '/installer/distribution': value must be one of"),
        (
            "installer.distribution=k3s,installer.engine=crio",
            "installer.distribution is k3s, whose engine is containerd and not crio",
        ),
        ("installer.restart=false", "at '/installer/restart': value must be one of 'signal'"),
        ("image.tag=9", "at '/image/tag': got number, want string"),
        ("config.a=1", "at '/config': got object, want string"),
        ("devicePluginConfig.version=v1", "at '/devicePluginConfig': got object, want string"),
        ("metrics.enable=true", "additional properties 'enable' not allowed"),
        ("image.repository=a:5/b:1", "image.repository is a:5/b:1: put the tag into image.tag"),
        ("image.repository=a/b@sha256:0", "put the tag into image.tag, and name no digest"),
        ("image.local=false", "set image.repository to the image in your registry"),
    ],
)
def test_a_wrong_value_is_refused(value: str, sentence: str) -> None:
    assert sentence in helm("template", "--set=mode=runtime", f"--set={value}").failed().stderr


def environment(container: Document) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def test_plugin_options_reach_the_installer() -> None:
    documents = comparable(rendered("--set=devicePlugin.env.MIG_STRATEGY=mixed"))
    installer = containers(pod_of(documents["DaemonSet", "gpuhook-installer"]))["installer"]
    assert environment(installer)["MIG_STRATEGY"] == "mixed"


def test_an_older_cluster_is_sent_no_field_that_it_refuses() -> None:
    assert unconfined("--kube-version=1.29") == (None, True)
    assert unconfined("--kube-version=1.30") == ({"type": "Unconfined"}, True)


def unconfined(*words: str) -> tuple[object, bool]:
    """Return the installer's AppArmor profile, and whether the pod sees the node's processes."""
    pod = pod_of(comparable(rendered(*words))["DaemonSet", "gpuhook-installer"])
    security = containers(pod)["installer"]["securityContext"]
    return security.get("appArmorProfile"), "hostPID" in pod


@pytest.mark.parametrize(
    ("more", "expected"), [((), False), (("--set=mps=true",), True), (("--set=mode=remove",), True)]
)
def test_installer_without_restarts_sees_no_host_processes(
    more: tuple[str, ...], expected: bool
) -> None:
    profile, sees = unconfined("--set=mode=runtime", "--set=installer.restart=none", *more)
    assert (profile is not None, sees) == (expected, expected)


def test_chart_passes_lint_and_its_values_are_described() -> None:
    helm("lint", "--strict").ok()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert undescribed(values, schema) == []
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def undescribed(values: Any, schema: Any, at: str = "") -> list[str]:
    """Return the values of the chart that its schema doesn't name."""
    if not isinstance(values, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    found = [f"{at}/{key}" for key in values if key not in known]
    return found + [
        each
        for key in values
        if key in known
        for each in undescribed(values[key], known[key], f"{at}/{key}")
    ]


# Where pods are -----------------------------------------------------------------------------------


def test_pods_are_scheduled_only_to_nodes_with_accelerators_by_label(tmp_path: Path) -> None:
    """Labels select the nodes, and no taint of a vendor's resource excludes a pod."""
    for document in rendered():
        if document["kind"] != "DaemonSet":
            continue
        pod = pod_of(document)
        terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        labels = [each["matchExpressions"][0]["key"] for each in terms["nodeSelectorTerms"]]
        every = [cluster.of(names).node_labels() for names in registry.BUILT_IN.values()]
        assert {*labels} == {"gpuhook.io/node"}.union(*every)
        assert all(each.keys() == {"key", "operator"} for each in pod["tolerations"])
    assert [each for each in rendered("--set-json=nodeLabels=[]") if "affinity" in str(each)] == []


def test_taints_of_all_vendors_resources_are_tolerated(tmp_path: Path) -> None:
    found = [
        (contract.load(registry.BUILT_IN[name]), paper.machine(name, tmp_path / name))
        for name in registry.BUILT_IN
        if name != "nvidia"
    ]
    found.append((contract.load(registry.BUILT_IN["nvidia"]), machines.machine(machines.gpu(0, 0))))
    state, _ = resources(found, plugin_settings.settings_of(), Config(), {}, {})
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {each.name for each in state.resources} <= {
        each["key"] for each in values["tolerations"]
    }


# Hooks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_uninstall_job_removes_gpuhook_from_nodes(mode: str) -> None:
    """The job's objects are those of overlays/remove, and its account has the rights it needs."""
    made = {each["kind"]: each for each in hooks(f"--set=mode={mode}")}
    if mode in ("mounts", "remove"):
        assert "Job" not in made
        return
    document = json.loads(made["ConfigMap"]["data"]["gpuhook-installer.json"])
    has_runtime = mode in ("runtime", "environment")
    removed = comparable([document])
    expected = comparable(rendered("--set=mode=remove", *without_restart(has_runtime)))
    key = ("DaemonSet", "gpuhook-installer")
    assert removed[key] == expected[key]
    pod = made["Job"]["spec"]["template"]["spec"]
    names = {each["metadata"]["name"] for each in rendered(f"--set=mode={mode}")}
    assert pod_of(document)["serviceAccountName"] in names  # names of the release that is removed
    assert pod["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert ("ClusterRole" in made) == has_runtime
    rights = {
        (name, verb)
        for rule in made["Role"]["rules"]
        for name in rule["resourceNames"]
        for verb in rule["verbs"]
    }
    assert rights == {
        ("gpuhook-installer", "get"), ("gpuhook-installer", "update"),
        ("gpuhook-labels", "get"), ("gpuhook-labels", "update"),
        ("gpuhook", "delete"), ("gpuhook-dra", "delete"),
    }  # fmt: skip
    left = hooks(f"--set=mode={mode}", "--set=uninstall.removeFromNodes=false")
    assert "Job" not in {each["kind"] for each in left}


def test_labels_are_removed_by_the_uninstall_job() -> None:
    for mode in ("mounts", "cdi"):
        words = (f"--set=mode={mode}", "--set=labels.enabled=true")
        [config] = [each for each in hooks(*words) if each["kind"] == "ConfigMap"]
        document = json.loads(config["data"]["gpuhook-labels.json"])
        [expected] = daemon_sets("overlays/labels-remove")
        assert sorted_by_name(document) == sorted_by_name(expected)
        assert ("gpuhook-installer.json" in config["data"]) == (mode == "cdi")


def test_alert_rules_are_those_of_the_package() -> None:
    assert render_manifests.COPY.read_bytes() == render_manifests.RULES.read_bytes()
    [rule] = [each for each in render("overlays/metrics-operator") if "Rule" in each["kind"]]
    assert rule["spec"] == yaml.safe_load(render_manifests.RULES.read_text())
    without = ("--set=metrics.enabled=true", "--set=metrics.serviceMonitor=true")
    found = rendered(*without, "--set=metrics.prometheusRule=false")
    assert "PrometheusRule" not in {each["kind"] for each in found}


def test_ready_only_while_the_plugin_serves() -> None:
    """If the plugin is a unit, the installer's pod reports the unit's state."""
    for variant in VARIANTS:
        for document in daemon_sets(variant):
            waits = containers(pod_of(document)).get("done")
            if waits is None:
                continue
            is_unit = "INSTALL_NODE_PLUGIN" in environment(
                containers(pod_of(document))["installer"]
            )
            assert ("readinessProbe" in waits) == is_unit
            if is_unit:
                [mount] = waits["volumeMounts"]
                assert (mount["mountPath"], mount["readOnly"]) == (Config().state_dir, True)


def without_restart(has_runtime: bool) -> tuple[str, ...]:
    """Return the option that prevents restarts of an engine that doesn't know gpu-py."""
    return () if has_runtime else ("--set=installer.restart=none",)


@pytest.mark.parametrize("mode", MODES)
def test_the_pod_of_helm_test_requests_a_gpu_of_its_mode(mode: str) -> None:
    found = [each for each in hooks(f"--set=mode={mode}") if each["kind"] == "Pod"]
    if mode == "remove":
        assert found == []
        return
    [pod] = found
    [container] = pod["spec"]["containers"]
    assert container["command"] + container["args"] == ["/usr/bin/gpuhook", "list"]
    classes = {each["metadata"]["name"] for each in render(MODES[mode]) if "Class" in each["kind"]}
    assert pod["spec"].get("runtimeClassName") in {None, *classes}
    assert ("runtimeClassName" in pod["spec"]) == ("gpu-py" in classes)
    if mode == "dra":
        [template] = [
            each for each in hooks("--set=mode=dra") if each["kind"] == "ResourceClaimTemplate"
        ]
        [request] = template["spec"]["spec"]["devices"]["requests"]
        assert request["exactly"]["deviceClassName"] in classes
    else:
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}


@pytest.mark.parametrize("mode", MODES)
def test_the_install_notes_name_the_next_commands(mode: str) -> None:
    words = ("--set=image.local=true", f"--set=mode={mode}", "--namespace=gpuhook")
    done = run([fetch(), "install", "gpuhook", CHART, "--dry-run=client", *words]).ok()
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "helm uninstall gpuhook --namespace gpuhook" in notes or mode == "mounts"
    assert ("kubectl label node NODE gpuhook.io/node=true" in notes) == (mode != "remove")


# The lease ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_engines_are_restarted_under_a_lease(mode: str) -> None:
    """An installer that restarts no engine has no account with rights."""
    documents = rendered(f"--set=mode={mode}")
    restarts = mode in ("runtime", "environment", "remove")
    leases = [each["metadata"]["name"] for each in documents if each["kind"] == "Lease"]
    assert leases == ["gpuhook-engine-restart"] * restarts
    if not restarts:
        assert not [
            each
            for each in documents
            if each["metadata"]["name"] == "gpuhook-installer" and each["kind"] != "DaemonSet"
        ]
        return
    found = comparable(documents)
    [rule] = found["Role", "gpuhook-installer"]["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == (leases, ["get", "update"])
    pod = pod_of(found["DaemonSet", "gpuhook-installer"])
    assert pod["serviceAccountName"] == "gpuhook-installer"
    assert pod["automountServiceAccountToken"] is True
    variables = {each["name"]: each for each in containers(pod)["installer"]["env"]}
    assert variables["INSTALL_NODE_LEASE"]["value"] == f"gpuhook/{leases[0]}"
    field = variables["INSTALL_NODE_HOLDER"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "spec.nodeName"
    without = rendered(f"--set=mode={mode}", "--set=installer.restart=none")
    assert "Lease" not in {each["kind"] for each in without}
