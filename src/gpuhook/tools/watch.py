"""Keep the saved inventory and CDI documents fresh, and a process ready for the next container.

The inventory is looked at whenever the kernel tells of a GPU, and regularly.

The kernel sends events when the driver is loaded and when GPUs come and go. It sends none
when MIG devices change, files are installed or settings are edited; that the inventory is
stale is then seen at the next regular look, which costs a few stat calls.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from pyroute2 import UeventSocket
from pyroute2.netlink.nlsocket import NetlinkSocket
from pyroute2.netlink.uevent import MarshalUevent

from gpuhook.ground.config.model import Config
from gpuhook.standby import place
from gpuhook.start import contract, dev_char
from gpuhook.start.inventory import cache
from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.ready import report_ready
from gpuhook.tools.vendors import survey
from gpuhook.tools.vendors.uevents import Event

_KERNEL = 0  # as a sender: its port (netlink(7))
_MOST = 1 << 16  # bytes of an event; the kernel has 2 KiB for its variables
_KERNEL_GROUP = 1  # not udev's: its messages have a binary head that old pyroute2 trips over
_SETTLE = 0.5  # seconds of quiet after an event: a driver is loaded in many steps


class Events:
    """The kernel's events about devices, as far as ``concerns`` says that they matter."""

    def __init__(self, concerns: Callable[[Event], bool]) -> None:
        """Begin to listen; OSError where this process may not."""
        self._concerns = concerns
        self._socket = UeventSocket()
        # Its own bind() takes no group in pyroute2 0.7.
        NetlinkSocket.bind(self._socket, groups=_KERNEL_GROUP)
        # What comes is read here: get() of pyroute2 0.9 takes in more than it returns, and of the
        # rest nobody hears who waits for the socket.
        self._raw = socket.socket(fileno=os.dup(self._socket.fileno()))
        self._raw.setblocking(False)
        self._marshal = MarshalUevent()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._raw.close()
        self._socket.close()

    def wait(self, seconds: float) -> bool:
        """Wait that long for an event that matters and the quiet after it; tell if one came."""
        end, came = time.monotonic() + seconds, False
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._raw], [], [], left)[0]:
                break
            if any(not event or self._concerns(event) for event in [*self._read()]):
                came, end = True, time.monotonic() + _SETTLE
        return came

    def _read(self) -> Iterator[Event]:
        """Yield the events that have come, an empty one for those that were lost."""
        while True:
            try:
                data, (sender, _) = self._raw.recvfrom(_MOST)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                yield {}
                continue
            if sender == _KERNEL:
                yield from self._marshal.parse(data)


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
        """Make a new inventory of each vendor whose saved one is stale; tell what is news.

        One that comes back as it was isn't stale, and a start may have made a new one already.
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
        # Several may say the same, of a disk that is full for instance.
        for problem in dict.fromkeys(self._problems.values()):
            if problem not in before[1].values():
                self._tell(problem)
        return (self._seen, self._problems) != before

    def _inventory(self, vendor: contract.Vendor) -> Inventory:
        """Return a vendor's inventory, the saved one if that is fresh."""
        saved = cache.saved(self._config, vendor)
        return cache.refresh(self._config, vendor) if saved is None else saved

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
