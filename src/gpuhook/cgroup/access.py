"""Give a container access to exact character devices: in its OCI spec or in its live cgroup.

Sources: the OCI runtime specification (config-linux.md, allowed device list),
Documentation/admin-guide/cgroup-v1/devices.rst, cgroups(7), cgroup_namespaces(7), proc(5).
"""

import errno
import os

from gpuhook.errors import CgroupError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

ACCESS = "rw"
DENIED = (errno.EPERM, errno.EACCES)

# include/uapi/linux/nsfs.h: the first user namespace has this inode everywhere.
USER_NS_INIT_INO = 0xEFFFFFFD

# crun makes this folder below the systemd scope that holds the container's device policy.
CRUN_SUBGROUP = "container"


def device_rules(devices: "Iterable[tuple[int, int]]") -> "list[dict[str, Any]]":
    """Return rules for linux.resources.devices that allow the devices (major, minor)."""
    return [
        {"allow": True, "type": "c", "major": major, "minor": minor, "access": ACCESS}
        for major, minor in devices
    ]


def spec_allows(rules: "Any", major: int, minor: int, access: str = ACCESS) -> bool:
    """Whether linux.resources.devices allows all of ``access`` to a character device.

    Of the rules that match, the last one counts, for each letter of ``access`` alone. What
    no rule allows counts as denied, and a rule that isn't well formed as absent.
    """
    allowed: set[str] = set()
    for rule in rules if isinstance(rules, list) else ():
        if not isinstance(rule, dict) or not _matches(rule, major, minor):
            continue
        letters = rule.get("access")
        if rule.get("allow") is True:
            allowed.update(letters if isinstance(letters, str) else "")
        else:
            allowed.difference_update(letters if isinstance(letters, str) else "rwm")
    return allowed.issuperset(access)


def _matches(rule: "dict[str, Any]", major: int, minor: int) -> bool:
    if rule.get("type") not in (None, "", "a", "c", "u"):
        return False
    return rule.get("major") in (None, -1, major) and rule.get("minor") in (None, -1, minor)


def allow(process: int, devices: "Sequence[tuple[int, int]]", *, proc: str = "/proc") -> str:
    """Let the cgroup of a process read and write character devices (major, minor).

    ``process`` is a descriptor of /proc/PID: once that process has ended, it leads nowhere,
    whoever has its number by then. Returns how: "v1" (devices.allow), "v2" (the attached
    programs were extended), or "none-needed:REASON" with a REASON of no-devices, no-cgroups
    (the kernel has none), shared (the process is in our own cgroup, so the container was
    given none), no-program (a v2 cgroup without a device program allows all) or rootless (a
    user namespace can't restrict devices either). ``proc`` is where procfs is mounted.
    Raises CgroupError.
    """
    if not devices:
        return "none-needed:no-devices"
    version, folder = cgroup_of(process, proc)
    if not version:
        return f"none-needed:{folder}"
    try:
        if version == 1:
            _allow_v1(folder, devices)
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


def cgroup_of(process: int, proc: str) -> tuple[int, str]:
    """Return the version and the folder of a process' cgroup; 0 and why where it has none."""
    paths = _paths(_read("cgroup", process))
    if not paths:
        return 0, "no-cgroups"
    version, folder = _find(paths, proc)
    if _paths(_read(f"{proc}/self/cgroup")).get(version) == paths[version]:
        return 0, "shared"
    return version, folder


def in_first_user_namespace(proc: str = "/proc") -> bool:
    """Tell whether we are in the host's own user namespace, where root is root."""
    try:
        return os.stat(f"{proc}/self/ns/user").st_ino == USER_NS_INIT_INO
    except OSError:
        return True


def _read(path: str, folder: int | None = None) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, "rb", buffering=0) as file:
            return file.readall()
    except OSError as error:
        raise CgroupError(
            f"the container's cgroup can't be found: {error}",
            "Check that /proc is mounted and that the container's process still runs",
        ) from error


