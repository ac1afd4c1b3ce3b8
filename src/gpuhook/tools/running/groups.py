"""Which container a process is in, by its cgroups, as far as root has named them.

Whoever a cgroup was handed to (systemd's Delegate=, a rootless engine) makes others below it and
calls them what he likes: like another engine's container, and another one for each process.
So a path counts up to the first folder that isn't root's: what a user's own engine runs is that
user's, in the one cgroup that he was given.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpuhook.ground.host import files, proc

_ID = re.compile(r"[0-9a-f]{64}")
_ENGINES = (
    ("libpod", "podman"),
    ("crio", "cri-o"),
    ("kubepods", "kubernetes"),
    ("cri-containerd", "kubernetes"),
    ("docker", "docker"),
)
# What Slurm makes for a job at the top, in v1 and v2 (its cgroup plugins); a container that makes
# cgroups with these names has them below its own. From a cgroup namespace the way there leads up,
# at most to the top.
_JOB = re.compile(
    r"(?:/\.\.)*/(?:slurm[^/]*(?:/uid_[0-9]+)?|(?:system\.slice/)?(?:[^/]+_)?slurmstepd\.scope)"
    r"/job_([0-9]+)(?:/.*)?"
)
SLURM = "slurm"  # the engine of what is in a job, and in no container with a cgroup
_USERS = "user.slice"  # of systemd, with a cgroup for each user (systemd.special(7))

Groups = Mapping[str, str]  # controllers of a hierarchy -> a path in it


def groups_of(entry: str | int) -> dict[str, str]:
    """Return a process' cgroups, none where they aren't for us to read."""
    return proc.cgroups(proc.data_of(f"/proc/{entry}/cgroup"))


def own_path(groups: Groups, ours: Groups) -> str:
    """Return a process' cgroup, where it isn't our own: the devices', the unified one, or any.

    "/" where it has none of its own.
    """
    own = {key: path for key, path in groups.items() if path != ours.get(key, "/")}
    preferred = sorted(own, key=lambda key: ("devices" not in key.split(","), key != ""))
    return own[preferred[0]] if preferred else "/"


def group_of(entry: str | int) -> str:
    """Return the cgroup that tells which container a process belongs to, "" if none does."""
    found = own_path(groups_of(entry), groups_of("self"))
    return "" if found == "/" else found


def path_of(record: Mapping[int, str], groups: Groups, ours: Groups) -> str:
    """Return the cgroup of a container that has a record, "/" where it has none of its own.

    ``record`` are the cgroups that it was given, by version, ``groups`` those in which its first
    process is now. That may have moved below, as systemd does in a container.
    """
    path = own_path(groups, ours)
    for given in record.values():
        if given != "/" and f"{path}/".startswith(f"{given}/"):
            return given  # protects: given-path
        # In a cgroup namespace paths begin elsewhere, with the same name at the end.
        parts, name = path.split("/"), given.rpartition("/")[2]
        if ".." in parts and name in parts:
            return "/".join(parts[: parts.index(name) + 1])
    return path


def job_of(paths: Iterable[str]) -> str:
    """Return the number of the Slurm job that a process' cgroups are of, "" for none."""
    # protects: own-job-name
    return next((match[1] for path in paths if (match := _JOB.fullmatch(path))), "")


def name_of_job(job: str) -> str:
    """Return what counts as a container's id for what is in a job, and in no container."""
    return f"{SLURM}:{job}"


class Identity(NamedTuple):
    """Which container it is: id, engine, and its cgroup where another's may be called so."""

    name: str
    engine: str
    place: str = ""


def identify(groups: Groups, ours: Groups) -> Identity:
    """Return whose a process is, from its cgroups as root made them (``Made``).

    ``ours`` are our own. The id is the 64 hex digits that engines use: the outermost ones,
    because a container can call its own cgroups what it likes. Else it is that of a Slurm job, or
    the last part of the path.
    """
    path = own_path(groups, ours)
    engine = next((name for word, name in _ENGINES if word in path), "")
    ids = _ID.findall(path)
    if ids:
        return Identity(ids[0], engine)  # protects: own-group-name
    if job := job_of(groups.values()):
        return Identity(name_of_job(job), SLURM)  # protects: job-names-container
    return Identity(path.rpartition("/")[2].removesuffix(".scope") or "/", engine, path)


class Made:
    """What root made of cgroups' paths, by the owners of their folders; for one look."""

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
        """Return the cgroups of a process, each up to what root named last."""
        return {key: self._part(key, path) for key, path in groups.items()}

    def _part(self, controllers: str, path: str) -> str:
        names = path.split("/")[1:]
        wanted = set(os.fsencode(controllers).split(b","))
        for named, root, point in self._trees:
            prefix = "" if root == "/" else root
            if wanted <= named and path.startswith(f"{prefix}/") and ".." not in names:
                return prefix + self._made_below(point, path[len(prefix) :].split("/")[1:])
        # Not to be seen from here, as in a cgroup namespace: users have theirs below user.slice.
        end = names.index(_USERS) + 2 if _USERS in names else len(names)
        return "/" + "/".join(names[:end])

    def _made_below(self, folder: str, names: list[str]) -> str:
        """Return the beginning of a path of which every folder that holds a name is root's."""
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
                found = False  # removed by now
            self._owned[folder] = found
        return found
