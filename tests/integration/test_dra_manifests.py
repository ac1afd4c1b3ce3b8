"""overlays/dra: the plugin's permissions in a cluster, and the requests that policies allow."""

import json
import re
from pathlib import Path
from typing import Any

import celpy
import machines
import paper
import pytest
from celpy import celtypes
from harness.helm import rendered
from harness.manifests import Document, containers, pod_of, render
from kubernetes import client

from gpuhook.base.config.model import Config
from gpuhook.cluster.dra import slices as dra
from gpuhook.core import contract
from gpuhook.vendors import registry

ACCOUNT = "system:serviceaccount:gpuhook:gpuhook-dra"
NODE = "authentication.kubernetes.io/node-name"
CLASSES = "DeviceClass"


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return render("overlays/dra")


def named(documents: list[Document], kind: str, name: str) -> Document:
    [found] = [
        each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def test_kubernetes_own_models_know_every_field(documents: list[Document]) -> None:
    api = client.ApiClient()
    for each in documents:
        version = each["apiVersion"].rpartition("/")[2].capitalize()
        model = api.deserialize(json.dumps(each), f"{version}{each['kind']}", "application/json")
        assert api.sanitize_for_serialization(model) == without_nulls(each), each["metadata"]


def without_nulls(given: Any) -> Any:
    if isinstance(given, list):
        return [without_nulls(each) for each in given]
    if isinstance(given, dict):
        return {key: without_nulls(each) for key, each in given.items() if each is not None}
    return given


# Classes ------------------------------------------------------------------------------------------


def test_shipped_device_classes_match_the_vendors(
    documents: list[Document], tmp_path: Path
) -> None:
    """All vendors' classes are shipped, with the expressions and resources of --dry-run."""
    shipped = {
        each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == CLASSES
    }
    vendors = [name for name in registry.BUILT_IN if name != "nvidia"]
    found = [
        (contract.load(registry.BUILT_IN[name]), paper.machine(name, tmp_path / name))
        for name in vendors
    ]
    found.append((contract.load(registry.BUILT_IN["nvidia"]), machines.machine(machines.gpu(0, 3))))
    made, _ = dra.objects(found, dra.Choices("n1"), Config())
    printed = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == CLASSES}
    assert {*shipped} == {*printed}
    for name, spec in shipped.items():
        assert spec["selectors"] == printed[name]["selectors"]
        assert spec.get("extendedResourceName") in (None, printed[name].get("extendedResourceName"))
    resources = [
        each["extendedResourceName"] for each in shipped.values() if "extendedResourceName" in each
    ]
    assert "nvidia.com/gpu" in resources
    assert len({*resources}) == len(resources)


# Rights -------------------------------------------------------------------------------------------

# Requests of cluster.py and keeper.py. Discovery and /version are open to every account.
ASKED = {
    ("resource.k8s.io", "resourceslices"): {"list", "watch", "create", "update", "delete"},
    ("resource.k8s.io", "resourceclaims"): {"get"},
    ("resource.k8s.io", "resourceclaims/status"): {"patch"},
    ("resource.k8s.io", "resourceclaims/driver"): {"associated-node:patch"},
    ("", "nodes"): {"get"},
}


