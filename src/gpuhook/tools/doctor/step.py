"""One step of an examination: a check, and the findings after which it would say nothing new."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding

Check = Callable[[Case], Iterable[Finding]]

# What a failure of any vendor's driver counts as, besides its own name.
DRIVER = "driver"


@dataclass(frozen=True)
class Step:
    """A check, and when it is made.

    ``needs`` are names of findings: where one of them was a failure, the check is skipped, because
    it would only report the same cause again. ``part`` is a second name of its own failures.
    ``engine`` is the one engine that the check is about, "" where it is about none.
    """

    check: Check
    needs: tuple[str, ...] = ()
    part: str = ""
    engine: str = ""

    @property
    def name(self) -> str:
        """What the check is called where it has said nothing."""
        return getattr(self.check, "__name__", "unnamed").replace("_", "-")


def step_of(check: "Check | Step") -> Step:
    """Return a check as a step; one that needs nothing may be a function alone."""
    return check if isinstance(check, Step) else Step(check)
