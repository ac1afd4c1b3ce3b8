"""The listener for a vendor's events, a child of the supervisor, killed if it hangs."""

from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.monitor.host.child import Clock, JsonLineWorker, Tell, how_ended

_LONGEST_LINE = 1 << 16


class Listener(JsonLineWorker):
    """The process that receives a vendor's errors; ``module`` is the vendor's ``events``.

    ``silent`` are the devices in which it hung; it skips them until they are healthy again.
    Until ``away`` it keeps the driver closed.
    """

    def __init__(self, module: Any, title: str, config: Config, tell: Tell, clock: Clock) -> None:
        super().__init__(clock, _LONGEST_LINE)
        self.module = module
        self._title = title
        self._config = config
        self._tell = tell
        self._asking = ""
        self._heard = 0.0
        self._listens = False
        self._failed = False
        self._said = ""
        self._away = 0.0
        self.silent: set[str] = set()

    def deadline(self) -> float | None:
        """Return when ``tend`` is due next."""
        return self._overdue() if self.pid else self.again

    def _overdue(self) -> float:
        """Return when its next message is overdue; the driver may be slow at first."""
        patience = 3.0 * float(self.module.BEAT)
        return self._heard + patience + (0.0 if self._listens else self._config.nvml_timeout)

    def tend(self, inventory: Any) -> list[dict[str, Any]]:
        """Start it if needed and there are devices to listen to; kill it if it hangs.

        A device that it was querying when it hung is skipped from then on. Return the last events
        of a process that has exited, as ``read`` does.
        """
        last = []
        status = self.reap()
        if status is not None:
            while self._has_spoken():
                last += self.read()
            if not self._failed:
                self._report(f"the listener for the driver's errors ended {how_ended(status)}")
            self._close()
            self._note_end()
        now = self._clock()
        if self.pid and now >= self._overdue() and not self._has_spoken():
            self._give_up()
        if self.again is not None and now >= self.again:
            self._start(inventory, now)
        return last

    def _start(self, inventory: Any, now: float) -> None:
        if inventory is None or not self.module.can_listen(inventory):
            self.again = None
            return
        try:
            work = self.module.begin(self._config, inventory, self.silent)
        except GpuhookError as error:
            self._report(str(error))
            self._note_end()
            return
        self._begin(work)
        self._asking, self._listens, self._failed, self._heard = "", False, False, now

    def _give_up(self) -> None:
        what = f"querying {self._asking}" if self._asking else "waiting"
        self._tell(f"{self._title}: the driver hangs while {what}; listening is started again")
        if self._asking:
            self.silent.add(self._asking)
        super()._give_up()

    def restart(self) -> None:
        """Start to listen again, because devices have changed."""
        self.stop()
        self.again = max(self._clock(), self._away)
        self._back_off.reset()
        self._said = ""

    def stop(self) -> None:
        """Close the driver."""
        self._end()
        self.again = None

    def let_go(self, seconds: float) -> None:
        """Close the driver for ``seconds``."""
        self.silent.clear()
        self._away = self._clock() + seconds
        self.restart()

    def read(self) -> list[dict[str, Any]]:
        """Return the events that it sends, including those for lost devices."""
        found = []
        for line in self.lines():
            self._heard = self._clock()
            if "asking" in line:
                self._asking = str(line["asking"])
                continue
            self._asking = ""
            if "watched" in line:
                self._listens = True
                self._say_unwatched(line.get("unwatched"))
            elif "error" in line:
                self._failed = True
                self._report(str(line["error"]))
            elif self._is_event(line):
                found.append(line)
        return found

    def _is_event(self, line: dict[str, Any]) -> bool:
        """Tell whether a line is a valid event."""
        if "lost" in line:
            return isinstance(line["lost"], str) and isinstance(line.get("why"), str)
        return bool(self.module.is_error(line))

    def _say_unwatched(self, unwatched: object) -> None:
        if isinstance(unwatched, dict) and unwatched:
            why = "; ".join(f"{device}: {reason}" for device, reason in unwatched.items())
            self._report(f"These devices aren't watched for errors: {why}")

    def _report(self, problem: str) -> None:
        """Log a problem, once until it changes."""
        if problem != self._said:
            self._tell(f"{self._title}: {problem}")
        self._said = problem
