"""The process that publishes this node's devices, and its parent's end.

A child of the supervisor, because requests wait for a server and the supervisor must not. It reads
what is wanted from a pipe, a line of JSON, whenever it is woken; ``keeper`` does the rest. What was
written stays when it ends: a new instance takes it over as it is, and the kubelet removes it where
none comes within 30 s.
"""

import fcntl
import json
import os
import select
import time
from collections.abc import Sequence
from typing import Any, Protocol

from gpuhook.ground.errors import PluginError
from gpuhook.tools.dra.access import Access
from gpuhook.tools.dra.api_client import Client
from gpuhook.tools.dra.keeper import APART, TOGETHER, Keeper
from gpuhook.tools.host.child import Clock, Tell
from gpuhook.tools.host.fed import Fed
from gpuhook.tools.kubernetes.dra import COUNTERS_APART, OLDEST

Object = dict[str, Any]

_PIECE = 1 << 20
_TURN = 2.0  # seconds until we look again whether another instance has ended
_NAME = "gpuhook-publish"


class Described(Protocol):
    """What the node's devices are, with the taints of those that are unwell. Waits for nobody."""

    def objects(self, kubernetes: tuple[int, int]) -> Sequence[Object]:
        """Return what ``gpuhook dra --dry-run --kubernetes`` prints."""

    def drivers(self) -> Sequence[str]:
        """Return the names of all drivers that this node has, or had."""


class Publisher(Fed):
    """Has a child keep this node's ResourceSlices as ``devices`` describes them.

    ``lock`` is the path of a file, in a folder of root's that all instances of this node share:
    while two run, at an update, only the older one writes. Beside ``start``, ``stop`` and ``wake``
    the caller's loop calls ``tend``, at ``deadline``, and ``write`` when ``wants`` takes something.
    """

    def __init__(
        self,
        access: Access,
        node: str,
        devices: Described,
        tell: Tell,
        clock: Clock = time.monotonic,
        lock: str = "",
    ) -> None:
        self._devices = devices

        def serve(reader: int) -> int:
            return publish(reader, Client(access), node, tell, lock)

        super().__init__(serve, "What publishes devices", _NAME, tell, clock)

    def start(self) -> None:
        """Begin to publish."""
        self.wake()
        self.tend()

    def stop(self) -> None:
        """Publish no more, and leave the slices as they are."""
        self.end()

    def wake(self) -> None:
        """Publish what the devices are now."""
        self.give(line(self._devices))


def line(devices: Described) -> bytes:
    """Return what the child is told."""
    wanted = {
        form: [each for each in devices.objects(release) if each["kind"] == "ResourceSlice"]
        for form, release in ((APART, COUNTERS_APART), (TOGETHER, OLDEST))
    }
    told = {"wanted": wanted, "drivers": [*devices.drivers()]}
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"


def publish(reader: int, client: Client, node: str, tell: Tell, lock: str = "") -> int:
    """Publish what is read until there is nothing more to read; return the exit status."""
    keeper = Keeper(client, node, tell)
    turn = _Turn(lock)
    held = b""
    while True:
        may_write = turn.take()
        if may_write:
            keeper.tend()
        now = time.monotonic()
        end = keeper.deadline() if may_write else now + _TURN
        watch = keeper.watch() if may_write else None
        reading: list[Any] = [reader, watch] if watch is not None else [reader]
        patience = None if end is None else max(0.0, end - now)
        ready, _, _ = select.select(reading, [], [], patience)
        if reader not in ready:
            continue
        data = os.read(reader, _PIECE)
        if not data:
            return 0
        *lines, held = (held + data).split(b"\n")
        if lines:
            told = json.loads(lines[-1])
            keeper.want(told["wanted"], told["drivers"])


class _Turn:
    """Whether it is our turn to write: the file is locked until the instance before us ends."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        self._has = not path
        if path:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                self._fd = os.open(path, flags, 0o600)
            except OSError as error:
                raise PluginError(
                    f"{path} can't be opened: {error.strerror}", "Is its folder there, and root's?"
                ) from None

    def take(self) -> bool:
        """Tell whether it is ours, from now on or before."""
        if self._has:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # protects: one-publisher
        except BlockingIOError:
            return False
        self._has = True
        return True
