"""The budget of a container's start: what must hold, what is aimed at, what was measured."""

from dataclasses import dataclass

from kinds import (
    BY_ENGINE,
    BY_NAME,
    BY_NAME_PAUSED,
    EIGHT,
    LIMITED,
    LIMITED_SLOW,
    NO_GPU,
    PAUSED,
    RUNC,
    SLOW,
    WITHOUT_HOOK,
)
from rounds import Calls, Rounds
from storms import Storm, failures, slowness

_BUSY = 2  # number of busy loops (--busy) for which there is a budget


@dataclass(frozen=True)
class Results:
    """All that was measured; no storms if none were asked for."""

    busy: int
    rounds: Rounds
    calls: Calls
    cold: list[float]
    storms: dict[str, list[Storm]]


@dataclass(frozen=True)
class Row:
    """One line of the budget; the value is None if this run doesn't measure it."""

    what: str
    must: float
    aim: float
    value: float | None

    @property
    def mark(self) -> str:
        """How the value stands to what must hold and what is aimed at."""
        if self.value is None:
            return "not measured"
        if self.value > self.must:
            return "missed"
        return "aim met" if self.value <= self.aim else "met"


def budget(results: Results) -> list[Row]:
    """Return every line; those for a quiet machine have no value beside busy loops."""
    rounds = results.rounds
    quiet = results.busy == 0
    stormy = quiet and bool(results.storms)

    def units(what: str, must: float, aim: float, kind: str) -> Row:
        value = rounds.added(kind) / rounds.unit if quiet else None
        return Row(f"{what}, units", must, aim, value)

    share = rounds.processor_share(EIGHT) if quiet else None
    hook = (rounds.added(BY_ENGINE) - rounds.added(WITHOUT_HOOK)) / rounds.unit if quiet else None
    limits = [
        (rounds.added(kind) - rounds.added(EIGHT)) / rounds.unit
        if quiet and kind in rounds.lives
        else None
        for kind in (LIMITED, LIMITED_SLOW)
    ]
    by_name = rounds.processor_share(BY_NAME) if quiet else None
    multiple = rounds.multiple(EIGHT) if results.busy == _BUSY else None
    slowest = slowness(results.storms[EIGHT], results.storms[RUNC]) if stormy else None
    failed = len(failures(results.storms[EIGHT])) if stormy else None
    calls = results.calls.added_units if quiet else None
    return [
        Row("verbs that create nothing, units", 0.1, 0.03, calls),
        units("no GPU asked", 0.2, 0.05, NO_GPU),
        units("8 GPUs, helper standing", 1.6, 1.3, EIGHT),
        units("8 GPUs, first after a pause", 3.6, 3.0, PAUSED),
        units("8 GPUs, nvmlInit 2 s, saved, helper standing", 1.8, 1.2, SLOW),
        Row("the hook of a document, helper standing, units", 1.2, 1.0, hook),
        Row("a limit of memory, helper standing, units", 1.0, 0.8, limits[0]),
        Row("the same, nvmlInit 150 ms", 1.0, 0.8, limits[1]),
        units("8 GPUs, mode cdi, helper standing", 2.5, 2.0, BY_NAME),
        units("8 GPUs, mode cdi, first after a pause", 4.0, 3.5, BY_NAME_PAUSED),
        Row("mode cdi: processor time added, of plain runc's", 0.8, 0.7, by_name),
        Row("8 GPUs: processor time added, of plain runc's", 0.7, 0.6, share),
        Row("storm with GPUs: slowest, times plain runc's", 1.6, 1.4, slowest),
        Row("storm with GPUs: containers that failed", 0, 0, failed),
        Row(f"8 GPUs with --busy {_BUSY}: whole life, times runc's", 1.6, 1.35, multiple),
    ]
