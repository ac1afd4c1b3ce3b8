"""Limits that [gpuhook.containers] raises for containers with devices: memlock, stack, /dev/shm.

gpu-py writes them into config.json. Hooks only resize /dev/shm, because the low-level runtime sets
the process's limits after them. A limit is never lowered, and /dev/shm is only changed if it is an
engine's default: a tmpfs of 64 MiB (podman: 65,536,000 bytes).

Sources: OCI runtime specification, config.md (process.rlimits, mounts); tmpfs(5), getrlimit(2);
Docker (daemon/oci_linux.go), containerd (pkg/oci/mounts.go and the CRI's sandbox), podman, CRI-O:
their own tmpfs is named shm.
"""

import os
import resource
from os.path import normpath

from gpuhook.base import log, names
from gpuhook.base.container import kernel
from gpuhook.base.host import proc
from gpuhook.base.sizes import amount, parse_size
from gpuhook.core.plan.operations import Operation
from gpuhook.core.spec_devices import SYSTEM, numbers, objects

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.changes import ContainerRootfs
    from gpuhook.base.oci.spec import Spec
    from gpuhook.core.contract import VendorRegistry

SECTION = "[gpuhook.containers]"
UNLIMITED = "unlimited"
_INFINITY = (1 << 64) - 1  # RLIM_INFINITY, as config.json has it
_SHM, _TMPFS = "/dev/shm", "tmpfs"  # noqa: S108 - a place in the container
DEFAULTS = (64 << 20, 65_536_000)  # bytes of /dev/shm: Docker's, containerd's, CRI-O's; podman's
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}  # of tmpfs' option size
_CAP_SYS_RESOURCE = 24
# Attribute of Config -> the rlimit's name in config.json, and its number.
_RLIMITS = {
    "memlock": ("RLIMIT_MEMLOCK", resource.RLIMIT_MEMLOCK),
    "stack": ("RLIMIT_STACK", resource.RLIMIT_STACK),
}


class RaiseResourceLimit(Operation):
    """A limit of the container that is raised: ``limit`` is its name, ``value`` the new one."""

    kind = "raise-limit"
    shown = ("kind", "limit", "value", "reason")

    def __init__(self, limit: str, value: int, key: str, setting: str) -> None:
        super().__init__(f"{key} in {SECTION} is {setting}")
        self.limit = limit
        self.value = UNLIMITED if value >= _INFINITY else amount(value)
        self.bytes = value

    @property
    def by_hook(self) -> bool:
        """True if a hook can do it where gpu-py doesn't run."""
        return self.limit == _SHM

    def describe(self) -> str:
        """Return the limit and its value."""
        return f"raise {self.limit} to {self.value}"


def changes(spec: "Spec", config: "Config") -> "list[RaiseResourceLimit]":
    """Return the limits that are raised for a container with devices."""
    return [op for op, _ in _changes(spec, config)]


def apply(spec: "Spec", config: "Config") -> "Spec":
    """Return a spec with the raised limits; an engine's own tmpfs is resized on the host."""
    for op, change in _changes(spec, config):
        if isinstance(change, dict):
            spec = spec.put(_merged(spec, change))
        elif (why := _resize(change, op.bytes)) is not None:
            log.warn(names.RUNTIME, [f"{change} can't be resized: {why}"], config)
    return spec


def resize_shared_memory(
    container: "ContainerRootfs", data: "dict[str, Any]", config: "Config", program: str
) -> None:
    """Resize a container's /dev/shm while it is being created; ``data`` is its config.json.

    A failure is a warning of ``program``: the container works with less.
    """
    wanted = _of_memory(data, config.shm_size)
    if wanted <= max(DEFAULTS):
        return
    try:
        fd = container.open(_SHM)
    except OSError:
        return  # it has none
    try:
        if _is_engines(fd, proc.read("mountinfo", container.process)):
            kernel.resize_tmpfs(fd, wanted, _SHM)
    except OSError as error:
        log.warn(program, [f"{_SHM} can't be resized: {error.strerror}"], config)
    finally:
        os.close(fd)


def _merged(spec: "Spec", change: "dict[str, Any]") -> "dict[tuple[str, ...], Any]":
    if "mounts" in change:
        place, mount = change["mounts"]
        mounts = [*spec.data["mounts"]]
        mounts[place] = mount
        return {("mounts",): mounts}
    process = spec.data.get("process")
    old = process.get("rlimits") if isinstance(process, dict) else None
    kind = change["type"]
    kept = [
        each
        for each in (old if isinstance(old, list) else ())
        if not (isinstance(each, dict) and each.get("type") == kind)
    ]
    return {("process", "rlimits"): [*kept, change]}


def has_devices(spec: "Spec", vendors: "VendorRegistry") -> bool:
    """Tell whether an engine has given a container devices by a CDI spec.

    Such specs set a vendor's variable to void.
    """
    process = spec.data.get("process")
    env = process.get("env") if isinstance(process, dict) else None
    void = [f"{each.VOID}=void" for each in vendors.values() if each.VOID]
    if not any(entry in void for entry in (env if isinstance(env, list) else ())):
        return False
    return any(major not in SYSTEM for major, _ in numbers(spec.data))


def of_pod(present: "Mapping[str, str]", config: "Config") -> "list[dict[str, Any]]":
    """Return the limits to raise for a pod's container, as in config.json.

    ``present`` are the soft limits that its engine sets, by name. Without one, the engine's own
    applies, which isn't known here: then only no limit at all is more in any case.
    """
    found = []
    for key, (kind, _) in _RLIMITS.items():
        wanted = _wanted(getattr(config, key)) if getattr(config, key) else 0
        soft = int(present.get(kind, _INFINITY - 1))
        if soft < wanted:
            found.append({"type": kind, "hard": wanted, "soft": wanted})
    return found


