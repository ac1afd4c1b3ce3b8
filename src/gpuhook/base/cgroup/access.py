"""Access to exact character devices: in a container's OCI spec or in its live cgroup.

Sources: the OCI runtime specification (config-linux.md, allowed device list),
Documentation/admin-guide/cgroup-v1/devices.rst, cgroups(7), cgroup_namespaces(7), proc(5).
"""

import errno
import os

from gpuhook.base.errors import CgroupError, shown
from gpuhook.base.host import proc as host_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

ACCESS = "rw"
_EVERY = (None, -1)  # in place of a number, in a rule for all numbers
DENIED = (errno.EPERM, errno.EACCES)

# include/uapi/linux/nsfs.h: the first user namespace has this inode on every host.
USER_NS_INIT_INO = 0xEFFFFFFD

# crun creates this folder below the systemd scope that holds the container's device policy.
CRUN_SUBGROUP = "container"


def device_rules(devices: "Iterable[tuple[int, int]]") -> "list[dict[str, Any]]":
    """Return rules for linux.resources.devices that allow the devices (major, minor)."""
    return [
        {"allow": True, "type": "c", "major": major, "minor": minor, "access": ACCESS}
        for major, minor in devices
    ]


def allowed(
    rules: "Any", devices: "Iterable[tuple[int, int]]", access: str = ACCESS
) -> "set[tuple[int, int]]":
    """Return which character devices linux.resources.devices allows all of ``access`` to.

    The last matching rule counts, separately for each letter of ``access``. Devices without a
    matching rule are denied; malformed rules are ignored.
    """
    exact: dict[tuple[float, float], list[tuple[int, dict[str, Any]]]] = {}
    wide = []
    for place, rule in enumerate(rules if isinstance(rules, list) else ()):
        if not isinstance(rule, dict) or rule.get("type") not in (None, "", "a", "c", "u"):
            continue
        major, minor = rule.get("major"), rule.get("minor")
        if major in _EVERY or minor in _EVERY:
            wide.append((place, rule))
        elif isinstance(major, int | float) and isinstance(minor, int | float):
            exact.setdefault((major, minor), []).append((place, rule))
    found = set()
    for pair in devices:
        about = [*exact.get(pair, ()), *(each for each in wide if _matches(each[1], *pair))]
        about.sort(key=_first)
        if _letters(about).issuperset(access):
            found.add(pair)
    return found


def openable(rules: "Any", devices: "set[tuple[int, int]]") -> "set[tuple[int, int]]":
    """Return which character devices linux.resources.devices allows to be opened in any mode.

    Drivers do almost everything with ioctl(2), which needs neither read nor write permission.
    """
    # protects: opened-anyhow
    return allowed(rules, devices, "r") | allowed(rules, devices, "w")


def _first(pair: "tuple[int, Any]") -> int:
    return pair[0]


def _matches(rule: "dict[str, Any]", major: int, minor: int) -> bool:
    return rule.get("major") in (*_EVERY, major) and rule.get("minor") in (*_EVERY, minor)


def _letters(rules: "Iterable[tuple[int, dict[str, Any]]]") -> set[str]:
    """Return the access that the rules of one device give when applied in order."""
    given: set[str] = set()
    for _, rule in rules:
        letters = rule.get("access")
        if rule.get("allow") is True:
            given.update(letters if isinstance(letters, str) else "")
        else:
            given.difference_update(letters if isinstance(letters, str) else "rwm")
    return given


def allow(
    process: int,
    devices: "Sequence[tuple[int, int]]",
    *,
    proc: str = "/proc",
    written: "Mapping[int, str] | None" = None,
) -> str:
    """Let the cgroup of a process read and write character devices (major, minor).

    ``process`` is a descriptor of /proc/PID, which can't refer to another process that gets the
    same PID later. Returns how: "v1" (devices.allow), "v2" (the attached programs were
    extended), or "none-needed:REASON". REASON is no-devices, no-cgroups (the kernel has none),
    shared (the process is in our own cgroup, so the container has none), no-program (a v2 cgroup
    without a device program allows all) or rootless (a user namespace can't restrict devices
    either). ``proc`` is the mount point of procfs; ``written`` is as for ``cgroup_of``. Raises
    CgroupError.
    """
    if not devices:
        return "none-needed:no-devices"
    version, folder = cgroup_of(process, proc, written)
    if not version:
        return f"none-needed:{folder}"
    try:
        if version == 1:
            for each in way_down(process, folder, written):
                _allow_v1(each, devices)
            return "v1"
        return "v2" if _allow_v2(folder, devices) else "none-needed:no-program"
    except OSError as error:
        if error.errno in DENIED and not in_first_user_namespace(proc):
            return "none-needed:rootless"
        raise CgroupError(
            f"the container's cgroup can't be given its devices: {error}",
            "Run the hook as root with CAP_SYS_ADMIN, or set no-cgroups = true "
            "and name the devices in the engine's own configuration",
        ) from error


