"""Look at what a machine has without waiting for a driver: where one has to be asked, a child does.

To ask may take as long as nvml-timeout says, half a minute, and nothing else happens meanwhile: a
look waits for a moment, and then goes on with what was there before.
"""

import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from gpuhook.ground.config.model import Config
from gpuhook.ground.container import kernel
from gpuhook.ground.errors import DriverError, NoDriverError
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.cache import Loaded
from gpuhook.tools.kubernetes.machine import NotYet

_SPARE = 15.0  # seconds beyond the driver's own limit: others may be asking, too
_REAP = 0.5  # seconds that a killed child may take to end
_LIMIT = 64 << 20  # bytes of an answer

Clock = Callable[[], float]


class Inventories:
    """Does what ``inventory.cache.follow`` does, with a child for each vendor that is asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deadline = 0.0
        self._away = 0.0
        self._children: dict[str, _Child] = {}
        self._titles: dict[str, str] = {}

    def wait_for(self, seconds: float) -> None:
        """Let the calls from now on wait until so many seconds from now, all together."""
        self._deadline = self._clock() + seconds

    def follow(self, config: Config, vendor: Any, before: Loaded | None = None) -> Loaded:
        """Return what this machine has of a vendor now.

        Raises NotYet where that isn't known in time, and DriverError as ``cache.follow`` does.
        """
        name = vendor.names.NAME
        child = self._children.get(name)
        if child is None:
            found = before if before and before.is_fresh(config) else cache.load(config, vendor)
            if found is not None:
                return found
            now = self._clock()
            if now < self._away:
                raise NotYet
            child = _Child(config, vendor, now + config.nvml_timeout + _SPARE)
            self._children[name], self._titles[name] = child, vendor.names.TITLE
        answer = child.read(self._deadline, self._clock)
        if answer is None and self._clock() < child.end:
            raise NotYet
        del self._children[name]
        child.stop()
        return _loaded(vendor, answer or b"")

    def problems(self) -> list[str]:
        """Return a sentence on each vendor whose devices are being looked for."""
        return [
            f"{self._titles[name]}: the driver is being asked for its devices, which takes long"
            for name in self._children
        ]

    def let_go(self, seconds: float) -> None:
        """End the children, and start none for so long."""
        self._away = self._clock() + seconds
        while self._children:
            self._children.popitem()[1].stop()


class _Child:
    """A process that looks once; ``end`` is when it has to be done."""

    def __init__(self, config: Config, vendor: Any, end: float) -> None:
        self.end = end
        self._data = b""
        self._reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pid = os.fork()
        if self._pid == 0:
            _look(config, vendor, writer)
        os.close(writer)

    def read(self, deadline: float, clock: Clock) -> bytes | None:
        """Return all that it has said, None while it hasn't ended."""
        while True:
            try:
                piece = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                patience = deadline - clock()
                if patience <= 0:
                    return None
                select.select([self._reader], [], [], patience)
                continue
            self._data += piece
            if not piece or len(self._data) > _LIMIT:
                return self._data

    def stop(self) -> None:
        """End it, and wait a moment for that."""
        os.close(self._reader)
        os.kill(self._pid, signal.SIGKILL)
        kernel.reap(self._pid, _REAP)


def _look(config: Config, vendor: Any, writer: int) -> NoReturn:
    """Be the child."""
    status = 1
    try:
        kernel.die_with_parent()
        kernel.keep_only((writer,))
        kernel.set_name("gpuhook-look")
        os.set_blocking(writer, True)
        data = memoryview(json.dumps(_answer(config, vendor)).encode())
        while data:
            data = data[os.write(writer, data) :]
        status = 0
    finally:
        os._exit(status)


def _answer(config: Config, vendor: Any) -> dict[str, Any]:
    try:
        found = cache.follow(config, vendor)
    except DriverError as error:
        absent = isinstance(error, NoDriverError)
        return {"error": [error.cause, error.remedy], "absent": absent}
    return {"loaded": [found.inventory.to_json(), found.around, found.missing]}


def _loaded(vendor: Any, data: bytes) -> Loaded:
    try:
        answer = json.loads(data)
    except ValueError:
        raise DriverError(
            "The process that looks for devices didn't end well, or not in time",
            "See what gpuhook info says",
        ) from None
    if "error" in answer:
        raise (NoDriverError if answer["absent"] else DriverError)(*answer["error"])
    inventory, around, missing = answer["loaded"]
    return Loaded(vendor, vendor.inventory.from_json(inventory), around, missing)
