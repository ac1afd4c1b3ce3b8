"""Parsers of names: of a process's cgroup to its container, of a kubelet's device id to a GPU.

Pure. Containers may be nested in a cgroup path (Docker in a pod). Then the outer one counts as the
device's user, because programs in a container can give their own cgroups any name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuhook.monitor.containers.groups import SLURM, job_of, name_of_job

_ID = r"[0-9a-f]{64}"
# A component of a path -> its engine. First conmon of podman and CRI-O: it watches a container from
# outside and isn't part of it.
_WATCHER = re.compile(rf"(?:libpod|crio)-conmon-{_ID}(?:\.scope)?")
_PARTS = (
    (re.compile(rf"libpod-({_ID})(?:\.scope)?"), "podman"),
    (re.compile(rf"docker-({_ID})(?:\.scope)?"), "docker"),
    (re.compile(rf"crio-({_ID})(?:\.scope)?"), "cri-o"),
    (re.compile(rf"(?:.*:)?cri-containerd[-:]({_ID})(?:\.scope)?"), "kubernetes"),
    (re.compile(rf"(?:nerdctl|containerd)-({_ID})(?:\.scope)?"), "containerd"),
)
_BARE = re.compile(_ID)  # cgroupfs's component, whose engine follows from those before it
_POD = re.compile(r"pod([0-9a-f][0-9a-f_-]{31,})")
_KUBERNETES = "kubepods"


@dataclass(frozen=True)
class Owner:
    """The owner of a cgroup: unknown fields are "", all of them if it belongs to no container.

    ``job`` is Slurm's job number. A job outside of containers counts as a container, with an
    ``id`` that no engine uses.
    """

    engine: str = ""
    id: str = ""
    pod_uid: str = ""
    job: str = ""


def owner(path: str) -> Owner:
    """Return a cgroup's owner, by its path in the host's hierarchy."""
    pod, before = "", ""
    for part in path.split("/"):
        if _WATCHER.fullmatch(part):
            return Owner(pod_uid=pod)
        pod = pod or _pod(part)
        engine, found = _container(part, before)
        if found:
            return Owner(engine, found, pod)
        before = f"{before}/{part}"
    return Owner(pod_uid=pod)


def _container(part: str, before: str) -> tuple[str, str]:
    """Return the engine and id of a path component, "" if it isn't a container's."""
    for pattern, engine in _PARTS:
        if match := pattern.fullmatch(part):
            return engine, match[1]
    if not _BARE.fullmatch(part):
        return "", ""
    if _KUBERNETES in before:
        return "kubernetes", part
    engines = (("docker", "docker"), ("libpod", "podman"), ("machine.slice", "podman"))
    return next((name for word, name in engines if word in before), ""), part


def _pod(part: str) -> str:
    """Return the pod UID in the name of a path component, "" if there is none.

    A static pod's UID is a digest. systemd's unit names have _ in place of -, which is a separator
    there.
    """
    name = part.partition(":")[0].removesuffix(".slice")
    places = [match.start() for match in re.finditer("pod", name)]
    match = _POD.fullmatch(name, places[-1]) if places else None
    return match[1].replace("_", "-") if match else ""


def pod_uid(path: str) -> str:
    """Return the UID of a cgroup's outermost pod, "" if there is none."""
    return next((uid for part in path.split("/") if (uid := _pod(part))), "")


def pod_of(v1: Mapping[str, str], v2: str) -> str:
    """Return the pod of a process's cgroups: ``v1`` by controller, ``v2`` the unified one."""
    return next((uid for path in (*v1.values(), v2) if (uid := pod_uid(path))), "")


def owner_of(cgroups: Mapping[str, str]) -> Owner:
    """Return a process's owner, by its cgroups (``proc.cgroups``)."""
    paths = dict(cgroups)
    unified = paths.pop("", "")
    owners = [owner(path) for path in dict.fromkeys((*paths.values(), unified))]
    job = job_of((*paths.values(), unified))
    none = Owner(SLURM, name_of_job(job)) if job else Owner()
    found = next((each for each in owners if each.id), none)
    return Owner(found.engine, found.id, found.pod_uid or pod_of(paths, unified), job)


# Device ids of the kubelet ------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceReference:
    """The meaning of a device id: a GPU or MIG device by its name or ``index``.

    ``gi`` and ``ci`` are instances of that GPU, ``replica`` is the share's number; None for none.
    """

    gpu: str = ""
    index: str = ""
    gi: str | None = None
    ci: str | None = None
    replica: str | None = None


_GKE = re.compile(r"(nvidia([0-9]+))(?:/gi([0-9]+))?(?:/vgpu([0-9]+))?")
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/([0-9]+)/([0-9]+)")


def assigned(device_id: str) -> DeviceReference:
    """Parse a device id of NVIDIA's, GKE's or gpuhook's plugin."""
    name, replicated, number = device_id.partition("::")
    replica = number if replicated else None
    if match := _GKE.fullmatch(name):
        gke, index, gi, share = match.groups()
        return DeviceReference("" if gi else gke, index, gi, None, replica or share)
    if match := _OLD_MIG.fullmatch(name):
        return DeviceReference(match[1], "", match[2], match[3], replica)
    if name.isdecimal() and name.isascii():
        return DeviceReference("", name, replica=replica)
    return DeviceReference(name, replica=replica)
