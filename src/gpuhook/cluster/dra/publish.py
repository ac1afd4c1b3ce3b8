"""The publisher of this node's devices.

It is a thread of the server, because its requests wait for the API server and must not block
anything else; a separate process would take 5 MiB more. It receives the desired slices whenever
they change; ``slice_reconciler`` does the rest. Written slices stay when it exits: a new instance
takes them over unchanged, and the kubelet removes them if none starts within 30 s.
"""

import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Protocol, Self

from gpuhook.base.errors import GpuhookError, PluginError
from gpuhook.base.state_directory import StateDirectory, StateLock
from gpuhook.cluster.dra.access import Access
from gpuhook.cluster.dra.api_client import ApiClient
from gpuhook.cluster.dra.slice_reconciler import APART, TOGETHER, SliceReconciler
from gpuhook.cluster.dra.slices import COUNTERS_APART, OLDEST
from gpuhook.monitor.host.child import BackOff, Clock, Tell

Object = dict[str, Any]

_PIECE = 1 << 12
_TURN = 2.0  # seconds between checks whether another instance has exited
_PAUSES = (1.0, 30.0)  # seconds until a restart after a failure: the first pause, the longest
_LIVED = 60.0  # seconds after which a failure counts as the first one


class NodeDevices(Protocol):
    """The node's devices, with the taints of unhealthy ones. Its methods never block."""

    def objects(self, kubernetes: tuple[int, int]) -> Sequence[Object]:
        """Return the objects that ``gpuhook dra --dry-run --kubernetes`` prints."""

    def drivers(self) -> Sequence[str]:
        """Return the names of all drivers that this node has, or had."""


def wanted(devices: NodeDevices) -> dict[str, Any]:
    """Return the input of a publisher, as JSON values."""
    slices = {
        form: [each for each in devices.objects(release) if each["kind"] == "ResourceSlice"]
        for form, release in ((APART, COUNTERS_APART), (TOGETHER, OLDEST))
    }
    return {"wanted": slices, "drivers": [*devices.drivers()]}


class Publisher:
    """A thread that keeps this node's ResourceSlices as desired.

    It is created in the supervisor, which has no threads, and started in the server. ``lock`` is
    the path of a file, in a root-owned folder that all instances of this node share: while two run,
    during an update, only the older one writes. ``tell`` gets a sentence for each notice.
    """

    def __init__(
        self,
        access: Access,
        node: str,
        tell: Tell,
        clock: Clock = time.monotonic,
        lock: str = "",
    ) -> None:
        self._access = access
        self._node = node
        self._tell = tell
        self._clock = clock
        self._lock = lock
        self._told: Mapping[str, Any] = {}
        self._reader = self._writer = -1

    def start(self) -> None:
        """Start to publish."""
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # It may still wait for a server when everything else has ended, and nothing waits for it.
        threading.Thread(target=self._run, name="gpuhook-publish", daemon=True).start()

    def stop(self) -> None:
        """Stop after the current write; leave the slices unchanged."""
        writer, self._writer = self._writer, -1  # its number may soon be reused
        if writer >= 0:
            os.close(writer)

    def want(self, told: Mapping[str, Any]) -> None:
        """Publish the value that ``wanted`` returned; never blocks."""
        self._told = told
        if self._writer >= 0:
            with suppress(BlockingIOError):  # a wake-up is already pending
                os.write(self._writer, b"\0")

    def _run(self) -> None:
        """Publish until stopped, with retries after failures."""
        back_off, said = BackOff(*_PAUSES), ""
        while True:
            began = self._clock()
            try:
                self._publish()
            except GpuhookError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001 - nothing else logs a thread's errors
                why = f"The publisher failed: {type(error).__name__}: {error}"
            else:
                return
            if why != said:
                self._tell(why)
            said = why
            if self._clock() - began >= _LIVED:
                back_off.reset()
            time.sleep(back_off.grow())

    def _publish(self) -> None:
        keeper = SliceReconciler(ApiClient(self._access), self._node, self._tell, self._clock)
        with _LeaderLock(self._lock) as turn, closing(keeper):
            while True:
                may_write = turn.take()
                if may_write:
                    keeper.tend()
                now = self._clock()
                end = keeper.deadline() if may_write else now + _TURN
                watch = keeper.watch() if may_write else None
                reading: list[Any] = [self._reader, *([] if watch is None else [watch])]
                patience = None if end is None else max(0.0, end - now)
                ready, _, _ = select.select(reading, [], [], patience)
                if self._reader in ready and not os.read(self._reader, _PIECE):
                    return
                if self._told:
                    keeper.want(self._told["wanted"], self._told["drivers"])


class _LeaderLock:
    """The lock for writing: the file is locked until the previous instance exits."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held: StateLock | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.close()

    def take(self) -> bool:
        """Tell whether we hold the lock, now or already; PluginError if it can't be made."""
        if self._held is not None or not self._path:
            return True
        folder, name = os.path.split(self._path)
        try:
            with StateDirectory.opened(folder) as opened:
                self._held = opened.lock(name)  # protects: one-publisher
        except TimeoutError:
            return False
        except OSError as error:
            raise PluginError(
                f"{self._path} can't be opened: {error.strerror}",
                "Check that its folder exists and belongs to root",
            ) from None
        return True
