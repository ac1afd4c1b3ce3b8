"""Mapping of processes to containers by their cgroups, as far as root created them.

A user with a delegated cgroup (systemd's Delegate=, a rootless engine) can create cgroups below it
with any name, such as that of another engine's container, and one for each process. So a path is
used only up to the first folder that root doesn't own. All processes of a user's own engine count
as that user's, in the cgroup that was delegated.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpuhook.base.host import files, proc

_ID = re.compile(r"[0-9a-f]{64}")
_ENGINES = (
    ("libpod", "podman"),
    ("crio", "cri-o"),
    ("kubepods", "kubernetes"),
    ("cri-containerd", "kubernetes"),
    ("docker", "docker"),
)
# Top-level cgroups that Slurm creates for a job, in v1 and v2 (its cgroup plugins). A container
# that creates cgroups with these names has them below its own. In a cgroup namespace the path
# starts with "..", at most up to the top.
_JOB = re.compile(
    r"(?:/\.\.)*/(?:slurm[^/]*(?:/uid_[0-9]+)?|(?:system\.slice/)?(?:[^/]+_)?slurmstepd\.scope)"
    r"/job_([0-9]+)(?:/.*)?"
)
SLURM = "slurm"  # the engine of processes in a job, and in no container with a cgroup
_USERS = "user.slice"  # systemd's slice with a cgroup for each user (systemd.special(7))

Groups = Mapping[str, str]  # controllers of a hierarchy -> a path in it


def groups_of(entry: str | int) -> dict[str, str]:
    """Return a process' cgroups, none if we can't read them."""
    return proc.cgroups(proc.data_of(f"/proc/{entry}/cgroup"))


def own_path(groups: Groups, ours: Groups) -> str:
    """Return a process' cgroup that isn't ours: of the devices controller, v2, or any other.

    "/" if it has no cgroup of its own.
    """
    own = {key: path for key, path in groups.items() if path != ours.get(key, "/")}
    preferred = sorted(own, key=lambda key: ("devices" not in key.split(","), key != ""))
    return own[preferred[0]] if preferred else "/"


def group_of(entry: str | int) -> str:
    """Return the cgroup that identifies a process' container, "" if there is none."""
    found = own_path(groups_of(entry), groups_of("self"))
    return "" if found == "/" else found


def path_of(record: Mapping[int, str], groups: Groups, ours: Groups) -> str:
    """Return the cgroup of a container with a record, "/" if it has none of its own.

    ``record`` are its recorded cgroups by version, ``groups`` the current ones of its first
    process. That may have moved to a child cgroup, as systemd does in a container.
    """
    path = own_path(groups, ours)
    for given in record.values():
        if given != "/" and f"{path}/".startswith(f"{given}/"):
            return given  # protects: given-path
        # In a cgroup namespace paths start elsewhere, and end with the same name.
        parts, name = path.split("/"), given.rpartition("/")[2]
        if ".." in parts and name in parts:
            return "/".join(parts[: parts.index(name) + 1])
    return path


def job_of(paths: Iterable[str]) -> str:
    """Return the number of the Slurm job of a process' cgroups, "" for none."""
    # protects: own-job-name
    return next((match[1] for path in paths if (match := _JOB.fullmatch(path))), "")


def name_of_job(job: str) -> str:
    """Return the container id used for processes in a job and in no container."""
    return f"{SLURM}:{job}"


class ContainerIdentity(NamedTuple):
    """Identity of a container: id, engine, and its cgroup if the id may not be unique."""

    name: str
    engine: str
    place: str = ""


def identify(groups: Groups, ours: Groups) -> ContainerIdentity:
    """Return a process' container from its cgroups created by root (``RootCgroups``).

    ``ours`` are our own. The id is the 64 hex digits that engines use: the outermost ones,
    because a container can name its own cgroups freely. Otherwise it is that of a Slurm job, or
    the last part of the path.
    """
    path = own_path(groups, ours)
    engine = next((name for word, name in _ENGINES if word in path), "")
    ids = _ID.findall(path)
    if ids:
        return ContainerIdentity(ids[0], engine)  # protects: own-group-name
    if job := job_of(groups.values()):
        return ContainerIdentity(name_of_job(job), SLURM)  # protects: job-names-container
    return ContainerIdentity(path.rpartition("/")[2].removesuffix(".scope") or "/", engine, path)


class RootCgroups:
    """The parts of cgroup paths created by root, from the folders' owners; for one search."""

    def __init__(self) -> None:
        self._ours = {os.geteuid()}
        self._trees: list[tuple[set[bytes], str, str]] = []  # controllers, root, mount point
        self._owned: dict[str, bool] = {}
        for mount in proc.Mounts(proc.data_of("/proc/self/mountinfo")):
            if mount.kind in (b"cgroup", b"cgroup2"):
                named = {b""} if mount.kind == b"cgroup2" else set(mount.options.split(b","))
                places = (proc.unescaped(mount.root), proc.unescaped(mount.point))
                self._trees.append((named, *places))

    def of(self, groups: Groups) -> dict[str, str]:
        """Return the cgroups of a process, each up to the last folder created by root."""
        return {key: self._part(key, path) for key, path in groups.items()}

    def _part(self, controllers: str, path: str) -> str:
        names = path.split("/")[1:]
        wanted = set(os.fsencode(controllers).split(b","))
        for named, root, point in self._trees:
            prefix = "" if root == "/" else root
            if wanted <= named and path.startswith(f"{prefix}/") and ".." not in names:
                return prefix + self._made_below(point, path[len(prefix) :].split("/")[1:])
        # Not visible, as in a cgroup namespace: users' cgroups are below user.slice.
        end = names.index(_USERS) + 2 if _USERS in names else len(names)
        return "/" + "/".join(names[:end])

    def _made_below(self, folder: str, names: list[str]) -> str:
        """Return the start of a path in which root owns every parent folder."""
        made = ""
        for name in names:
            if not self._is_ours(folder + made):  # protects: given-group
                break
            made = f"{made}/{name}"
        return made

    def _is_ours(self, folder: str) -> bool:
        found = self._owned.get(folder)
        if found is None:
            try:
                owner = os.lstat(folder).st_uid
                found = owner in self._ours or files.is_roots(owner)
            except OSError:
                found = False  # removed meanwhile
            self._owned[folder] = found
        return found
