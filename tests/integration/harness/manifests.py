"""packaging/kubernetes as kubectl renders it, and the podman options that match a pod's options."""

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
    """Return the archive of the image, which is built unless it is up to date."""
    return Path(run([REPOSITORY / "scripts/lib/image"], timeout=600.0).ok().stdout.strip())


def render(variant: str | Path) -> list[Document]:
    """Return the objects that kubectl renders from a folder; a warning is an error."""
    text = _shipped(variant) if variant in VARIANTS else _rendered(variant)
    documents: list[Document] = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    return documents


def _rendered(variant: str | Path) -> str:
    done = run(["kubectl", "kustomize", MANIFESTS / variant]).ok()
    assert done.stderr == ""
    return done.stdout


_shipped = cache(_rendered)  # this tree's manifests don't change during the tests


def overlay(folder: Path, resource: str, component: str) -> Path:
    """Make an overlay of a variant and a component in a new folder; return the folder."""
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
    """Return the pod's specification from a DaemonSet."""
    pod: Document = document["spec"]["template"]["spec"]
    return pod


def containers(pod: Document) -> dict[str, Document]:
    """Return all containers of a pod by name, including the init containers."""
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


def podman_options(pod: Document, container: Document, host: Mapping[str, str]) -> list[str]:
    """Return the podman options that run a container as the kubelet would run it.

    ``host`` maps paths of the node to folders that replace them. It also maps names of
    ConfigMaps and Secrets to folders.
    """
    words = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    words += ["--pids-limit=0", f"--entrypoint={json.dumps(container['command'])}"]
    words += ["--pid=host"] if pod.get("hostPID") else []
    words += _security(pod["securityContext"]) + _security(container["securityContext"])
    # The container has no API server for this variable, because of --network=none.
    known = [each for each in container.get("env", []) if each["name"] != "INSTALL_NODE_LEASE"]
    words += [f"--env={each['name']}={_value(each)}" for each in known]
    limits = container["resources"]["limits"]
    words += [f"--memory={limits['memory'].replace('Mi', 'm')}"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container.get("volumeMounts", []):
        words += _mount(mount, volumes[mount["name"]], host)
    return words


def _value(variable: Document) -> str:
    """Return the value of a variable; the pod's address is a loopback address here."""
    if "valueFrom" in variable:
        fields = {"status.podIP": "127.0.0.1", "spec.nodeName": "n1"}
        return fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    value: str = variable["value"]
    return value


def arguments(container: Document) -> list[str]:
    """Return a container's arguments with its variables replaced by their values."""
    found = [*container.get("args", [])]
    for each in container.get("env", []):
        found = [word.replace(f"$({each['name']})", _value(each)) for word in found]
    return found


def _security(context: Document) -> list[str]:
    """Return the options for a security context; raise KeyError for an unknown field."""
    return [word for key, value in context.items() for word in _SECURITY[key](value)]


_HAS_APPARMOR = Path("/sys/module/apparmor").exists()  # without AppArmor podman refuses the option

# A field of a security context -> podman's options for it.
_SECURITY: dict[str, Callable[[Any], list[str]]] = {
    "runAsUser": lambda user: [f"--user={user}"],
    "seccompProfile": lambda profile: {"RuntimeDefault": []}[profile["type"]],  # podman's default
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
    """Return the folders of the node that the kubelet makes if they are missing."""
    places = [volume["hostPath"] for volume in pod["volumes"] if "hostPath" in volume]
    return [place["path"] for place in places if place["type"] == "DirectoryOrCreate"]
