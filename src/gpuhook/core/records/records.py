"""Records of the devices of each container, written at injection: one small file each.

    STATE-DIR/containers/PID-STARTED[-PIDS]     only for root

PID is the container's first process and STARTED its start time, in ticks since the host's boot
(proc_pid_stat(5), field 22), so that a record never matches a later process of the same id. PIDS
is the number of the pid namespace in which PID is its id, left out for the host's initial one. A
record of an exited process is ignored, and later starts remove it. A process that can't see
whether it exited, from another pid namespace or because /proc hides it (hidepid), keeps the
record, and a lease remains valid. ``gpuhook repair`` restores the devices of the record, and not
those in a container's /dev, which the container can change.
"""

import errno
import os

from gpuhook.base.cgroup import access
from gpuhook.base.errors import HeldError
from gpuhook.base.host import proc
from gpuhook.base.oci import jsontext
from gpuhook.base.state_directory import StateDirectory, boot_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Self

    from gpuhook.base.oci.spec import ContainerState
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import Device, Inventory

FOLDER = "containers"
VERSION = 2

_MAX_BYTES = 1 << 20  # bytes of a record
_MAX_TEXT = 256  # characters of a name; Kubernetes' names have at most 253
_MAX_NAMES = 16  # requested names that are kept
_SWEPT = 4  # other records that are checked when one is written
CHANGES = "changes"  # the lock of changes of running containers
_OTHERS = ("lock", "choices", CHANGES)  # no records: ``leases`` and ``choice`` have the first
_NEW = "."  # before the name of a record that is being written (``StateDirectory.replace``)
_ENDED = (errno.ENOENT, errno.ESRCH)  # errors of /proc for an exited process

# An engine's names of a container, its image, its pod and the pod's namespace. containerd's CRI
# plugin (internal/cri/annotations) and CRI-O (internal/annotations) have annotations for them.
# Other annotations of a container may come from its pod's author, as CRI-O copies all.
_CONTAINERD_KEYS = {
    "container": "io.kubernetes.cri.container-name",
    "pod": "io.kubernetes.cri.sandbox-name",
    "namespace": "io.kubernetes.cri.sandbox-namespace",
    "uid": "io.kubernetes.cri.sandbox-uid",
    "image": "io.kubernetes.cri.image-name",
}
# CRI-O's are in the labels that the kubelet sets, as JSON in one annotation, except the image.
_LABEL_KEYS = {
    "container": "io.kubernetes.container.name",
    "pod": "io.kubernetes.pod.name",
    "namespace": "io.kubernetes.pod.namespace",
    "uid": "io.kubernetes.pod.uid",
}
_CRIO_LABELS = "io.kubernetes.cri-o.Labels"
_CRIO_IMAGE = "io.kubernetes.cri-o.ImageName"
_MANAGER = "io.container.manager"  # written by podman and CRI-O
_MANAGERS = {"libpod": "podman", "cri-o": "cri-o"}
# Keys and types of a record. Only root writes there, and not only with gpuhook.
_PAIRS = [(int, int)]
_FORM = {
    **dict.fromkeys(("id", "engine", "bundle", *_CONTAINERD_KEYS), str),
    **dict.fromkeys(("pid", "started"), int),
    "given": [
        {
            "vendor": str,
            "kind": str,
            "request": {"source": str, "devices": [str]},
            "selected": [str],
            "nodes": {str: _PAIRS},
            "devices": _PAIRS,
        }
    ],
}
_MAY = {
    "attached": [{"vendor": str, "device": str, "devices": _PAIRS, "places": [str], "lasts": bool}],
    "boot": str,
    "starting": bool,
    "cgroups": {str: str},
    "documents": [str],
    "limits": [{"vendor": str, "device": str, "id": str, "bytes": int}],
    "nodes": {str: {str: str}},
    "pids": int,
}
_VERSIONS = {"1", "2"}  # of cgroups
_SHIM_FOLDER = "/io.containerd.runtime.v2.task/"  # followed by containerd's namespace and the id
_CONTAINERD = {"moby": "docker", "k8s.io": "kubernetes"}


