"""Findings of checks: a status, a sentence, and a remedy if there is one."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    """Severity of a finding, from best to worst; ``exit_status`` is the command's status for it."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"

    @property
    def exit_status(self) -> int:
        """0, 1 or 2."""
        return {Status.WARNING: 1, Status.FAILURE: 2}.get(self, 0)


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    ``check`` is a stable name (device-nodes), ``message`` one sentence without a full stop,
    ``remedy`` the fix, empty if none is needed.
    """

    check: str
    status: Status
    message: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the fields as JSON values."""
        return {name: str(value) for name, value in asdict(self).items()}


def ok(check: str, message: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, Status.OK, message)


def note(check: str, message: str, remedy: str) -> Finding:
    """Return a harmless finding; ``remedy`` is an optional change."""
    return Finding(check, Status.NOTE, message, remedy)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Return a finding that affects some containers."""
    return Finding(check, Status.WARNING, message, remedy)


def failure(check: str, message: str, remedy: str) -> Finding:
    """Return a finding that prevents GPU containers from working."""
    return Finding(check, Status.FAILURE, message, remedy)


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status among the findings, ok if no container is affected."""
    worst_status = max((each.status for each in findings), key=_ORDER.index, default=Status.OK)
    return worst_status if worst_status.exit_status else Status.OK


_ORDER = [*Status]