def _paths(memberships: bytes) -> dict[int, str]:
    """Return the paths of the cgroups that may restrict a process, by cgroup version.

    ``memberships`` is its /proc/PID/cgroup; the paths count from the root of our cgroup
    namespace.
    """
    paths = {}
    for line in memberships.splitlines():
        _number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if b"devices" in controllers.split(b","):
            paths[1] = os.fsdecode(path)
        elif not controllers:
            paths[2] = os.fsdecode(path)
    return paths


def _find(paths: dict[int, str], proc: str) -> tuple[int, str]:
    """Return the version that restricts devices, and the cgroup's folder.

    A runtime uses v1 wherever the devices controller is mounted, and we see what it sees.
    """
    for version, marker in ((1, "devices.allow"), (2, "cgroup.procs")):
        for root, mount_point in _mounts(version, proc) if version in paths else ():
            below = _below(paths[version], root)
            if below is not None and os.path.exists(f"{mount_point}{below}/{marker}"):
                return version, mount_point + below
    listed = " or ".join(f"{path} (v{version})" for version, path in sorted(paths.items()))
    raise CgroupError(
        f"no mounted cgroup file system shows the container's cgroup {listed}",
        "Mount cgroups where the hook runs, below /sys/fs/cgroup",
    )


def outermost(proc: str = "/proc") -> list[str]:
    """Return the files that a process writes 0 to in order to leave its cgroups for the root.

    One of each hierarchy that is mounted whole. Source: cgroups(7).
    """
    found = []
    for line in _read(f"{proc}/self/mountinfo").splitlines():
        left, _, right = line.partition(b" - ")
        fields = left.split(b" ")
        if right.startswith((b"cgroup ", b"cgroup2 ")) and fields[3] == b"/":
            found.append(f"{_unescape(fields[4])}/cgroup.procs")
    return found


def _below(path: str, root: str) -> str | None:
    """Return where a cgroup is below the mount of another, None if it isn't."""
    prefix = "" if root == "/" else root
    below = path[len(prefix) :].rstrip("/")
    # With ".." the cgroup lies outside our cgroup namespace, and no mount leads there.
    if not path.startswith(prefix) or below[:1] not in ("", "/") or ".." in below.split("/"):
        return None
    return below


def _mounts(version: int, proc: str) -> list[tuple[str, str]]:
    """Return the root and the mount point of each mount that may hold the cgroup."""
    found = []
    for line in _read(f"{proc}/self/mountinfo").splitlines():
        left, _, right = line.partition(b" - ")
        fields, kind = left.split(b" "), right.split(b" ")
        if len(fields) < 6 or len(kind) < 3:
            continue
        v1 = kind[0] == b"cgroup" and b"devices" in kind[2].split(b",")
        if v1 if version == 1 else kind[0] == b"cgroup2":
            found.append((_unescape(fields[3]), _unescape(fields[4])))
    return found


def _unescape(field: bytes) -> str:
    r"""Undo mountinfo's \ooo for blanks, tabs, newlines and backslashes (proc(5))."""
    first, *rest = field.split(b"\\")
    return os.fsdecode(first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest))


def _allow_v1(folder: str, devices: "Iterable[tuple[int, int]]") -> None:
    with open(f"{folder}/devices.list", encoding="utf-8") as file:
        listed = file.read().splitlines()
    fd = os.open(f"{folder}/devices.allow", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for major, minor in devices:
            # "a *:* rwm" is also what a cgroup with exceptions lists, so it proves nothing.
            if not {f"c {major}:{minor} rw", f"c {major}:{minor} rwm"}.intersection(listed):
                # The kernel reads one rule from a write.
                os.write(fd, f"c {major}:{minor} {ACCESS}".encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{folder}/devices.allow") from error
    finally:
        os.close(fd)


def _allow_v2(folder: str, devices: "Sequence[tuple[int, int]]") -> int:
    """Extend the device programs of the container's cgroup; return how many there were."""
    from gpuhook.cgroup import v2  # noqa: PLC0415 - only v2 pays for ctypes

    return sum(v2.extend(path, devices) for path in with_policies(folder))


def with_policies(folder: str) -> list[str]:
    """Return the v2 cgroups whose device programs are about a container: crun has two."""
    parent, _, name = folder.rpartition("/")
    return [folder, parent] if name == CRUN_SUBGROUP and parent.endswith(".scope") else [folder]
