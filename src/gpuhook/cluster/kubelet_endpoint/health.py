"""The health of devices, and the rules by which an unhealthy one recovers.

Pure: the time is passed in, and no device is queried.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_MEMORY = 3600.0  # seconds after which an old failure no longer lengthens the next wait
_MOST_DOUBLINGS = 4


@dataclass
class _Failure:
    """A device's failure: the reason, when it was last reported, and the quiet time it needs."""

    reason: str
    heard: float
    quiet: float


class Health:
    """The unhealthy devices, each with the reason; all others are healthy.

    A device becomes healthy again when it has been quiet for ``recovery`` seconds and then answers,
    or immediately after a reset. Each further failure within an hour doubles the quiet time, up to
    16 times, and a reset doesn't shorten it. With ``recovery`` 0 only a reset helps. ``clock``
    returns seconds.
    """

    def __init__(self, recovery: float, clock: Callable[[], float]) -> None:
        self._recovery = recovery
        self._clock = clock
        self._troubles: dict[str, _Failure] = {}
        self._falls: dict[str, list[float]] = {}  # times of each device's failures in the last hour

    def reasons(self) -> dict[str, str]:
        """Return the reasons why devices are unhealthy, by their ids."""
        return {device: trouble.reason for device, trouble in self._troubles.items()}

    def ill(self, device: str, reason: str) -> bool:
        """Record a device's failure; tell whether it was healthy before."""
        now = self._clock()
        known = self._troubles.get(device)
        if known is not None:
            known.heard = now
            return False
        falls = [at for at in self._falls.get(device, ()) if now - at < _MEMORY]
        quiet = self._recovery * 2 ** min(len(falls), _MOST_DOUBLINGS)
        self._falls[device] = [*falls[-_MOST_DOUBLINGS:], now]
        self._troubles[device] = _Failure(reason, now, quiet)
        return True

    def due(self) -> float | None:
        """Return when the next device's quiet time is over, None if none is waiting."""
        times = [each.heard + each.quiet for each in self._troubles.values() if each.quiet > 0]
        return min(times, default=None)

    def asked(self, answering: Iterable[str]) -> list[str]:
        """Record the devices that answered just now; return those that are healthy again.

        Devices that were due and didn't answer wait once more.
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
        """Record that devices were reset or their driver reloaded; return those now healthy.

        A device that fails repeatedly still has to wait.
        """
        well = []
        for device in devices:
            if device in self._troubles and len(self._falls.get(device, ())) < 2:
                del self._troubles[device]
                well.append(device)
        return well
