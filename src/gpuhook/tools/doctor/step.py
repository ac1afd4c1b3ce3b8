"""A step of an examination: a check, and the failures that make it redundant."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding

Check = Callable[[Case], Iterable[Finding]]

# A second name for a failure of any vendor's driver.
DRIVER = "driver"


@dataclass(frozen=True)
class Step:
    """A check, and its conditions.

    ``needs`` are names of findings: if one of them was a failure, the check is skipped, because
    it would only report the same cause again. ``part`` is a second name for its own failures.
    ``engine`` is the only engine that the check concerns, "" for none.
    """

    check: Check
    needs: tuple[str, ...] = ()
    part: str = ""
    engine: str = ""

    @property
    def name(self) -> str:
        """The check's name if it has no findings."""
        return getattr(self.check, "__name__", "unnamed").replace("_", "-")


def step_of(check: "Check | Step") -> Step:
    """Return a check as a step; a check without needs may be a plain function."""
    return check if isinstance(check, Step) else Step(check)
