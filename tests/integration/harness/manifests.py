"""packaging/kubernetes as kubectl renders it, and podman's options that mean what a pod's do."""

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from harness.commands import run
from harness.images import REPOSITORY

MANIFESTS = REPOSITORY / "packaging/kubernetes"
VARIANTS = (
    "base", "overlays/mounts", "overlays/cdi", "overlays/cdi-pod", "overlays/dra",
    "overlays/environment", "overlays/labels", "overlays/labels-remove", "overlays/metrics",
    "overlays/metrics-operator", "overlays/mps", "overlays/nri", "overlays/remove",
)  # fmt: skip
IMAGE = "localhost/gpuhook:test"  # scripts/lib/image

Document = dict[str, Any]


def build_image() -> Path:
    """Build the image, or find the archive of it that is still fresh."""
    return Path(run([REPOSITORY / "scripts/lib/image"], timeout=600.0).ok().stdout.strip())


def render(variant: str | Path) -> list[Document]:
    """Return what kubectl makes of a folder without a warning."""
    text = _shipped(variant) if variant in VARIANTS else _rendered(variant)
    documents: list[Document] = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    return documents


def _rendered(variant: str | Path) -> str:
    done = run(["kubectl", "kustomize", MANIFESTS / variant]).ok()
    assert done.stderr == ""
    return done.stdout


_shipped = cache(_rendered)  # nobody changes those of this tree


def overlay(folder: Path, resource: str, component: str) -> Path:
    """Make an overlay of a variant and a component in a new folder; return that."""
    folder.mkdir()
    place = os.path.relpath(MANIFESTS, folder)
    (folder / "kustomization.yaml").write_text(
        f"resources: [{place}/{resource}]\ncomponents: [{place}/components/{component}]\n"
    )
    return folder


def daemon_sets(variant: str | Path) -> list[Document]:
    """Return the DaemonSets of a variant."""
    return [each for each in render(variant) if each["kind"] == "DaemonSet"]


def daemon_set(variant: str | Path, name: str) -> Document:
    """Return the DaemonSet of a variant whose pod has a container of that name."""
    [found] = [each for each in daemon_sets(variant) if name in containers(pod_of(each))]
    return found


def pod_of(document: Document) -> Document:
    """Return the pod's specification in a DaemonSet."""
    pod: Document = document["spec"]["template"]["spec"]
    return pod


def containers(pod: Document) -> dict[str, Document]:
    """Return all containers of a pod by name, those that come first among them."""
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


def podman_options(pod: Document, container: Document, host: Mapping[str, str]) -> list[str]:
    """Return podman's options for a container as the kubelet would have it run.

    ``host`` has folders that stand for others of the node's, and those of ConfigMaps by name.
    """
    words = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    words += ["--pids-limit=0", f"--entrypoint={json.dumps(container['command'])}"]
    words += ["--pid=host"] if pod.get("hostPID") else []
    words += _security(pod["securityContext"]) + _security(container["securityContext"])
    # There is no API server: --network=none.
    known = [each for each in container.get("env", []) if each["name"] != "INSTALL_NODE_LEASE"]
    words += [f"--env={each['name']}={_value(each)}" for each in known]
    limits = container["resources"]["limits"]
    words += [f"--memory={limits['memory'].replace('Mi', 'm')}"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container.get("volumeMounts", []):
        words += _mount(mount, volumes[mount["name"]], host)
    return words


def _value(variable: Document) -> str:
    """Return what a variable is; a pod has an address of the loopback's here."""
    if "valueFrom" in variable:
        fields = {"status.podIP": "127.0.0.1", "spec.nodeName": "n1"}
        return fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    value: str = variable["value"]
    return value


def arguments(container: Document) -> list[str]:
    """Return a container's arguments with its variables in them."""
    found = [*container.get("args", [])]
    for each in container.get("env", []):
        found = [word.replace(f"$({each['name']})", _value(each)) for word in found]
    return found


def _security(context: Document) -> list[str]:
    """Return the options of a security context; KeyError for a field that isn't known here."""
    return [word for key, value in context.items() for word in _SECURITY[key](value)]


_HAS_APPARMOR = Path("/sys/module/apparmor").exists()  # else podman refuses the option

# A field of a security context -> what it is to podman.
_SECURITY: dict[str, Callable[[Any], list[str]]] = {
    "runAsUser": lambda user: [f"--user={user}"],
    "seccompProfile": lambda profile: {"RuntimeDefault": []}[profile["type"]],  # as podman has it
    "privileged": lambda yes: ["--privileged"] if yes else [],
    "readOnlyRootFilesystem": lambda yes: ["--read-only", "--read-only-tmpfs=false"] if yes else [],
    "allowPrivilegeEscalation": lambda yes: [] if yes else ["--security-opt=no-new-privileges"],
    "appArmorProfile": lambda profile: {
        "Unconfined": ["--security-opt=apparmor=unconfined"] if _HAS_APPARMOR else []
    }[profile["type"]],
    "capabilities": lambda sets: [
        f"--cap-{what}={name}" for what in ("drop", "add") for name in sets.get(what, [])
    ],
}


def _mount(mount: Document, volume: Document, host: Mapping[str, str]) -> list[str]:
    target = mount["mountPath"]
    if "emptyDir" in volume:
        return [f"--tmpfs={target}:rw"]
    if "configMap" in volume:
        assert volume["configMap"]["optional"]
        given = host.get(volume["configMap"]["name"])
        return [f"--volume={given}:{target}:ro" if given else f"--tmpfs={target}:ro"]
    if "secret" in volume:
        return [f"--volume={host[volume['secret']['secretName']]}:{target}:ro"]
    path = volume["hostPath"]["path"]
    options = ["ro" if mount.get("readOnly") else "rw", "dev"]  # podman's own default is nodev
    options += {None: [], "HostToContainer": ["rslave"]}[mount.get("mountPropagation")]
    source = Path(host.get(path, path))
    return [f"--volume={source}:{target}:{','.join(options)}"]


def folders_made(pod: Document) -> list[str]:
    """Return the folders of the node that the kubelet makes where they are missing."""
    places = [volume["hostPath"] for volume in pod["volumes"] if "hostPath" in volume]
    return [place["path"] for place in places if place["type"] == "DirectoryOrCreate"]
