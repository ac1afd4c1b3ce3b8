"""Which devices can be given away: when one that was unwell counts as well again.

Pure: the time is passed in, and nothing is looked at.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_MEMORY = 3600.0  # seconds after which an old trouble makes a new one no worse
_MOST_DOUBLINGS = 4


@dataclass
class _Trouble:
    """Why a device is unwell, when that was last heard, and for how long it must be quiet."""

    reason: str
    heard: float
    quiet: float


class Health:
    """Which devices are unwell, each with the reason; all others are well.

    A device gets well when it has been quiet for ``recovery`` seconds and answers then, or at
    once when it was reset. One that falls ill again within an hour has to be quiet twice as long
    each time, up to 16 times, and a reset doesn't shorten that. With ``recovery`` 0 only a reset
    helps. ``clock`` returns seconds.
    """

    def __init__(self, recovery: float, clock: Callable[[], float]) -> None:
        self._recovery = recovery
        self._clock = clock
        self._troubles: dict[str, _Trouble] = {}
        self._falls: dict[str, list[float]] = {}  # when each device fell ill, the last hour's

    def reasons(self) -> dict[str, str]:
        """Return why devices are unwell, by their ids."""
        return {device: trouble.reason for device, trouble in self._troubles.items()}

    def ill(self, device: str, reason: str) -> bool:
        """Note a device's trouble; tell whether that is news."""
        now = self._clock()
        known = self._troubles.get(device)
        if known is not None:
            known.heard = now
            return False
        falls = [at for at in self._falls.get(device, ()) if now - at < _MEMORY]
        quiet = self._recovery * 2 ** min(len(falls), _MOST_DOUBLINGS)
        self._falls[device] = [*falls[-_MOST_DOUBLINGS:], now]
        self._troubles[device] = _Trouble(reason, now, quiet)
        return True

    def due(self) -> float | None:
        """Return when the next device has been quiet for long enough, None if none is waiting."""
        times = [each.heard + each.quiet for each in self._troubles.values() if each.quiet > 0]
        return min(times, default=None)

    def asked(self, answering: Iterable[str]) -> list[str]:
        """Note which devices answered just now; return those that are well again by that.

        Of the others those that were due wait once more.
        """
        now, answering = self._clock(), set(answering)
        well = []
        for device, trouble in [*self._troubles.items()]:
            if trouble.quiet <= 0 or now < trouble.heard + trouble.quiet:
                continue
            if device in answering:
                del self._troubles[device]
                well.append(device)
            else:
                trouble.heard = now
        return well

    def reset(self, devices: Iterable[str]) -> list[str]:
        """Note that devices were reset or their driver loaded again; return those now well.

        One that falls ill again and again has to wait all the same.
        """
        well = []
        for device in devices:
            if device in self._troubles and len(self._falls.get(device, ())) < 2:
                del self._troubles[device]
                well.append(device)
        return well
