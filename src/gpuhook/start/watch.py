"""Keep the saved inventory and CDI documents fresh, and a process ready for the next container.

The inventory is looked at whenever the kernel tells of a GPU, and regularly.

The kernel sends events when the driver is loaded and when GPUs come and go. It sends none
when MIG devices change, files are installed or settings are edited; that the inventory is
stale is then seen at the next regular look, which costs a few stat calls.
"""

import os
import select
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gpuhook.cgroup import dev_char
from gpuhook.config import Config
from gpuhook.host.uevents import KernelEvents
from gpuhook.inventory import cache
from gpuhook.inventory.model import Inventory
from gpuhook.start import place
from gpuhook.start.ready import report_ready
from gpuhook.vendors import seam
from gpuhook.vendors.uevents import Event

_SETTLE = 0.5  # seconds of quiet after an event: a driver is loaded in many steps


class Events:
    """The kernel's events about devices, as far as ``concerns`` says that they matter."""

    def __init__(self, concerns: Callable[[Event], bool]) -> None:
        """Begin to listen; OSError where this process may not."""
        self._concerns = concerns
        self._kernel = KernelEvents()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kernel.close()

    def wait(self, seconds: float) -> bool:
        """Wait that long for an event that matters and the quiet after it; tell if one came."""
        end, came = time.monotonic() + seconds, False
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._kernel], [], [], left)[0]:
                break
            if any(not event or self._concerns(event) for event in [*self._kernel.read()]):
                came, end = True, time.monotonic() + _SETTLE
        return came


class Watch:
    """One machine being watched; ``tell`` is given a sentence for whatever happens.

    ``launcher`` is the path of gpu-py. ``documents`` is called at first and after every change;
    it brings CDI documents in line, and returns whether that was done or is to be tried again.
    """

    def __init__(
        self,
        config: Config,
        launcher: str,
        tell: Callable[[str], None],
        documents: Callable[[], bool],
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._tell = tell
        self._documents = documents
        self._seen: dict[str, Inventory] = {}  # by vendor
        self._problems: dict[str, str] = {}  # by vendor
        self._standing: int | None = None

    def look(self) -> bool:
        """Make a new inventory of each vendor whose saved one is stale; tell if one is news."""
        before = self._seen, self._problems
        self._seen, absent, failed = seam.examine(self._config, self._inventory)
        known = before[0].keys() | before[1].keys()
        wrong = failed | {name: error for name, error in absent.items() if name in known}
        if not self._seen and not wrong:
            wrong = dict([*absent.items()][:1])
        self._problems = {name: str(error) for name, error in wrong.items()}
        # Several may say the same, of a disk that is full for instance.
        for problem in dict.fromkeys(self._problems.values()):
            if problem not in before[1].values():
                self._tell(problem)
        return (self._seen, self._problems) != before

    def _inventory(self, vendor: seam.Vendor) -> Inventory:
        """Return a vendor's inventory; a container's start may have made it again already."""
        inventory = cache.saved(self._config, vendor)
        if inventory is None:
            inventory = cache.refresh(self._config, vendor)
            dev_char.make_links(inventory.nodes, inventory.root)
            self._tell(inventory.sentence())
        return inventory

    def stand(self) -> None:
        """See that a process stands ready, this one's child or another."""
        if self._standing is not None and os.waitpid(self._standing, os.WNOHANG)[0] == 0:
            return
        self._standing = place.start(self._config, self._launcher)

    def run(self, events: Events, interval: float) -> None:
        """Look after every event, and every ``interval`` seconds; for ever."""
        is_due = True
        while True:
            # Documents come first: at boot, engines wait until all of this was done once.
            if self.look() or is_due:
                is_due = not self._documents()
            self.stand()
            report_ready()
            events.wait(interval)