def cgroup_of(
    process: int, proc: str, written: "Mapping[int, str] | None" = None
) -> tuple[int, str]:
    """Return the version and folder of a process' cgroup; 0 and the reason if it has none.

    ``written`` is the result of ``places`` when the process started. With it, that cgroup is
    returned; CgroupError if the process is no longer in or below it.
    """
    paths = _paths(_read("cgroup", process))  # protects: cgroup-by-process
    if not paths:
        return 0, "no-cgroups"
    if written:
        for version, path in written.items():
            if _below(paths.get(version, ""), path) is None:  # protects: written-cgroup
                raise CgroupError(
                    f"the container's first process is in the cgroup {shown(paths.get(version))}, "
                    f"but its devices were allowed in {shown(path)}",
                    "Stop the container and start it again",
                )
        paths = dict(written)
    version, folder = _find(paths, proc)
    if _paths(_read(f"{proc}/self/cgroup")).get(version) == paths[version]:
        return 0, "shared"
    return version, folder


def way_down(process: int, folder: str, written: "Mapping[int, str] | None" = None) -> list[str]:
    """Return a v1 cgroup's folder, and the folders from there down to the process' own cgroup.

    Each v1 cgroup has its own device list: permission in a parent doesn't extend to it, but
    removal in a parent does. Other child cgroups belong to nested containers. ``folder`` is the
    result of ``cgroup_of`` for ``written``.
    """
    found = [folder]
    if written and 1 in written:
        below = _below(_paths(_read("cgroup", process)).get(1, ""), written[1])
        for name in (below or "").split("/")[1:]:
            found.append(f"{found[-1]}/{name}")
    return found


def unified(
    process: int, proc: str = "/proc", written: "Mapping[int, str] | None" = None
) -> tuple[str, str]:
    """Return the mount point of cgroup v2, and the folder of a process' own cgroup in it.

    The arguments are those of ``cgroup_of``. CgroupError if it has no cgroup of its own there.
    """
    path = _paths(_read("cgroup", process)).get(2, "/")
    if written:
        if _below(path, written.get(2, "/")) is None:
            raise CgroupError(
                f"the container's first process is in the cgroup {shown(path)}, but was started "
                f"in {shown(written.get(2))}",
                "Stop the container and start it again",
            )
        path = written.get(2, "/")
    if path != "/" and path != _paths(_read(f"{proc}/self/cgroup")).get(2):  # protects: own-cgroup
        for root, mount_point in _mounts(2, proc):
            below = _below(path, root)
            if below and os.path.exists(f"{mount_point}{below}/cgroup.procs"):
                return mount_point, mount_point + below
    raise CgroupError(
        f"the container's process is in {shown(path)} there, which isn't a visible cgroup of its "
        "own",
        "Use an engine that makes a cgroup (v2) for each container, and run the hook on the host",
    )


def places(memberships: bytes) -> dict[int, str]:
    """Return the cgroups that may restrict a process, by version, for a record.

    Cgroups at or outside the root of our cgroup namespace are left out: they have other names
    elsewhere. ``memberships`` is /proc/PID/cgroup.
    """
    found = _paths(memberships)
    return {key: path for key, path in found.items() if path != "/" and path[:3] != "/.."}


def in_first_user_namespace(proc: str = "/proc") -> bool:
    """Tell whether we are in the host's initial user namespace, where root has all rights."""
    try:
        return os.stat(f"{proc}/self/ns/user").st_ino == USER_NS_INIT_INO
    except OSError:
        return True


def _read(path: str, folder: int | None = None) -> bytes:
    try:
        return host_proc.read(path, folder)
    except OSError as error:
        raise CgroupError(
            f"the container's cgroup can't be found: {error}",
            "Check that /proc is mounted and that the container's process still runs",
        ) from error