def describe(
    state: "ContainerState", annotations: "Any", grants: "Iterable[Grant]"
) -> "dict[str, Any]":
    """Return the record of a container: its identity, its request and its devices.

    ``annotations`` are those of config.json, of any shape.
    """
    annotations = annotations if isinstance(annotations, dict) else {}
    engine = engine_of(state.bundle, annotations)
    return {
        "version": VERSION,
        "id": state.container_id,
        "pid": state.pid,
        "engine": engine,
        "bundle": state.bundle,
        **_names(engine, annotations),
        "given": [_given(grant) for grant in grants],
    }


def _given(grant: "Grant") -> "dict[str, Any]":
    asked = list(grant.request.devices or ())[:_MAX_NAMES]
    found = given(grant.vendor.names, grant.inventory, grant.devices, grant.rules())
    return {**found, "request": {"source": grant.request.source, "devices": asked}}


def given(
    names: "Any", inventory: "Inventory", devices: "Iterable[Device]", rules: "Iterable[Any]"
) -> "dict[str, Any]":
    """Return a container's devices of one vendor: ``selected`` ones, and the ``nodes`` of each.

    Their parent devices are included, because they are given too.
    ``alone`` is the device of each node that no two devices of the host share, by "MAJOR:MINOR".
    ``names`` are the vendor's, ``rules`` the (major, minor) of all nodes that it may open.
    """
    devices = tuple(devices)
    numbers = {node.path: list(node.numbers) for node in inventory.nodes}
    wanted = {found for device in devices for found in (device.id, device.parent)}
    owners: dict[str, list[str]] = {}
    for device in inventory.devices:
        for path in device.nodes:
            owners.setdefault(path, []).append(device.id)
    return {
        "vendor": names.NAME,
        "kind": names.KIND,
        "request": {"source": "none", "devices": []},
        "selected": [device.id for device in devices],
        "nodes": {
            device.id: [numbers[path] for path in device.nodes if path in numbers]
            for device in inventory.devices
            if device.id in wanted
        },
        "alone": {
            f"{numbers[path][0]}:{numbers[path][1]}": ids[0]
            for path, ids in owners.items()
            if len(ids) == 1 and ids[0] in wanted and path in numbers
        },
        "devices": [list(pair) for pair in rules],
    }


def engine_of(bundle: str, annotations: "dict[str, Any]") -> str:
    """Return the engine's name, "" if it is unknown.

    The folder of the bundle comes first: no annotation of a pod changes that.
    """
    _, found, rest = bundle.partition(_SHIM_FOLDER)
    if found:  # protects: pod-annotation
        return _CONTAINERD.get(rest.partition("/")[0], "containerd")
    manager = annotations.get(_MANAGER)
    return _MANAGERS.get(manager, "") if isinstance(manager, str) else ""


def _names(engine: str, annotations: "dict[str, Any]") -> dict[str, str]:
    """Return the engine's names of the container, by the keys that it writes itself."""
    read: dict[str, Any] = {}
    if engine == "kubernetes":
        read = {name: annotations.get(key) for name, key in _CONTAINERD_KEYS.items()}
    elif engine == "cri-o":  # protects: engines-own-annotations
        labels = annotations.get(_CRIO_LABELS)
        if isinstance(labels, str) and len(labels) < _MAX_BYTES:
            read = _labels(labels)
        read["image"] = annotations.get(_CRIO_IMAGE)
    values = {name: read.get(name) for name in _CONTAINERD_KEYS}
    return {name: it[:_MAX_TEXT] if isinstance(it, str) else "" for name, it in values.items()}


def _labels(text: str) -> "dict[str, Any]":
    try:
        read = jsontext.loads(text)
    except ValueError:
        read = None
    found = read if isinstance(read, dict) else {}
    return {name: found.get(key) for name, key in _LABEL_KEYS.items()}


