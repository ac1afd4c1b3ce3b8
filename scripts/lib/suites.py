"""Table of other projects' test suites that were run on gpuhook, for the page on test results.

``tests/recorded/suites/`` has a file for each suite, in JSON: its ``suite``, the ``version`` of its
tests, and either ``not run`` with a reason, or ``date``, ``gpuhook``, ``runs`` and
``differences``. ``runs`` has the counts of passed, failed and skipped checks by runtime: ``bare``
(the suite's own subject), ``gpuhook`` in its place, and ``with a GPU``, where each container also
requested one. Without ``bare``, the suite has no other subject to compare with.

The suites are run by hand. Checks that fail with the bare runtime as well say something about the
host, so that only differences count.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "tests/recorded/suites"
RUNS = ("bare", "gpuhook", "with a GPU")
_COUNTS = {"passed", "failed", "skipped"}
_RAN = {"suite", "version", "date", "gpuhook", "runs", "differences"}
_NOT_RUN = {"suite", "version", "not run"}

Suite = dict[str, Any]


class BadSuiteError(Exception):
    """A file that doesn't describe a suite."""


def read(path: Path) -> Suite:
    """Return a file's contents; BadSuiteError if keys are missing, unknown or empty."""
    try:
        suite = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadSuiteError(f"{path} can't be read: {error}") from None
    if not isinstance(suite, dict) or set(suite) not in (_RAN, _NOT_RUN):
        raise BadSuiteError(f"{path}: its keys are neither {sorted(_RAN)} nor {sorted(_NOT_RUN)}")
    for name, counts in suite.get("runs", {}).items():
        if name not in RUNS or set(counts) != _COUNTS:
            raise BadSuiteError(f"{path}: {name} isn't one of {RUNS} with {sorted(_COUNTS)}")
    if "runs" in suite and not ("gpuhook" in suite["runs"] and suite["differences"]):
        raise BadSuiteError(f"{path}: it has no run of gpuhook, or doesn't name the differences")
    return suite


def read_all(folder: Path = FOLDER) -> list[Suite]:
    """Return all suites, those that were run first."""
    every = [read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(every, key=lambda suite: "not run" in suite)


def table(every: Iterable[Suite]) -> str:
    """Return the table in Markdown."""
    return "\n".join(_lines(every))


def _lines(every: Iterable[Suite]) -> Iterator[str]:
    yield "| suite | version | date | without gpuhook | with gpuhook | with a GPU | differences |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for suite in every:
        if "not run" in suite:
            cells = ["not run", "", "", "", suite["not run"]]
        else:
            ended = (_ended(suite["runs"].get(name)) for name in RUNS)
            cells = [suite["date"], *ended, suite["differences"]]
        yield f"| {' | '.join([suite['suite'], suite['version'], *cells])} |"


def _ended(counts: Mapping[str, int] | None) -> str:
    """Return how many checks passed, of those that ran."""
    if counts is None:
        return ""
    passed, failed, skipped = counts["passed"], counts["failed"], counts["skipped"]
    return f"{passed} of {passed + failed}" + (f", {skipped} skipped" if skipped else "")
