"""The children of ``gpuhook dra``: the server, and one for each claim that something is done for.

What is done for a claim may wait for the API server or a driver, so each has a child and a time
limit: one that hangs is an error in that claim's answer, before the kubelet gives up. They say
lines of JSON:

    {"say": text}                                a sentence for the log
    {"call": 7, "do": "prepare", "driver": name, "claim": {...}}   the server asks
    {"answer": {...}}                            a claim's child has done it
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpuhook.ground.container import kernel
from gpuhook.ground.errors import GpuhookError
from gpuhook.tools.dra.handing import Handing
from gpuhook.tools.dra.options import Options
from gpuhook.tools.host.child import Clock, Talk, Talking, Tell

LIMIT = 38.0  # seconds for a claim's work; the kubelet waits for 45
_LONGEST_LINE = 16 << 20
_ENDING = 3.0  # seconds for the server to end in when asked to
_READING = 30.0  # seconds that the server may leave what we write unread
_LATE = "Its work took longer than {:g} seconds and was ended; what it had begun is undone later"


class Job(Talking):
    """One piece of work, in a child of its own; ``call`` is the server's number, 0 for none.

    ``about`` are the driver and the uid of its claim, "" for all.
    """

    def __init__(self, clock: Clock, call: int, about: tuple[str, str], what: str) -> None:
        super().__init__(clock, _LONGEST_LINE)
        self.call = call
        self.about = about
        self.what = what
        self.limit = clock() + LIMIT
        self.answer: dict[str, Any] | None = None
        self.has_ended = False
        self.sentences: list[str] = []

    def begin(self, handing: Handing, do: str, driver: str, claim: Mapping[str, str]) -> None:
        """Start it: ``do`` is prepare, unprepare or sweep."""
        self._begin(lambda talk: _work(talk, handing, do, driver, claim))

    def read(self) -> None:
        """Take in what it says; ``answer`` is there when it ``has_ended``, or before."""
        for line in self._lines():
            if "say" in line:
                self.sentences.append(str(line["say"]))
            elif isinstance(line.get("answer"), dict):
                self.answer = line["answer"]
        if self._fd < 0:
            self._finish(f"The process that worked on {self.what} ended early; see the log")

    def tend(self) -> None:
        """End it where it takes too long."""
        late = self._fd >= 0 and self._clock() >= self.limit  # protects: dra-deadline
        if late and not self._has_spoken():
            self._finish(_LATE.format(LIMIT))

    def _finish(self, otherwise: str) -> None:
        self.has_ended = True
        if self.answer is None:
            self.answer = {"error": otherwise}
            self.sentences.append(f"{self.what}: {otherwise}")

    def leave(self) -> None:
        """Let it end, which it may be late in: it has answered, or never will."""
        self._kill()
        self._close()
        self.pid = 0

    def is_gone(self) -> bool:
        """Tell whether nothing of it is left to collect."""
        self.reap()
        return not self._zombies

    def stop(self) -> None:
        """End it."""
        self._end()


def _work(talk: Talk, handing: Handing, do: str, driver: str, claim: Mapping[str, str]) -> None:
    kernel.end_after(int(LIMIT) + 1)
    kernel.set_name(f"gpuhook-{do}")
    handing.say_by(lambda sentence: talk.say({"say": sentence}))
    try:
        answer: dict[str, Any] = {}
        if do == "prepare":
            record = handing.prepare(driver, claim)
            answer = {"devices": [asdict(each) for each in record.devices]}
        elif do == "unprepare":
            handing.unprepare(driver, claim)
        else:
            handing.sweep()
        talk.say({"answer": answer})
    except GpuhookError as error:
        talk.say({"answer": {"error": str(error)}})
    except Exception as error:  # noqa: BLE001 - a process of its own: nobody else would say it
        talk.say({"answer": {"error": f"It failed: {type(error).__name__}: {error}"}})
    if claim:
        handing.report(claim)  # the kubelet has its answer already


class Server(Talking):
    """The process that speaks with the kubelet; what is said to it waits here until it reads."""

    def __init__(self, options: Options, tell: Tell, clock: Clock) -> None:
        super().__init__(clock, _LONGEST_LINE)
        self._options = options
        self._tell = tell
        self._state = b""
        self._waiting = b""
        self._stuck = 0.0

    def wants(self) -> int:
        """Return the descriptor to write on when it takes something, -1 if there is nothing."""
        return self._fd if self._waiting else -1

    def give(self, state: Mapping[str, Any]) -> None:
        """Have the server know what there is, now and whenever it is started again."""
        self._state = json.dumps({"state": state}).encode() + b"\n"
        self._write(self._state)

    def reply(self, call: int, answer: Mapping[str, Any]) -> None:
        """Answer a call."""
        self._write(json.dumps({"call": call, "answer": answer}).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            return
        if not self._waiting:
            self._stuck = self._clock()
        self._waiting += line
        self.write()

    def write(self) -> None:
        """Write as much as the server takes."""
        while self._fd >= 0 and self._waiting:
            try:
                written = os.write(self._fd, self._waiting)
            except BlockingIOError:
                return
            except OSError:  # it has ended: its status says so
                return
            self._waiting = self._waiting[written:]
            self._stuck = self._clock()

    def deadline(self) -> float | None:
        """Return when something is to be done, None if never."""
        return self._stuck + _READING if self.wants() >= 0 else self.again

    def calls(self) -> list[dict[str, Any]]:
        """Return what it asks for."""
        found = []
        for line in self._lines():
            if "say" in line:
                self._tell(str(line["say"]))
            elif "call" in line:
                found.append(line)
        return found

    def tend(self) -> bool:
        """Start it where there is none, and end it where it hangs; tell whether it is a new one."""
        status = self.reap()
        if status is not None:
            how = os.waitstatus_to_exitcode(status)
            why = f"signal {-how}" if how < 0 else f"status {how}"
            self._tell(f"The server ended with {why}; it is started again")
            self._close()
            self._note_end()
        now = self._clock()
        if self.pid and self.wants() >= 0 and now >= self._stuck + _READING:
            self._tell("The server no longer reads; it is started again")
            self._give_up()
        if self.again is None or now < self.again:
            return False
        self._waiting = b""
        self._begin(lambda talk: _serve(self._options, talk))
        if self._state:
            self._write(self._state)
        return True

    def end(self) -> None:
        """Have it take leave of the kubelet, and wait for its end."""
        self._close()
        if self.pid and kernel.reap(self.pid, _ENDING) is None:
            self._kill()
        self.pid = 0


def _serve(options: Options, talk: Talk) -> None:
    """Be the server. Only here is gRPC imported: it has threads, and doesn't bear forks."""
    try:
        kernel.set_name("gpuhook-server")
        from gpuhook.tools.dra import server  # noqa: PLC0415

        server.serve(options, talk)
    except GpuhookError as error:
        talk.say({"say": str(error)})
        raise
    except Exception as error:
        talk.say({"say": f"The server failed: {type(error).__name__}: {error}"})
        raise
