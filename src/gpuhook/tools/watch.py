"""Watcher that keeps the saved inventory and CDI specs current, and a prefork server running.

It checks the inventory after the kernel's events about GPUs, and regularly.

The kernel sends events when the driver is loaded, and when GPUs are added or removed. It sends
none when MIG devices change, files are installed or settings are edited. The next regular check
detects these changes; it costs a few stat calls.
"""

import os
import select
import time
from collections.abc import Callable
from typing import Self

from gpuhook.base.config.model import Config
from gpuhook.core import contract, dev_char
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.followed import FollowedConfig, report_ready
from gpuhook.monitor.host.uevents import Event, KernelEvents, listen
from gpuhook.monitor.vendors import survey
from gpuhook.prefork import instance

_SETTLE = 0.5  # seconds of quiet after an event: a driver is loaded in many steps
_LONGEST = 10.0  # seconds after the first event for which to wait for quiet


class DeviceEvents:
    """The kernel's events about devices, filtered by ``concerns``."""

    def __init__(self, concerns: Callable[[Event], bool]) -> None:
        """Start listening; OSError if this process isn't allowed to."""
        self._concerns = concerns
        self._events = KernelEvents(listen())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._events.close()

    def wait(self, seconds: float) -> bool:
        """Wait for a relevant event and the quiet after it; tell whether there was one.

        The wait for quiet is limited: a driver may be loaded and fail again and again.
        """
        end, latest, came = time.monotonic() + seconds, 0.0, False
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._events], [], [], left)[0]:
                break
            if any(not event or self._concerns(event) for event in [*self._events.read()]):
                now = time.monotonic()
                latest = latest or now + _LONGEST
                came, end = True, min(now + _SETTLE, latest)  # protects: events-end
        return came


class HostWatcher:
    """The watcher of a host; ``tell`` gets a sentence about each change.

    ``launcher`` is the path of gpu-py. ``documents`` is called at first and after every change. It
    updates CDI specs, and returns False if that has to be tried again.
    """

    def __init__(
        self,
        config: Config,
        launcher: str,
        tell: Callable[[str], None],
        documents: Callable[[], bool],
        followed: FollowedConfig | None = None,
    ) -> None:
        self._followed = followed
        self._config = config
        self._launcher = launcher
        self._tell = tell
        self._documents = documents
        self._seen: dict[str, Inventory] = {}  # by vendor
        self._problems: dict[str, str] = {}  # by vendor
        self._standing: int | None = None
        self._cannot_stand = ""  # why no prefork server is running

    def refresh(self) -> bool:
        """Renew each vendor's inventory if the saved one is stale; report changes.

        An unchanged inventory isn't stale, and a start may have made a new one already.
        """
        before = self._seen, self._problems
        self._seen, absent, failed = survey.examine(self._config, self._inventory)
        for name, inventory in self._seen.items():
            if inventory != before[0].get(name):
                dev_char.make_links(inventory.nodes, inventory.root)
                self._tell(inventory.sentence())
        known = before[0].keys() | before[1].keys()
        wrong = failed | {name: error for name, error in absent.items() if name in known}
        if not self._seen and not wrong:
            wrong = dict([*absent.items()][:1])
        self._problems = {name: str(error) for name, error in wrong.items()}
        # Several vendors may have the same problem, for instance a full disk.
        for problem in dict.fromkeys(self._problems.values()):
            if problem not in before[1].values():
                self._tell(problem)
        return (self._seen, self._problems) != before

    def _inventory(self, vendor: contract.Vendor) -> Inventory:
        """Return a vendor's inventory, the saved one if that is current."""
        saved = cache.saved(self._config, vendor)
        return cache.refresh(self._config, vendor) if saved is None else saved

    def stand(self) -> None:
        """Start a prefork server if none is running; report a failure once."""
        if self._standing is not None and os.waitpid(self._standing, os.WNOHANG)[0] == 0:
            return
        self._standing, wrong = None, ""
        try:
            self._standing = instance.start(self._config, self._launcher)
        except OSError as error:
            wrong = f"The prefork server can't be started: {error}"
        if wrong and wrong != self._cannot_stand:
            self._tell(wrong)
        self._cannot_stand = wrong

    def run(self, events: DeviceEvents, interval: float) -> None:
        """Check after every event, and every ``interval`` seconds; never returns."""
        is_due = True
        while True:
            if self._followed is not None and self._followed.has_changed(self._tell):
                self._config, is_due = self._followed.config, True  # protects: watch-settings
            # CDI specs come first: at boot, engines wait until all of this was done once.
            if self.refresh() or is_due:
                is_due = not self._documents()
            self.stand()
            report_ready()
            events.wait(interval)