def test_rights_are_exactly_those_needed(documents: list[Document]) -> None:
    role = named(documents, "ClusterRole", "gpuhook-dra")
    rights = {
        (group, resource): {*rule["verbs"]}
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert rights == ASKED
    binding = named(documents, "ClusterRoleBinding", "gpuhook-dra")
    [subject] = binding["subjects"]
    assert f"system:serviceaccount:{subject['namespace']}:{subject['name']}" == ACCOUNT
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pod = pod_of(named(documents, "DaemonSet", "gpuhook-dra"))
    assert (pod["serviceAccountName"], subject["kind"]) == (subject["name"], "ServiceAccount")
    others = [each for each in documents if each["kind"] == "DaemonSet" and pod_of(each) is not pod]
    assert {pod_of(each)["serviceAccountName"] for each in others} == {"gpuhook"}


def test_the_plugin_serves_while_it_is_replaced(documents: list[Document]) -> None:
    document = named(documents, "DaemonSet", "gpuhook-dra")
    assert document["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == 0
    [container] = pod_of(document)["containers"]
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in container["env"]
        if "valueFrom" in each
    }
    assert fields == {"NODE_NAME": "spec.nodeName", "POD_UID": "metadata.uid"}
    for name in ("plugins", "plugins_registry"):  # the same path in the pod and on the node
        place = f"/var/lib/kubelet/{name}"
        [mount] = [each for each in container["volumeMounts"] if each["mountPath"] == place]
        [volume] = [each for each in pod_of(document)["volumes"] if each["name"] == mount["name"]]
        assert volume["hostPath"]["path"] == place
    assert "device-plugin" not in containers(pod_of(document))


# Policies -----------------------------------------------------------------------------------------


class Policy:
    """A ValidatingAdmissionPolicy, evaluated by a CEL interpreter that isn't Kubernetes' own."""

    def __init__(self, documents: list[Document], name: str) -> None:
        self.spec = named(documents, "ValidatingAdmissionPolicy", name)["spec"]
        self.binding = named(documents, "ValidatingAdmissionPolicyBinding", name)["spec"]
        assert self.binding == {"policyName": name, "validationActions": ["Deny"]}
        assert self.spec["failurePolicy"] == "Fail"

    def allows(
        self, operation: str, before: Any, after: Any, who: str = ACCOUNT, **extra: Any
    ) -> bool:
        """Return whether the policy allows a request; requests that match no condition pass."""
        user = {"username": who, **({"extra": extra["extra"]} if "extra" in extra else {})}
        seen = {
            "request": {"operation": operation, "userInfo": user},
            "object": after,
            "oldObject": before,
        }
        known: dict[str, Any] = {}
        if not all(_cel(each["expression"], seen, known) for each in self.spec["matchConditions"]):
            return True
        for each in self.spec["variables"]:
            known[each["name"]] = _cel(each["expression"], seen, known)
        return all(_cel(each["expression"], seen, known) for each in self.spec["validations"])

    def matches(self, operation: str, resource: str) -> bool:
        [rule] = self.spec["matchConstraints"]["resourceRules"]
        assert (rule["apiGroups"], rule["apiVersions"]) == (["resource.k8s.io"], ["*"])
        return operation in rule["operations"] and resource in rule["resources"]


def _cel(expression: str, seen: dict[str, Any], known: dict[str, Any]) -> Any:
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    context = {name: celpy.json_to_cel(value) for name, value in seen.items()}
    variables = celtypes.MapType({celtypes.StringType(name): each for name, each in known.items()})
    return program.evaluate({**context, "variables": variables})


def slice_of(node: str | None, pool: str | None = None) -> Document:
    place = {"nodeName": node} if node else {"allNodes": True}
    named = {"name": pool or node or "n1", "generation": 1, "resourceSliceCount": 1}
    return {"spec": {"driver": "gpu.nvidia.com", "pool": named, **place}}


OWN = {"extra": {NODE: ["n1"], "authentication.kubernetes.io/pod-name": ["p"]}}
MINE, THEIRS, ALL = slice_of("n1"), slice_of("n2"), slice_of(None)
# operation, object before, object after, user's attributes, whether the request is allowed
REQUESTS: dict[str, tuple[str, Any, Any, dict[str, Any], bool]] = {
    "create": ("CREATE", None, MINE, OWN, True),
    "update": ("UPDATE", MINE, MINE, OWN, True),
    "delete": ("DELETE", MINE, None, OWN, True),
    "create for another node": ("CREATE", None, THEIRS, OWN, False),
    "create for all nodes": ("CREATE", None, ALL, OWN, False),
    "update another's": ("UPDATE", THEIRS, THEIRS, OWN, False),
    "take another's": ("UPDATE", THEIRS, MINE, OWN, False),
    "give away": ("UPDATE", MINE, THEIRS, OWN, False),
    "delete another's": ("DELETE", THEIRS, None, OWN, False),
    "delete what is for all": ("DELETE", ALL, None, OWN, False),
    "create in another's pool": ("CREATE", None, slice_of("n1", "n2"), OWN, False),
    "create in a pool that begins so": ("CREATE", None, slice_of("n1", "n10"), OWN, False),
    "create in a second pool": ("CREATE", None, slice_of("n1", "n1/second"), OWN, True),
    "update in another's pool": (
        "UPDATE", slice_of("n1", "n2"), slice_of("n1", "n2"), OWN, False),
    "delete in another's pool": ("DELETE", slice_of("n1", "n2"), None, OWN, True),
    "a token of no node": ("CREATE", None, MINE, {"extra": {}}, False),
    "a token without more": ("CREATE", None, MINE, {}, False),
    "a token of no node, for all nodes": ("CREATE", None, ALL, {}, False),
    "a token of two nodes": ("CREATE", None, MINE, {"extra": {NODE: ["n1", "n2"]}}, False),
    "a token with an empty name": ("CREATE", None, ALL, {"extra": {NODE: [""]}}, False),
    "somebody else": ("CREATE", None, THEIRS, {"who": "system:node:n2"}, True),
    "an account of that name elsewhere": (
        "CREATE", None, THEIRS, {"who": "system:serviceaccount:other:gpuhook-dra"}, True),
}  # fmt: skip


@pytest.mark.protects(
    "own-slices", "DRA: a node writes only its own resource slices", instead='- expression: "true"'
)
@pytest.mark.protects(
    "own-pools",
    "DRA: a node writes resource slices only into its own pools",
    instead='- expression: "true"',
)
@pytest.mark.parametrize("name", [*REQUESTS])
def test_a_node_may_write_only_its_own_slices(name: str, documents: list[Document]) -> None:
    operation, before, after, asking, expected = REQUESTS[name]
    policy = Policy(documents, "gpuhook-dra-slices")
    assert policy.matches(operation, "resourceslices")
    assert policy.allows(operation, before, after, **asking) == expected


def told(*pools: str, **more: Any) -> Document:
    """Return a claim whose drivers reported on devices of these pools."""
    said = [{"driver": "gpu.nvidia.com", "pool": pool, "device": "a", **more} for pool in pools]
    return {"status": {**HAS["status"], **({"devices": said} if pools else {})}}


HAS: Document = {"status": {"allocation": {"devices": {}}, "reservedFor": [{"name": "p"}]}}
TOLD = told("n1")
CLAIMS: dict[str, tuple[Any, Any, bool]] = {
    "of a second pool": (HAS, told("n1/second"), True),
    "beside others": (told("n2", "n1"), told("n1", "n2", "n1/second"), True),
    "take it back beside others": (told("n2", "n1"), told("n2"), True),
    "of another's pool": (HAS, told("n2"), False),
    "of a pool that begins so": (HAS, told("n10"), False),
    "what another said": (told("n2"), told("n2", data={"a": 1}), False),
    "take back what another said": (told("n1", "n2"), TOLD, False),
    "take back all that another said": (told("n2"), HAS, False),
    "say what became of it": (HAS, TOLD, True),
    "take it back": (TOLD, HAS, True),
    "before it has any": ({}, {"status": {"devices": TOLD["status"]["devices"]}}, True),
    "give it other devices": (HAS, {"status": {**HAS["status"], "allocation": {"a": 1}}}, False),
    "give it devices": ({"status": {}}, HAS, False),
    "take its devices": (HAS, {"status": {"reservedFor": HAS["status"]["reservedFor"]}}, False),
    "take its pods": (HAS, {"status": {"allocation": HAS["status"]["allocation"]}}, False),
    "give it to another pod": (HAS, {"status": {**HAS["status"], "reservedFor": []}}, False),
    "take everything": (HAS, {}, False),
}  # fmt: skip


@pytest.mark.protects(
    "own-status",
    "DRA: a node reports the status of only its own devices",
    instead='- expression: "true"',
)
@pytest.mark.protects(
    "allocation-stays",
    "DRA: a node's plugin can't change a claim's allocation or reservation",
    instead='- expression: "true"',
)
@pytest.mark.parametrize("name", [*CLAIMS])
def test_only_the_scheduler_changes_the_devices_of_a_claim(
    name: str, documents: list[Document]
) -> None:
    before, after, expected = CLAIMS[name]
    policy = Policy(documents, "gpuhook-dra-claims")
    assert policy.matches("UPDATE", "resourceclaims/status")
    assert policy.allows("UPDATE", before, after, extra=OWN["extra"]) == expected
    assert not policy.allows("UPDATE", HAS, TOLD), "a token that names no node"
    assert policy.allows("UPDATE", before, after, who="system:kube-scheduler")


def test_helm_policies_name_the_account_of_the_release() -> None:
    """In another namespace, a fixed account name would match no account."""
    made = rendered("--set=mode=dra", "--namespace=elsewhere")
    policies = [each for each in made if each["kind"] == "ValidatingAdmissionPolicy"]
    assert len(policies) == 2
    for each in policies:
        [condition] = each["spec"]["matchConditions"]
        said = re.findall(r'"(.*)"', condition["expression"])
        assert said == ["system:serviceaccount:elsewhere:gpuhook-dra"]
    assert not [
        each
        for each in rendered("--set=mode=dra", "--set=dra.deviceClasses=false")
        if each["kind"] == CLASSES
    ]
