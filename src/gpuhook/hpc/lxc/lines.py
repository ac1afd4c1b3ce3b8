"""A plan as lines of an LXC container's configuration.

LXC mounts before it enters the container's root, and follows no link below that root.
Sources: lxc.container.conf(5), fstab(5).
"""

import os
from collections.abc import Callable, Iterable

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.host import proc
from gpuhook.core.plan.operations import DEVICE_OPTIONS, BindDevice, BindFile, Plan
from gpuhook.hpc.rootfs import fstab
from gpuhook.hpc.rootfs.node_writer import NodeWriter

_KEYS = {1: "lxc.cgroup", 2: "lxc.cgroup2"}
_BLANKS = frozenset(" \t\r\n")


class LxcWriter(NodeWriter):
    """Writer of a plan's ``mounts`` and ``rules``, values of LXC's settings.

    ``place`` returns a path of the container without links; ``nodes`` are those mounted.
    """

    def __init__(self, place: Callable[[str], str]) -> None:
        super().__init__()
        self.mounts: list[str] = []
        self._place = place

    def may_name(self, path: str) -> bool:
        """Tell whether a path has no blanks, because LXC separates the access by them."""
        return _BLANKS.isdisjoint(path)

    def by_number(self, major: int, minor: int) -> str:
        """Return a device's type and numbers."""
        return f"c {major}:{minor}"

    def node(self, op: BindDevice) -> None:
        """Mount the node."""
        super().node(op)
        self._add(op.source, op.destination, ("create=file", *DEVICE_OPTIONS))

    def mount(self, op: BindFile) -> None:
        """Mount a file or a folder; the container starts without an optional one."""
        kind = "dir" if fstab.is_folder(op.source) else "file"
        optional = ("optional",) if op.optional else ()
        self._add(op.source, op.destination, (f"create={kind}", *optional, *op.options))

    def _add(self, source: str, destination: str, options: Iterable[str]) -> None:
        place = self._place(destination).lstrip("/")  # LXC takes it below the container's root
        words = ",".join(("bind", *options))
        self.mounts.append(f"{fstab.escaped(source)} {fstab.escaped(place)} none {words} 0 0")


def lines(plan: Plan, env: Iterable[str], rootfs: str | None, versions: Iterable[int]) -> list[str]:
    """Return the lines for a plan; ``env`` are single-line NAME=VALUE.

    ``rootfs`` is the root folder, None if unknown. ``versions`` are those of cgroups for which
    devices are allowed.
    """
    written = _written(plan, rootfs)
    keys = [_KEYS[version] for version in versions]
    allowed = [f"{key}.devices.allow = {rule}" for key in keys for rule in written.rules]
    mounts = [f"lxc.mount.entry = {mount}" for mount in written.mounts]
    return [*allowed, *mounts, *(f"lxc.environment = {each}" for each in env)]


def warnings(plan: Plan) -> list[str]:
    """Return warnings about nodes that a container with mapped users can't open."""
    return [
        f"{op.source} is for the host's group {op.node.group}, which has no members in an "
        "unprivileged container: map that group with lxc.idmap to use it"
        for op in LxcWriter(str).write(plan.operations).nodes
        if op.node.group
    ]


def _written(plan: Plan, rootfs: str | None) -> LxcWriter:
    if rootfs is None:
        return LxcWriter(str).write(plan.operations)
    with Rootfs(rootfs) as root:
        return LxcWriter(lambda path: _without_links(root, path)).write(plan.operations)


def _without_links(root: Rootfs, path: str) -> str:
    """Return a path below a root with its links resolved, as far as it exists.

    The container may change that later: then LXC refuses to mount there.
    """
    rest: list[str] = []
    while path != "/" and not root.exists(path):
        path, name = os.path.split(path)
        rest.insert(0, name)
    return os.path.join(root.real_path(path), *rest)


def versions(*, is_restricted: bool = True) -> list[int]:
    """Return the versions of cgroups for which to allow devices.

    A container that a user starts has no device cgroup. With v2, rules in a container without
    others (``is_restricted``) would forbid all other devices. LXC 7 refuses rules for v1.
    """
    if os.geteuid() != 0:
        return []
    groups = proc.cgroups(proc.read("/proc/self/cgroup"))
    has_v1 = any("devices" in controllers.split(",") for controllers in groups)
    return [*([2] if is_restricted else []), *([1] if has_v1 else [])]
