"""Mounts of an MPS client, and its reservation among the clients.

A reservation is a file in the state folder, named by its place (c00, c01, ...). It contains the
process, as in the records, and the devices. It is valid while that process exists: first the one
that prepares the container, then the container's own. So nothing needs to be cleaned up. With
MPS version 3 a place is a namespace, whose folder no other container has.
"""

import os
import stat

from gpuhook.base.container.rootfs import PATH_FLAGS
from gpuhook.base.errors import DriverError, HeldError
from gpuhook.base.host import proc
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core.plan.operations import _Bind
from gpuhook.core.records import records
from gpuhook.vendors.nvidia import mps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.base.container.changes import ContainerRootfs
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.core.contract import Grant
    from gpuhook.core.plan.operations import Operation

_SHM = "/dev/shm"  # noqa: S108 - of the container
# Sockets work in a read-only folder; no process can put another one in their place.
_PIPE_OPTIONS = ("ro", "nosuid", "nodev", "noexec")  # protects: mps-read-only
_SHM_OPTIONS = ("nosuid", "nodev", "noexec")
_LOCK = "lock"
_WAIT = 20.0  # seconds to wait for others; each needs a moment
_MAX_BYTES = 1 << 14  # bytes of a reservation
_DIGITS = 2  # of a place


def operations(grant: "Grant") -> "list[Operation]":
    """Return the mounts of a client; none if its devices aren't shared."""
    if not mps.is_shared(grant):
        return []
    state_dir = mps.MpsRequest(*grant.request.options.mps).state_dir
    state = mps.read(state_dir)
    if state is None:
        raise DriverError("The state of gpuhook mps is gone", mps.START)
    labels = {device.id: device.label for device in grant.devices}
    reason = f"GPU {', '.join(labels.values())} is shared by MPS"
    pipe = BindPipe(state_dir, state, labels, reason)
    if state.version >= 3:
        return [pipe]
    shm = f"{state_dir}/{mps.FOLDER}/{mps.SHM}"
    return [pipe, BindOwn(shm, _SHM, _SHM_OPTIONS, f"{reason}, and its server uses it")]


class BindOwn(_Bind):
    """Mount of a folder that ``gpuhook mps`` has made, below one that only root can change."""

    kind = "bind"

    def __init__(self, path: str, destination: str, options: tuple[str, ...], reason: str) -> None:
        super().__init__("/", path, destination, options, reason)

    def is_usable(self, host: "Rootfs") -> bool:  # noqa: ARG002 - ``check`` asks the daemon
        """Return True: a missing folder fails the container."""
        return True

    def _opened(self, host: "Rootfs") -> int:
        above, _, name = self.path.rpartition("/")
        parent = host.open_own(above)  # protects: mps-folder
        try:
            return os.open(name, PATH_FLAGS | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=parent)
        finally:
            os.close(parent)

    def check(self, status: os.stat_result) -> None:
        """Accept only a folder of root."""
        if status.st_uid not in (0, os.geteuid()) or not stat.S_ISDIR(status.st_mode):
            raise DriverError(f"{self.source} isn't a folder that root owns", mps.START)

    def describe(self) -> str:
        """Describe the mount and its options."""
        return f"mount {self.source} on {self.destination} ({','.join(self.options)})"


class BindPipe(BindOwn):
    """Mount of the folder where MPS listens to this container, with a reserved place."""

    def __init__(
        self, state_dir: str, state: mps.MpsState, labels: dict[str, str], reason: str
    ) -> None:
        self._base = f"{state_dir}/{mps.FOLDER}"
        self._state = state
        self._labels = labels
        self._claims: StateDirectory | None = None
        self._place = ""
        self._pids = 0
        own = "/NAMESPACE" if state.version >= 3 else ""
        super().__init__(f"{self._base}/{mps.PIPE}{own}", mps.PLACE, _PIPE_OPTIONS, reason)

    def prepare(self, host: "Rootfs") -> None:
        """Reserve a place, and clone its folder; HeldError if all places are taken."""
        path = f"{self._base}/{mps.CLAIMS}"
        above = host.open_own(path)  # protects: mps-claims-folder
        try:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
        finally:
            os.close(above)
        self._claims = StateDirectory(fd, path)
        number = self._claim(self._claims)
        if self._state.version >= 3:
            self.path = self.source = f"{self._base}/{mps.PIPE}/{self._state.places[number]}"
        super().prepare(host)

    def _claim(self, folder: StateDirectory) -> int:
        """Return the number of our reserved place."""
        try:
            lock = folder.lock(_LOCK, _WAIT)
        except TimeoutError:
            raise HeldError(
                f"Another process has locked {folder.path}/{_LOCK}",
                "End that process (`lslocks` names it), and start the container again",
            ) from None
        with lock:
            taken = claims(folder, sweep=True)
            self._refuse(taken)
            number = next(each for each in range(len(taken) + 1) if _name(each) not in taken)
            places = self._state.places
            if self._state.version >= 3 and number >= len(places):
                raise HeldError(
                    f"All {len(places)} places of MPS are taken, some by containers from before "
                    "the last change of [gpuhook.mps]",
                    "Restart those containers (`gpuhook mps status` shows who has a place)",
                )
            self._place = _name(number)
            self._pids = proc.pids()  # before /proc is the container's
            self._write(_own_name(), folder)
            return number

    def _refuse(self, taken: dict[str, tuple[str, list[str]]]) -> None:
        """Raise HeldError if a device already has its maximum number of containers."""
        for uuid, label in self._labels.items():
            has = sum(uuid in devices for _, devices in taken.values())
            if has >= self._state.clients:  # protects: mps-most-clients
                raise HeldError(
                    f"GPU {label} is shared by {has} containers, as many as gpuhook.mps.clients "
                    "in config.toml allows",
                    "Stop one of them (`gpuhook mps status` shows them), or request another GPU",
                )

    def _write(self, process: str, folder: StateDirectory) -> None:
        folder.replace(self._place, " ".join((process, *self._labels)).encode())

    def execute(self, container: "ContainerRootfs") -> None:
        """Mount the folder, and transfer the reservation to the container."""
        super().execute(container)
        if self._claims is not None:
            self._write(records.name_of_process(container.process, self._pids), self._claims)
        self._place = ""

    def close(self) -> None:
        """Close the clone, and remove a reservation without a container."""
        super().close()
        if self._claims is not None:
            if self._place:
                self._claims.remove(self._place)
            self._claims.close()
            self._claims, self._place = None, ""


def claims(folder: StateDirectory, *, sweep: bool = False) -> dict[str, tuple[str, list[str]]]:
    """Return the valid reservations, by place: the process of each, and its devices.

    With ``sweep``, only for the lock's holder, those of ended processes are removed.
    """
    found = {}
    for name in folder.names():
        if name == _LOCK or name.startswith("."):
            continue
        process, *devices = _read(name, folder)
        if records.is_gone(process):  # protects: mps-claim
            # The process may have transferred it to its container before it ended.
            process, *devices = _read(name, folder)
            if records.is_gone(process):
                if sweep:
                    folder.remove(name)
                continue
        found[name] = (process, devices)
    return found


def _read(name: str, folder: StateDirectory) -> list[str]:
    """Return the words of a reservation, none if it is gone or damaged."""
    try:
        return folder.read(name, _MAX_BYTES).decode(errors="replace").split(" ")
    except (FileNotFoundError, ValueError):
        return [""]


def _name(number: int) -> str:
    return f"c{number:0{_DIGITS}}"


def _own_name() -> str:
    """Return this process' name in the records."""
    fd = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return records.name_of_process(fd)
    finally:
        os.close(fd)
