"""A running container whose devices are changed: its first process, record, cgroup and scope."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from gpuhook.base.cgroup import access
from gpuhook.base.config.model import Config
from gpuhook.base.errors import ContainerError, GpuhookError
from gpuhook.base.host import proc
from gpuhook.base.oci.spec import ContainerState, Spec
from gpuhook.base.state_directory import StateDirectory, boot_id
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import leases, records
from gpuhook.monitor.containers import attached, cgroup_check, live, open_nodes
from gpuhook.monitor.containers.nodes import Numbers
from gpuhook.monitor.host import systemctl
from gpuhook.monitor.host.namespaces import NamespaceScan, mounts_of

_SCOPE = ".scope"  # suffix of systemd's cgroups for processes that others started
_USERS_SECONDS = 10.0  # to examine the processes of the host

Record = dict[str, Any]
Change = Callable[[Record, list[Record]], Record]


class AttachTarget:
    """A running container with its current record; ContainerError if it has exited.

    To be used in a with block, in which ``process`` is a descriptor of /proc/PID. One process at a
    time is in such a block (``attached.one_at_a_time``).
    """

    def __init__(
        self,
        container: str,
        first: live.FirstProcess,
        spec: Spec,
        inventories: Collection[Inventory],
        config: Config,
    ) -> None:
        self.id = container
        self.first = first
        self.spec = spec
        self.inventories = {each.vendor: each for each in inventories}
        self._config = config
        self.process = -1
        self.written: dict[int, str] = {}
        self._new: Record = {}
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            with self._folder() as folder:
                opened.enter_context(attached.one_at_a_time(folder))
            self._open(opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._opened.close()

    def _open(self, opened: contextlib.ExitStack) -> None:
        try:
            self.process = os.open(f"/proc/{self.first.pid}", os.O_PATH | os.O_CLOEXEC)
            opened.callback(os.close, self.process)
            now = records.now(self.process)
        except OSError:
            now = {}
        if now.get("started") != self.first.started:
            raise ContainerError(f"The first process of {self.id} has exited", "Start it again")
        state = ContainerState(self.id, self.first.pid, self.spec.bundle, None)
        described = records.describe(state, self.spec.data.get("annotations"), [])
        self._new = {**described, **now, "boot": boot_id()}
        before = self.record()
        self.written = records.cgroups_of(before) if before is not self._new else {}
        if not self.written:
            cgroups = {key: self._own_part(path) for key, path in now["cgroups"].items()}
            self._new["cgroups"] = cgroups
            self.written = records.cgroups_of(self._new)

    def _own_part(self, path: str) -> str:
        """Return the part of a cgroup's path up to the one that is named after the container."""
        parts = path.split("/")
        named = [number for number, part in enumerate(parts) if self._is_own(part)]
        if not named:  # protects: attach-cgroup
            raise ContainerError(
                f"The cgroup of the first process of {self.id} isn't named after it",
                "Stop the container and start it with the devices",
            )
        end = named[0] + 1
        is_crun = parts[end : end + 1] == [access.CRUN_SUBGROUP]
        return "/".join(parts[: end + is_crun])

    def _is_own(self, name: str) -> bool:
        """Tell whether a cgroup is named after the container: docker-ID.scope, libpod-ID, ID."""
        name = name.removesuffix(_SCOPE)
        return name == self.id or name.endswith(f"-{self.id}")

    # Its record --------------------------------------------------------------------------

    def record(self) -> Record:
        """Return its record, an empty one if it has none."""
        with self._folder() as folder:
            return self._read(folder)

    def change(self, change: Change) -> None:
        """Replace its record by the result of ``change``, which gets it, and all others."""
        with self._folder() as folder, leases.lock(folder):
            every = records.read_folder(folder, None if self._config.exclusive else [])
            old = self._read(folder)
            others = [
                each
                for each in every
                if records.name_of(each) != records.name_of(old)
                and not records.is_start_of(each, old)
            ]
            record = change(old, others)
            if record["given"] or record.get("documents") or record.get("nodes"):
                records.write(folder, record)
            else:
                folder.remove(records.name_of(record))

    def _read(self, folder: StateDirectory) -> Record:
        name = records.name_of(self._new)
        every = records.read_folder(folder, [])
        return next((each for each in every if records.name_of(each) == name), self._new)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[StateDirectory]:
        folder = records.open_records(self._config.state_dir, make=True)
        if folder is None:
            raise ContainerError(
                "The folder of the records can't be used",
                "Set state-dir in [gpuhook] to a folder that only root can use",
            )
        try:
            with folder:
                yield folder
        except OSError as error:
            raise ContainerError(
                f"The record of {self.id} can't be used: {error.strerror}",
                "Check the filesystem of the state-dir",
            ) from None

    # Its cgroup --------------------------------------------------------------------------

    def denied(self, pairs: Iterable[Numbers]) -> list[Numbers]:
        """Return those of these nodes that its cgroup denies."""
        return cgroup_check.missing(self.process, sorted(pairs), written=self.written)

    def allow(self, pairs: Sequence[Numbers]) -> bool:
        """Allow nodes in its cgroup, and in its scope; return whether systemd knows them then."""
        rules = [f"{each} rw" for each in map(_place, pairs)]
        lasts = not pairs or self._tell_systemd(rules)
        access.allow(self.process, pairs, written=self.written)
        self._restore()
        return lasts

    def deny(self, pairs: Sequence[Numbers]) -> bool:
        """Deny nodes in its cgroup; return False if there are none, or it restricts no devices."""
        return bool(pairs) and live.deny(self.process, pairs, self.written)

    def forget(self, pairs: Sequence[Numbers]) -> None:
        """Remove nodes that are denied, and in no record, from the rules of its scope."""
        listed = systemctl.lines("show", "--property=DeviceAllow", "--value", self._scope())
        places = {*map(_place, pairs)}
        left = [line for line in listed if line.partition(" ")[0] not in places]
        if len(left) < len(listed):
            self._tell_systemd(["", *left])
            self._restore()

    def _restore(self) -> None:
        """Allow the nodes of its record that systemd has removed."""
        given = {(one, two) for each in self.record()["given"] for one, two in each["devices"]}
        with contextlib.suppress(GpuhookError):
            access.allow(self.process, self.denied(given), written=self.written)

    def _scope(self) -> str:
        for path in self.written.values():
            name = path.removesuffix(f"/{access.CRUN_SUBGROUP}").rpartition("/")[2]
            if name.endswith(_SCOPE) and self._is_own(name):  # protects: attach-scope
                return name
        return ""

    def _tell_systemd(self, rules: Iterable[str]) -> bool:
        """Set DeviceAllow of its scope; True if that lasts, or systemd didn't make its cgroup."""
        scope, words = self._scope(), [f"DeviceAllow={rule}" for rule in rules]
        return not scope or systemctl.call("set-property", "--runtime", scope, *words)

    def users(self, nodes: Mapping[Numbers, str]) -> list[open_nodes.NodeUser]:
        """Return the processes in its cgroup, and below, that have nodes open."""
        look, version = NamespaceScan(_USERS_SECONDS), 1 if 1 in self.written else 2
        own, mounts = f"{self.written.get(version, '')}/", mounts_of(self.first.pid)
        pids = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            theirs = access.places(proc.data_of(f"/proc/{name}/cgroup")).get(version, "")
            if mounts_of(name) == mounts or (own != "/" and f"{theirs}/".startswith(own)):
                pids.append(name)
        found = open_nodes.users(nodes, look, pids) if pids else []
        if not look.is_whole:
            raise ContainerError(f"The processes of {self.id} can't be examined", "Try again")
        return found


def _place(pair: Numbers) -> str:
    """Return the name by which systemd knows a node."""
    return f"/dev/char/{pair[0]}:{pair[1]}"