def _paths(memberships: bytes) -> dict[int, str]:
    """Return the paths of the cgroups that may restrict a process, by cgroup version.

    ``memberships`` is its /proc/PID/cgroup; paths are relative to the root of our cgroup
    namespace.
    """
    paths = {}
    for controllers, path in host_proc.cgroups(memberships).items():
        if "devices" in controllers.split(","):
            paths[1] = path
        elif not controllers:
            paths[2] = path
    return paths


def _find(paths: dict[int, str], proc: str) -> tuple[int, str]:
    """Return the version that restricts devices, and the cgroup's folder.

    Runtimes use v1 wherever the devices controller is mounted, and we see the same mounts.
    """
    for version, marker in ((1, "devices.allow"), (2, "cgroup.procs")):
        for root, mount_point in _mounts(version, proc) if version in paths else ():
            below = _below(paths[version], root)
            if below is not None and os.path.exists(f"{mount_point}{below}/{marker}"):
                return version, mount_point + below
    both = " or ".join(f"{path} (v{version})" for version, path in sorted(paths.items()))
    raise CgroupError(
        f"no mounted cgroup file system shows the container's cgroup {both}",
        "Mount cgroups where the hook runs, below /sys/fs/cgroup",
    )


def outermost(proc: str = "/proc") -> list[str]:
    """Return the files to write 0 to in order to move a process to its cgroups' roots.

    One for each completely mounted hierarchy. For v2, the cgroup of process 1 comes before the
    root: a root that is not the kernel's own may not hold processes. Source: cgroups(7).
    """
    first = _paths(_read(f"{proc}/1/cgroup")).get(2, "/").rstrip("/")
    found = []
    for mount in host_proc.Mounts(_read(f"{proc}/self/mountinfo")):
        if mount.kind in (b"cgroup", b"cgroup2") and mount.root == b"/":
            point = host_proc.unescaped(mount.point)
            if mount.kind == b"cgroup2" and not first.startswith("/.."):
                found.append(f"{point}{first}/cgroup.procs")  # protects: first-cgroup
            found.append(f"{point}/cgroup.procs")
    return found


def _below(path: str, root: str) -> str | None:
    """Return a cgroup's path relative to another, None if it isn't below that."""
    prefix = "" if root == "/" else root
    below = path[len(prefix) :].rstrip("/")
    # With ".." the cgroup is outside our cgroup namespace, and no mount leads there.
    if not path.startswith(prefix) or below[:1] not in ("", "/") or ".." in below.split("/"):
        return None
    return below


def _mounts(version: int, proc: str) -> list[tuple[str, str]]:
    """Return the root and the mount point of each mount that may hold the cgroup."""
    found = []
    for mount in host_proc.Mounts(_read(f"{proc}/self/mountinfo")):
        v1 = mount.kind == b"cgroup" and b"devices" in mount.options.split(b",")
        if v1 if version == 1 else mount.kind == b"cgroup2":
            found.append((host_proc.unescaped(mount.root), host_proc.unescaped(mount.point)))
    return found


def listed(folder: str) -> list[str]:
    """Return the lines of a v1 cgroup's devices.list; OSError if it can't be read."""
    return [os.fsdecode(line) for line in host_proc.lines(host_proc.read(f"{folder}/devices.list"))]


def _allow_v1(folder: str, devices: "Iterable[tuple[int, int]]") -> None:
    known = listed(folder)
    fd = os.open(f"{folder}/devices.allow", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for major, minor in devices:
            # A cgroup with exceptions also lists "a *:* rwm", so that proves nothing.
            if not {f"c {major}:{minor} rw", f"c {major}:{minor} rwm"}.intersection(known):
                # The kernel reads one rule per write.
                os.write(fd, f"c {major}:{minor} {ACCESS}".encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{folder}/devices.allow") from error
    finally:
        os.close(fd)


def _allow_v2(folder: str, devices: "Sequence[tuple[int, int]]") -> int:
    """Extend the device programs of the container's cgroup; return how many there were."""
    from gpuhook.base.cgroup import v2  # noqa: PLC0415 - only v2 needs ctypes

    return sum(v2.extend(path, devices) for path in with_policies(folder))


def with_policies(folder: str) -> list[str]:
    """Return the v2 cgroups whose device programs concern a container: crun has two."""
    parent, _, name = folder.rpartition("/")
    return [folder, parent] if name == CRUN_SUBGROUP and parent.endswith(".scope") else [folder]
