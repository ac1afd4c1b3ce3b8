"""The workers of ``gpuhook dra``, one for each claim that is being processed.

Work for a claim may wait for the API server or a driver, so each has a child and a time limit. A
hung child becomes an error in that claim's response before the kubelet gives up. The children
send lines of JSON:

    {"call": 7, "do": "prepare", "driver": name, "claim": {...}}   a call of the server
    {"answer": {...}}                            the result of a claim's child
    {"say": text}                                a sentence for the log
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpuhook.base.container import kernel
from gpuhook.base.errors import GpuhookError
from gpuhook.cluster.dra.claim_preparer import ClaimPreparer
from gpuhook.monitor.host.child import Channel, Clock, JsonLineWorker

TIMEOUT = 38.0  # seconds for a claim's work; the kubelet waits for 45
_LONGEST_LINE = 16 << 20
_LATE = "It took longer than {:g} seconds and was stopped; unfinished steps are rolled back later"


class ClaimJob(JsonLineWorker):
    """One job, in a separate child; ``call`` is the server's number of the call, 0 for none.

    ``about`` is the driver and the uid of its claim, "" for all.
    """

    def __init__(self, clock: Clock, call: int, about: tuple[str, str], what: str) -> None:
        super().__init__(clock, _LONGEST_LINE)
        self.call = call
        self.about = about
        self.what = what
        self.deadline = clock() + TIMEOUT
        self.answer: dict[str, Any] | None = None
        self.has_ended = False
        self.sentences: list[str] = []

    def begin(self, handing: ClaimPreparer, do: str, driver: str, claim: Mapping[str, str]) -> None:
        """Start it: ``do`` is prepare, unprepare or sweep."""
        self._begin(lambda talk: _work(talk, handing, do, driver, claim))

    def read(self) -> None:
        """Process its lines; ``answer`` is set once it ``has_ended``, or before."""
        for line in self.lines():
            if "say" in line:
                self.sentences.append(str(line["say"]))
            elif "error" in line:
                self.sentences.append(f"{self.what}: {line['error']}")
            elif isinstance(line.get("answer"), dict):
                self.answer = line["answer"]
        if self._fd < 0:
            self._finish(f"The process that worked on {self.what} ended early; see the log")

    def tend(self) -> None:
        """Stop it if it takes too long."""
        late = self._fd >= 0 and self._clock() >= self.deadline  # protects: dra-deadline
        if late and not self._has_spoken():
            self._finish(_LATE.format(TIMEOUT))

    def _finish(self, otherwise: str) -> None:
        self.has_ended = True
        if self.answer is None:
            self.answer = {"error": otherwise}
            self.sentences.append(f"{self.what}: {otherwise}")

    def leave(self) -> None:
        """Kill it without waiting: it has answered, or never will."""
        self._kill()
        self._close()
        self.pid = 0

    def is_gone(self) -> bool:
        """Tell whether all its processes have been reaped."""
        self.reap()
        return not self._zombies

    def stop(self) -> None:
        """Stop it."""
        self._end()


def _work(
    talk: Channel, handing: ClaimPreparer, do: str, driver: str, claim: Mapping[str, str]
) -> None:
    kernel.end_after(int(TIMEOUT) + 1)
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
    except Exception as error:  # noqa: BLE001 - nothing else logs this process's errors
        talk.say({"answer": {"error": f"It failed: {type(error).__name__}: {error}"}})
    if claim:
        handing.report(claim)  # the kubelet has its response already