def _changes(
    spec: "Spec", config: "Config"
) -> "list[tuple[RaiseResourceLimit, dict[str, Any] | str]]":
    """Return what is raised, each with the new entry of config.json, or a path to resize."""
    found: list[tuple[RaiseResourceLimit, dict[str, Any] | str]] = []
    for key, (kind, number) in _RLIMITS.items():
        setting = getattr(config, key)
        if setting:
            entry = _rlimit(spec.data, kind, number, _wanted(setting))
            if entry is not None:
                found.append((RaiseResourceLimit(kind, entry["soft"], key, setting), entry))
    if config.shm_size:
        change = _shm(spec.data, _of_memory(spec.data, config.shm_size))
        if change is not None:
            size = _of_memory(spec.data, config.shm_size)
            found.append((RaiseResourceLimit(_SHM, size, "shm-size", config.shm_size), change))
    return found


def _wanted(setting: str) -> int:
    size = None if setting == UNLIMITED else parse_size(setting)
    return size.number if size is not None else _INFINITY


def _rlimit(data: "dict[str, Any]", kind: str, number: int, wanted: int) -> "dict[str, Any] | None":
    """Return the new entry for a limit of the process, None if it has as much already.

    Without an entry, it has the limits of the engine, which are about those of this process. Where
    limits can't be raised (rootless), the hard limit is the most.
    """
    process = data.get("process")
    old = process.get("rlimits") if isinstance(process, dict) else None
    soft, hard = (_unsigned(each) for each in resource.getrlimit(number))
    if not _may_raise():
        wanted = min(wanted, hard)
    for each in objects(old):
        if each.get("type") == kind:
            soft, hard = (_number(each.get(key)) for key in ("soft", "hard"))
    if soft >= wanted:
        return None
    return {"type": kind, "hard": max(hard, wanted), "soft": wanted}


def _unsigned(value: int) -> int:
    return _INFINITY if value == resource.RLIM_INFINITY else value


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _may_raise() -> bool:
    """Tell whether the low-level runtime may raise hard limits (CAP_SYS_RESOURCE)."""
    for line in proc.lines(proc.read("/proc/self/status")):
        if line.startswith(b"CapEff:"):
            return bool(int(proc.words(line)[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return False


def _of_memory(data: "dict[str, Any]", setting: str) -> int:
    """Return a size in bytes; percents are of the container's memory, else of the host's."""
    size = parse_size(setting)
    node: Any = data
    for key in ("linux", "resources", "memory", "limit"):
        node = node.get(key) if isinstance(node, dict) else None
    limit = _number(node)
    memory = limit if limit > 0 else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return size.of(memory) if size is not None else 0


def _shm(data: "dict[str, Any]", wanted: int) -> "dict[str, Any] | str | None":
    """Return the new mount of /dev/shm with its index, or the host's path of the tmpfs there.

    None if it isn't an engine's default, or is as large already.
    """
    mounts = data.get("mounts")
    every = [*enumerate(mounts if isinstance(mounts, list) else ())]
    there = [(at, each) for at, each in every if isinstance(each, dict) and _is_shm(each)]
    if len(there) != 1 or wanted <= max(DEFAULTS):
        return None
    [(place, mount)] = there
    options = mount.get("options")
    words = [word for word in options if isinstance(word, str)] if isinstance(options, list) else []
    if "bind" in words or "rbind" in words:
        source = mount.get("source")
        is_default = isinstance(source, str) and source.startswith("/") and _is_default(source)
        return source if is_default and isinstance(source, str) else None
    sizes = [word for word in words if word.startswith("size=")]
    if mount.get("type") != _TMPFS or [*map(_size, sizes)] not in [[size] for size in DEFAULTS]:
        return None
    changed = [f"size={wanted}" if word in sizes else word for word in words]
    return {"mounts": (place, {**mount, "options": changed})}


def _is_shm(mount: "dict[str, Any]") -> bool:
    place = mount.get("destination")
    return isinstance(place, str) and normpath(place) == _SHM


def _size(option: str) -> int:
    """Return the bytes of a tmpfs' option size, 0 if it isn't plain."""
    text = option.partition("=")[2].lower()
    digits = text.rstrip("kmg")
    plain = digits.isascii() and digits.isdecimal() and text[len(digits) :] in _UNITS
    return int(digits) << _UNITS[text[len(digits) :]] if plain and len(digits) < 19 else 0


def _is_default(source: str) -> bool:
    fd = _opened(source)
    if fd is not None:
        os.close(fd)
    return fd is not None


def _opened(source: str) -> int | None:
    """Return a descriptor of an engine's tmpfs for /dev/shm; None for any other folder."""
    try:
        fd = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if _is_engines(fd, proc.read("/proc/self/mountinfo")):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _is_engines(fd: int, table: bytes) -> bool:
    """Tell whether a descriptor is an engine's tmpfs for /dev/shm, by its mount table; OSError."""
    status = os.fstatvfs(fd)
    mount = proc.Mounts(table).find(b"%d" % kernel.mount_id(fd))
    # protects: shm-of-engines
    return (
        mount is not None
        and (mount.kind, mount.source, mount.root) == (b"tmpfs", b"shm", b"/")
        and status.f_blocks * status.f_frsize in DEFAULTS
    )


def _resize(source: str, size: int) -> str | None:
    """Resize an engine's tmpfs; return why that failed."""
    fd = _opened(source)
    if fd is None:
        return "it has changed"
    try:
        kernel.resize_tmpfs(fd, size, source)
    except OSError as error:
        return error.strerror
    finally:
        os.close(fd)
    return None