class RecordWriter:
    """A container's record, written for a block, and removed again if the block fails.

    ``process`` is a descriptor of /proc/PID, -1 if unknown: then no record is written. A failed
    write fails no container: without a record, ``gpuhook repair`` restores only the devices of
    config.json. With ``add``, an earlier record of the same container is kept.

    With devices of the kinds in ``exclusive`` the record is the container's lease (``leases``):
    HeldError if another container has one of them, or if it can't be written.
    """

    def __init__(
        self,
        state_dir: str,
        process: int,
        record: "dict[str, Any]",
        *,
        add: bool = False,
        exclusive: tuple[str, ...] = (),
    ) -> None:
        self._name = ""
        self._folder = open_records(state_dir, make=True) if process >= 0 else None
        try:
            if exclusive:
                self._take(process, record, add, exclusive)
            elif self._folder is not None:
                self._keep(self._folder, process, record, add)
        except BaseException:
            self._close()
            raise

    def _keep(
        self, folder: StateDirectory, process: int, record: "dict[str, Any]", add: bool
    ) -> None:
        try:
            self._write(folder, {**record, **now(process)}, add=add)
            _sweep(folder, record["pid"])
        except OSError:
            pass

    def _take(
        self, process: int, record: "dict[str, Any]", add: bool, exclusive: tuple[str, ...]
    ) -> None:
        from gpuhook.core.records import leases  # noqa: PLC0415 - few have exclusive devices

        device = leases.wants(record, exclusive)
        if self._folder is None:
            if device:
                unknown = "its first process is unknown" if process < 0 else ""
                raise _no_lease(device, unknown or "the folder of the records can't be used")
            return
        if not device:
            self._keep(self._folder, process, record, add)
            return
        try:
            with leases.lock(self._folder):
                lease = {**record, **now(process), "boot": boot_id()}
                found = read_folder(self._folder)  # protects: lease-every
                others = [each for each in found if not _same(each, lease)]
                leases.refuse(lease, others, exclusive)  # protects: lease-refused
                self._write(self._folder, lease, add=add)
        except OSError as error:
            raise _no_lease(device, str(error.strerror), error) from None

    def _write(self, folder: StateDirectory, record: "dict[str, Any]", *, add: bool) -> None:
        name = name_of(record)
        if add:
            try:
                record = _merged(_load(folder, name), record)
            except (FileNotFoundError, ValueError):  # none, or one to be replaced
                pass
        write(folder, record)
        self._name = name

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is not None and self._name and self._folder is not None:
            self._folder.remove(self._name)
        self._close()

    def _close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def write(folder: StateDirectory, record: "dict[str, Any]") -> None:
    """Write a record atomically; OSError on failure."""
    folder.replace(name_of(record), jsontext.dumps(record).encode())


def _same(one: "dict[str, Any]", other: "dict[str, Any]") -> bool:
    """Tell whether two records are of the same container, which may be starting in the first."""
    return name_of(one) == name_of(other) or is_start_of(one, other)


def is_start_of(starting: "dict[str, Any]", other: "dict[str, Any]") -> bool:
    """Tell whether a record is of the start of another record's container (``choice``)."""
    return (
        bool(starting.get("starting"))
        and starting["id"] == other["id"]
        and starting["bundle"] == os.path.realpath(other["bundle"])
    )


def name_of(record: "dict[str, Any]") -> str:
    """Return the file name of a record."""
    pids = _pids_of(record)
    name = f"{record.get('pid')}-{record.get('started')}"
    return name if pids == proc.FIRST_PIDS else f"{name}-{pids}"


def _pids_of(record: "dict[str, Any]") -> int:
    """Return the pid namespace of a record; earlier versions wrote none."""
    pids: int = record.get("pids", proc.FIRST_PIDS)
    return pids


