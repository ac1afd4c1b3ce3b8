"""Inventories of the host without blocking on drivers: a child queries them where necessary.

A query may take up to nvml-timeout, half a minute. A poll waits for a moment, and then continues
with the previous inventory.
"""

import select
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.container import kernel
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.cache import LoadedInventory
from gpuhook.monitor.host.child import Channel, Clock, JsonLineWorker
from gpuhook.monitor.machine import InventoryPending

_SPARE = 15.0  # seconds beyond the driver's own limit: other processes may be querying, too
_MAX_BYTES = 64 << 20  # bytes of a response


class Inventories:
    """A non-blocking ``inventory.cache.follow``, with a child for each vendor to query."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deadline = 0.0
        self._away = 0.0
        self._children: dict[str, _InventoryWorker] = {}
        self._titles: dict[str, str] = {}

    def wait_for(self, seconds: float) -> None:
        """Limit the waiting of all following calls together to ``seconds`` from now."""
        self._deadline = self._clock() + seconds

    def follow(
        self, config: Config, vendor: Any, before: LoadedInventory | None = None
    ) -> LoadedInventory:
        """Return the current inventory of a vendor.

        Raises InventoryPending if that isn't known in time, and DriverError as ``cache.follow``
        does.
        """
        name = vendor.names.NAME
        child = self._children.get(name)
        if child is None:
            found = before if before and before.is_fresh(config) else cache.load(config, vendor)
            if found is not None:
                return found
            if self._clock() < self._away:
                raise InventoryPending
            child = _InventoryWorker(config, vendor, self._clock)
            self._children[name], self._titles[name] = child, vendor.names.TITLE
        answer = child.read(self._deadline)
        if answer is None and self._clock() < child.end:
            raise InventoryPending
        del self._children[name]
        child.stop()
        return _loaded(vendor, answer or {})

    def problems(self) -> list[str]:
        """Return a sentence for each vendor whose driver is being queried."""
        return [
            f"{self._titles[name]}: the driver is being queried for its devices, which takes long"
            for name in self._children
        ]

    def let_go(self, seconds: float) -> None:
        """Stop the children, and start none for ``seconds``."""
        self._away = self._clock() + seconds
        while self._children:
            self._children.popitem()[1].stop()


class _InventoryWorker(JsonLineWorker):
    """A process that queries a driver once; ``end`` is its deadline."""

    def __init__(self, config: Config, vendor: Any, clock: Clock) -> None:
        super().__init__(clock, _MAX_BYTES)
        self.end = clock() + config.nvml_timeout + _SPARE
        self._begin(lambda talk: _look(config, vendor, talk))

    def read(self, deadline: float) -> dict[str, Any] | None:
        """Return its result, {} if it ended without one, None while it is running."""
        while True:
            for line in self.lines():
                return line
            if self._fd < 0:
                return {}
            patience = deadline - self._clock()
            if patience <= 0:
                return None
            select.select([self._fd], [], [], patience)

    def stop(self) -> None:
        """Stop it, and wait a moment for its end."""
        self._end()


def _look(config: Config, vendor: Any, talk: Channel) -> None:
    """Run as the child."""
    kernel.set_name("gpuhook-look")
    talk.say(_answer(config, vendor))


def _answer(config: Config, vendor: Any) -> dict[str, Any]:
    try:
        found = cache.follow(config, vendor)
    except DriverError as error:
        absent = isinstance(error, NoDriverError)
        return {"error": [error.cause, error.remedy], "absent": absent}
    facts = [found.cache_key, found.missing, found.watched]
    return {"loaded": [found.inventory.to_json(), *facts]}


def _loaded(vendor: Any, answer: dict[str, Any]) -> LoadedInventory:
    if not answer:
        raise DriverError(
            "The process that looks for devices failed, or didn't end in time",
            "Check the output of gpuhook info",
        )
    if isinstance(answer.get("error"), str):
        raise DriverError(
            f"The process that looks for devices failed: {answer['error']}",
            "Check the output of gpuhook info",
        )
    if "error" in answer:
        raise (NoDriverError if answer["absent"] else DriverError)(*answer["error"])
    inventory, *facts = answer["loaded"]
    return LoadedInventory(vendor, vendor.inventory.from_json(inventory), *facts)
