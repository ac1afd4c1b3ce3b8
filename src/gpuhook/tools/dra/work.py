"""The children of ``gpuhook dra``: the server, and one for each claim that something is done for.

What is done for a claim may wait for the API server or a driver, so each has a child and a time
limit: one that hangs is an error in that claim's answer, before the kubelet gives up. They say
lines of JSON:

    {"call": 7, "do": "prepare", "driver": name, "claim": {...}}   the server asks
    {"answer": {...}}                            a claim's child has done it
    {"say": text}                                and has a sentence for the log
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpuhook.ground.container import kernel
from gpuhook.ground.errors import GpuhookError
from gpuhook.tools.dra.handing import Handing
from gpuhook.tools.dra.options import Options
from gpuhook.tools.dra.publish import Publisher
from gpuhook.tools.host.child import Clock, Talk, Talking, Tell
from gpuhook.tools.host.fed import Fed

LIMIT = 38.0  # seconds for a claim's work; the kubelet waits for 45
_LONGEST_LINE = 16 << 20
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
            elif "error" in line:
                self.sentences.append(f"{self.what}: {line['error']}")
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


class Server(Fed):
    """The process that speaks with the kubelet: it reads what there is, asks, and is answered.

    ``publisher`` works there, too.
    """

    def __init__(
        self, options: Options, publisher: Publisher | None, tell: Tell, clock: Clock
    ) -> None:
        def serve(fd: int) -> int:
            # Only here is gRPC imported: it has threads, and doesn't bear forks.
            from gpuhook.tools.dra import server  # noqa: PLC0415

            return server.serve(options, publisher, fd, tell)

        super().__init__(serve, "The server", "gpuhook-server", tell, clock)

    def know(self, state: Mapping[str, Any], slices: Mapping[str, Any]) -> None:
        """Have the server know what there is, now and whenever it is started again.

        ``slices`` is what its publisher is told.
        """
        line = {"state": state, "slices": slices}
        self.give(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def reply(self, call: int, answer: Mapping[str, Any]) -> None:
        """Answer a call."""
        self.answer(json.dumps({"call": call, "answer": answer}).encode() + b"\n")

    def calls(self) -> list[dict[str, Any]]:
        """Return what it asks for."""
        return [line for line in self._lines() if "call" in line]