def _merged(before: "dict[str, Any]", record: "dict[str, Any]") -> "dict[str, Any]":
    """Return a record that includes an earlier one of the same container."""
    by_vendor = {each["vendor"]: each for each in before["given"]}
    for each in record["given"]:
        old = by_vendor.get(each["vendor"])
        by_vendor[each["vendor"]] = each if old is None else added(old, each)
    documents = dict.fromkeys([*before.get("documents", ()), *record.get("documents", ())])
    nodes = {**before.get("nodes", {}), **record.get("nodes", {})}
    cgroups = {**before.get("cgroups", {}), **record["cgroups"]}
    return {
        **before,
        **record,
        "given": [*by_vendor.values()],
        "documents": [*documents],
        "nodes": nodes,
        "cgroups": cgroups,
    }


def added(old: "dict[str, Any]", new: "dict[str, Any]") -> "dict[str, Any]":
    """Return one vendor's devices of a container in two steps, with the request of ``new``."""
    selected = dict.fromkeys([*old["selected"], *new["selected"]])
    devices = [*old["devices"], *(each for each in new["devices"] if each not in old["devices"])]
    nodes = {**old["nodes"], **new["nodes"]}
    return {**new, "selected": [*selected], "nodes": nodes, "devices": devices}


def _no_lease(device: str, why: str, error: OSError | None = None) -> HeldError:
    remedy = "Set state-dir in [gpuhook] to a folder that only the user who runs gpuhook can use"
    if error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Make space on the filesystem of the state-dir, and start the container again"
    return HeldError(f"The record that the container has {device} can't be written: {why}", remedy)


