"""Look at what a machine has without waiting for a driver: where one has to be asked, a child does.

To ask may take as long as nvml-timeout says, half a minute, and nothing else happens meanwhile: a
look waits for a moment, and then goes on with what was there before.
"""

import select
from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.ground.container import kernel
from gpuhook.ground.errors import DriverError, NoDriverError
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.cache import Loaded
from gpuhook.tools.host.child import Clock, Talk, Talking
from gpuhook.tools.kubernetes.machine import NotYet

_SPARE = 15.0  # seconds beyond the driver's own limit: others may be asking, too
_LIMIT = 64 << 20  # bytes of an answer


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
            if self._clock() < self._away:
                raise NotYet
            child = _Child(config, vendor, self._clock)
            self._children[name], self._titles[name] = child, vendor.names.TITLE
        answer = child.read(self._deadline)
        if answer is None and self._clock() < child.end:
            raise NotYet
        del self._children[name]
        child.stop()
        return _loaded(vendor, answer or {})

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


class _Child(Talking):
    """A process that looks once; ``end`` is when it has to be done."""

    def __init__(self, config: Config, vendor: Any, clock: Clock) -> None:
        super().__init__(clock, _LIMIT)
        self.end = clock() + config.nvml_timeout + _SPARE
        self._begin(lambda talk: _look(config, vendor, talk))

    def read(self, deadline: float) -> dict[str, Any] | None:
        """Return what it has found, {} where it ended without; None while it looks."""
        while True:
            for line in self._lines():
                return line
            if self._fd < 0:
                return {}
            patience = deadline - self._clock()
            if patience <= 0:
                return None
            select.select([self._fd], [], [], patience)

    def stop(self) -> None:
        """End it, and wait a moment for that."""
        self._end()


def _look(config: Config, vendor: Any, talk: Talk) -> None:
    """Be the child."""
    kernel.set_name("gpuhook-look")
    talk.say(_answer(config, vendor))


def _answer(config: Config, vendor: Any) -> dict[str, Any]:
    try:
        found = cache.follow(config, vendor)
    except DriverError as error:
        absent = isinstance(error, NoDriverError)
        return {"error": [error.cause, error.remedy], "absent": absent}
    facts = [found.around, found.missing, found.watched]
    return {"loaded": [found.inventory.to_json(), *facts]}


def _loaded(vendor: Any, answer: dict[str, Any]) -> Loaded:
    if not answer:
        raise DriverError(
            "The process that looks for devices didn't end well, or not in time",
            "See what gpuhook info says",
        )
    if isinstance(answer.get("error"), str):
        raise DriverError(
            f"The process that looks for devices failed: {answer['error']}",
            "See what gpuhook info says",
        )
    if "error" in answer:
        raise (NoDriverError if answer["absent"] else DriverError)(*answer["error"])
    inventory, *facts = answer["loaded"]
    return Loaded(vendor, vendor.inventory.from_json(inventory), *facts)
