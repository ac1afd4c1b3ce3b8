"""The supervisor's children: the server, and one for each vendor's events.

What is written to one never waits for it, and one that takes or says nothing for too long is
killed.
"""

from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import GpuhookError
from gpuhook.tools.host.child import Clock, Talking, Tell, how_ended
from gpuhook.tools.host.fed import Fed
from gpuhook.tools.kubernetes.settings import Settings

_READING = 30.0  # seconds that the server may leave a state unread
_ENDING = 3.0  # seconds to end in when asked to
_LONGEST_LINE = 1 << 16


class Server(Fed):
    """The process that speaks with the kubelet; it reads states from a pipe."""

    def __init__(self, settings: Settings, tell: Tell, clock: Clock) -> None:
        def serve(reader: int) -> int:
            # Only here is gRPC imported: it has threads, and doesn't bear forks.
            from gpuhook.tools.kubernetes import server  # noqa: PLC0415

            return server.serve(settings, reader, tell)

        super().__init__(serve, "The server", "gpuhook-server", tell, clock)


class Listener(Talking):
    """The process that hears of a vendor's errors; ``module`` is the vendor's ``events``.

    ``silent`` are the devices that it hung in: it leaves them alone until ``forgive``.
    While it is ``away``, it has let go of the driver.
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
        """Return when something is to be done."""
        return self._limit() if self.pid else self.again

    def _limit(self) -> float:
        """Return until when it has to say something: at first, the driver may take long."""
        patience = 3.0 * float(self.module.BEAT)
        return self._heard + patience + (0.0 if self._listens else self._config.nvml_timeout)

    def tend(self, inventory: Any) -> list[dict[str, Any]]:
        """Start it where there is none and something to listen to, and end it where it hangs.

        A device that it was asking when it hung is left alone from then on. Return what one that
        has ended had said, as ``read`` does.
        """
        last = []
        status = self.reap()
        if status is not None:
            while self._has_spoken():
                last += self.read()
            if not self._failed:
                self._report(f"what listens to the driver's errors ended {how_ended(status)}")
            self._close()
            self._note_end()
        now = self._clock()
        if self.pid and now >= self._limit() and not self._has_spoken():
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
        what = f"asking {self._asking}" if self._asking else "waiting"
        self._tell(f"{self._title}: the driver hangs in {what}; its events are asked for again")
        if self._asking:
            self.silent.add(self._asking)
        super()._give_up()

    def restart(self) -> None:
        """Listen from the start, as devices have changed."""
        self.stop()
        self.again = max(self._clock(), self._away)
        self._back_off.reset()
        self._said = ""

    def stop(self) -> None:
        """Let go of the driver."""
        self._end()
        self.again = None

    def let_go(self, seconds: float) -> None:
        """Let go of the driver for so long."""
        self.silent.clear()
        self._away = self._clock() + seconds
        self.restart()

    def read(self) -> list[dict[str, Any]]:
        """Return what it says: the events, and which devices are lost."""
        found = []
        for line in self._lines():
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
        """Tell whether a line is an event as it should be."""
        if "lost" in line:
            return isinstance(line["lost"], str) and isinstance(line.get("why"), str)
        return bool(self.module.is_error(line))

    def _say_unwatched(self, unwatched: object) -> None:
        if isinstance(unwatched, dict) and unwatched:
            why = "; ".join(f"{device}: {reason}" for device, reason in unwatched.items())
            self._report(f"These aren't watched for errors: {why}")

    def _report(self, problem: str) -> None:
        """Say what is wrong, once."""
        if problem != self._said:
            self._tell(f"{self._title}: {problem}")
        self._said = problem