def first_process(hook: str = "/proc/self") -> tuple[int, int]:
    """Return the process that started a hook in a container's namespaces: its first process.

    Returns its process id in the current /proc, and a descriptor of /proc/PID, which the
    caller closes; (0, -1) if it isn't in the hook's mount namespace, or may not be read.
    ``hook`` is the folder of the hook's process. Source: proc_pid_stat(5), field 4.
    """
    try:
        parent = int(proc.stat_fields(_read(f"{hook}/stat"))[1])
        process = os.open(f"/proc/{parent}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return 0, -1
    try:
        ours, theirs = os.stat(f"{hook}/ns/mnt"), os.stat("ns/mnt", dir_fd=process)
        if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
            return parent, process
    except OSError:
        pass
    os.close(process)
    return 0, -1


def name_of_process(process: int, pids: int | None = None) -> str:
    """Return a process's name in records, PID-STARTED[-PIDS]; OSError if it is gone.

    ``process`` is a descriptor of /proc/PID, ``pids`` an earlier result of ``proc.pids``, for
    callers that have another /proc by now.
    """
    pid = int(_read("stat", process).partition(b" ")[0])
    ours = proc.pids() if pids is None else pids
    return name_of({"pid": pid, "started": started(process), "pids": ours})


def started(process: int) -> int:
    """Return a process's start time, in ticks since the host's boot; OSError if it is gone.

    ``process`` is a descriptor of /proc/PID. Source: proc_pid_stat(5), field 22.
    """
    return _began(_read("stat", process))


def read_all(state_dir: str, unclear: "list[str] | None" = None) -> "list[dict[str, Any]]":
    """Return the records of running containers, and remove the others.

    Only root can read them; other users get none. Those of another pid namespace,
    where ids mean other processes, are left out. The names of invalid records, and of those in a
    format that this version doesn't know, are added to ``unclear``.
    """
    folder = open_records(state_dir, make=False)
    if folder is None:
        return []
    ours = proc.pids()
    with folder:
        found = read_folder(folder, [] if unclear is None else unclear)
        running = [each for each in found if not each.get("starting")]
        return [each for each in running if _pids_of(each) == ours]  # protects: other-pids


def read_every(state_dir: str, device: str) -> "list[dict[str, Any]]":
    """Return the records of every pid namespace, for a request of an exclusive device.

    HeldError where one can't be read.
    """
    folder = open_records(state_dir, make=False)
    if folder is None:
        return []
    try:
        with folder:
            return read_folder(folder)
    except OSError as error:
        raise _no_lease(device, str(error.strerror), error) from None


def are_unseen(state_dir: str) -> bool:
    """Tell whether there are records of containers whose processes this one can't see."""
    ours = proc.pids()
    if ours == proc.FIRST_PIDS:
        return False
    folder = open_records(state_dir, make=False)
    if folder is None:
        return False
    with folder:
        names = folder.names()
    names = [name for name in names if not name.startswith(_NEW) and name not in _OTHERS]
    return any(_parts(name)[2] != str(ours) for name in names)


def _parts(name: str) -> tuple[str, str, str]:
    """Return the process id, start time and pid namespace in a record's name."""
    pid, _, rest = name.removeprefix(_NEW).partition("-")
    began, _, pids = rest.partition("-")
    return pid, began, pids or str(proc.FIRST_PIDS)


def read_folder(
    folder: StateDirectory, unclear: "list[str] | None" = None
) -> "list[dict[str, Any]]":
    """Return the readable records.

    The names of invalid ones are added to ``unclear``. Without that argument, raises OSError or
    HeldError if a container's devices are unknown.
    """
    found, ours, seen = [], proc.pids(), set()
    names = folder.names()
    while names:
        seen.update(names)
        has_gone = False
        for name in names:
            if is_gone(name, ours):
                folder.remove(name)
                has_gone = True
            elif name not in _OTHERS and not name.startswith(_NEW):
                try:
                    found.append(_load(folder, name))
                except FileNotFoundError:
                    has_gone = True
                except OSError:
                    if unclear is None:
                        raise
                except ValueError:
                    if unclear is None:
                        raise _unclear(folder, name) from None
                    unclear.append(name)
        # The record of a start may have gone because its container has written its own since.
        names = [name for name in folder.names() if name not in seen] if has_gone else []
    return found


def _unclear(folder: StateDirectory, name: str) -> HeldError:
    return HeldError(
        f"It is unknown which devices process {_parts(name)[0]} has: {folder.path}/{name} is "
        "damaged, or from another version",
        "End that process, and remove that file if it stays",
    )


def _load(folder: StateDirectory, name: str) -> "dict[str, Any]":
    """Return a record; OSError, and ValueError for a format that this version doesn't know."""
    record = folder.load(name, _MAX_BYTES)
    known = isinstance(record, dict) and record.get("version") == VERSION
    if not known or not _is_sound(record) or name != name_of(record):
        raise ValueError(name)
    return record  # type: ignore[no-any-return]


def _is_sound(record: "dict[str, Any]") -> bool:
    """Tell whether all values of a record have the right types."""
    may = {key: form for key, form in _MAY.items() if key in record}
    return jsontext.has_form(record, {**_FORM, **may}) and _VERSIONS.issuperset(
        record.get("cgroups", ())
    )


def _sweep(folder: StateDirectory, start: int) -> None:
    """Remove some records of exited processes: in the long run, more than are written."""
    names, ours = folder.names(), proc.pids()
    for number in range(min(_SWEPT, len(names))):
        name = names[(start + number) % len(names)]
        if is_gone(name, ours):
            folder.remove(name)


def is_gone(name: str, ours: int | None = None) -> bool:
    """Tell whether the process of a record has exited, by the record's name PID-STARTED[-PIDS].

    ``ours`` is the current pid namespace, for callers that check many.

    One that can't be checked counts as running: the host may be out of memory, /proc may hide it,
    or it is in another pid namespace.
    """
    if name.removeprefix(_NEW) in _OTHERS:
        return False
    pid, began, pids = _parts(name)
    if not (pid.isdecimal() and began.isdecimal() and pids.isdecimal()):
        return True
    if int(pids) != (proc.pids() if ours is None else ours):
        return not _may_live(pid, int(began))  # protects: pids-unseen
    try:
        status = _read(f"/proc/{pid}/stat")
        return _began(status) != int(began) or _has_ended(status)  # protects: record-began
    except OSError as error:
        return error.errno in _ENDED and not _is_hidden(int(pid))  # protects: record-unseen


def _may_live(pid: str, began: int) -> bool:
    """Tell whether a process of another pid namespace may run, by its id there and its start time.

    A process in the initial one sees all processes, with their ids in each namespace below it.
    """
    entries = [entry for entry in os.listdir("/proc") if entry.isdecimal()]
    if proc.pids() != proc.FIRST_PIDS or "1" not in entries:  # or hidepid keeps others from us
        return True
    for entry in entries:
        try:
            status = _read(f"/proc/{entry}/stat")
            if _began(status) == began and not _has_ended(status):
                ids = proc.status(_read(f"/proc/{entry}/status")).get("NSpid", ())
                if pid in ids:
                    return True
        except OSError as error:
            if error.errno not in _ENDED:
                return True
    return False


def _is_hidden(pid: int) -> bool:
    """Tell whether /proc hides a process with this id (its option hidepid)."""
    if os.getpid() != int(os.readlink("/proc/self")):
        return False  # the kernel's ids differ from those in this /proc
    from gpuhook.base.host import signals  # noqa: PLC0415 - where /proc hides processes

    return pid > 0 and signals.exists(pid)  # protects: hidden-process


def _has_ended(status: bytes) -> bool:
    """Tell whether a process has exited, and wasn't waited for yet.

    One with other running threads has not: proc_pid_stat(5), fields 3 and 20.
    """
    fields = proc.stat_fields(status)
    return fields[0] in (b"Z", b"X") and int(fields[17]) <= 1


def now(process: int) -> "dict[str, Any]":
    """Return a process's start time, cgroups by version, and our pid namespace but the initial one.

    OSError if it is gone.
    """
    began = started(process)
    try:
        cgroups = access.places(proc.read("cgroup", process))
    except OSError:  # a kernel without cgroups
        cgroups = {}
    found = {"started": began, "cgroups": {str(key): path for key, path in cgroups.items()}}
    ours = proc.pids()
    return found if ours == proc.FIRST_PIDS else {**found, "pids": ours}


def cgroups_of(record: "dict[str, Any]") -> dict[int, str]:
    """Return the cgroups by version in which a container got its devices, as far as known."""
    found = record.get("cgroups", {})
    return {int(key): path for key, path in found.items()}


def _began(status: bytes) -> int:
    """Return field 22 of /proc/PID/stat; the second one, in brackets, may contain anything."""
    return int(proc.stat_fields(status)[19])


def _read(path: str, folder: int | None = None) -> bytes:
    return proc.read(path, folder, _MAX_BYTES)


def open_records(state_dir: str, *, make: bool) -> StateDirectory | None:
    """Open the folder of the records; None if another user could have written to it.

    A user of a rootless engine, who can't write to root's, has a separate one.
    """
    found = _open_in(state_dir, make=make)
    own = _users_folder() if found is None else ""
    return _open_in(own, make=make) if own else found


def _users_folder() -> str:
    """Return the folder of a user's own state, "" for root and if there is no such folder.

    In the user namespace of a rootless engine root is that user, whose id outside the map
    contains; user_namespaces(7).
    """
    user = os.geteuid()
    for inside, outside, size in proc.id_map(_read("/proc/self/uid_map")):
        if inside <= user < inside + size:
            folder = f"/run/user/{user - inside + outside}"
            return f"{folder}/gpuhook" if folder != "/run/user/0" and os.path.isdir(folder) else ""
    return ""


def _open_in(state_dir: str, *, make: bool) -> StateDirectory | None:
    parent = StateDirectory.open(state_dir)
    if parent is None and make:
        parent = StateDirectory.make(state_dir)
    if parent is None:
        return None
    try:
        with parent:
            return parent.folder(FOLDER, make=make)
    except OSError:
        return None
