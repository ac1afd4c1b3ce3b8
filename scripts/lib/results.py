"""Recorded test results, and the tables of docs/support.md and of the page with all results.

A test run writes a file of results (tests/lib/recording.py, ``--results``). scripts/record
copies it to tests/recorded/ and writes the tables again. A file whose name begins with
every-change has the results of the tests that continuous integration runs at every change. Any
other file is of a run by hand.

A file is a JSON object: ``date``, the version of ``gpuhook``, ``selection`` (the selected
tests), ``host``, ``parts`` (counts for each folder of tests) and ``programs``. ``host`` has
distribution, kernel, architecture, python, cgroups, init and security, as words. ``programs``
is a list of objects with ``program``, ``version``, ``of`` (the distribution), ``cgroups``,
``kind`` of tests, and their counts. Counts are ``passed``, ``failed`` and ``skipped``. Facts
that weren't recorded at the time are left out.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import suites

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "tests/recorded"
PAGE = REPOSITORY / "docs/support.md"  # versions only
DETAILS = REPOSITORY / "docs/engineering/test-results.md"
BEGIN = "<!-- made from tests/recorded by scripts/record: don't edit it here -->"
SUITES_BEGIN = "<!-- made from tests/recorded/suites by scripts/record: don't edit it here -->"
END = "<!-- to here -->"
OUTCOMES = ("passed", "failed", "skipped")
ALL = "tests/integration tests/unit"
EVERY_CHANGE = "every-change"
NOT_COUNTED = "passed, not counted"  # for runs from before there were files of results
_ROLLING = ("sid", "experimental")  # their versions change by themselves
_FIRST = ("Docker", "containerd", "podman", "runc", "crun")
_FEW = 10  # words; the page doesn't write out a longer selection
_KEYS = {"date", "gpuhook", "selection", "host", "parts", "programs"}

Result = dict[str, Any]
Counts = Mapping[str, int]


class BadResultsError(Exception):
    """A file of results that is refused, or a page that has no place for its tables."""


def write(path: Path, result: Result) -> None:
    """Write a file of results, one program a line, so that two files can be compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [f"{json.dumps(key)}: {_lines(value)}" for key, value in result.items()]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text("{\n" + ",\n".join(fields) + "\n}\n", "utf-8")
    unfinished.replace(path)


def _lines(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n]"
    return json.dumps(value)


def read(path: Path) -> Result:
    """Return the content of a file of results; BadResultsError if it isn't such a file."""
    try:
        result = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadResultsError(f"{path} can't be read: {error}") from None
    if not isinstance(result, dict) or set(result) != _KEYS:
        raise BadResultsError(f"{path} isn't a file of results: its keys aren't {sorted(_KEYS)}")
    return result


def read_all(folder: Path = FOLDER) -> dict[str, Result]:
    """Return all results by their names, those of every change first, then the newest."""
    found = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    newest = sorted(found.items(), key=lambda pair: str(pair[1]["date"]), reverse=True)
    return dict(sorted(newest, key=lambda pair: not is_of_every_change(pair[0])))


def is_of_every_change(name: str) -> bool:
    """Return whether a file of that name has the results of tests that run at every change."""
    return name.startswith(EVERY_CHANGE)


# The pages ------------------------------------------------------------------------------------


def versions(every: Mapping[str, Result]) -> str:
    """Return the table of versions that were tested, in Markdown; each is in one column only."""
    found: dict[str, dict[tuple[str, str], Counter[str]]] = {}
    by_change = set()
    for name, result in every.items():
        for row in result["programs"]:
            key = (row["program"], row["version"])
            counts = {outcome: row[outcome] for outcome in OUTCOMES if outcome in row}
            found.setdefault(row["program"], {}).setdefault(key, Counter()).update(counts)
            by_change |= {key} if is_of_every_change(name) else set()
    lines = ["| program | at every change | by hand |", "| --- | --- | --- |"]
    for program in sorted(found, key=lambda each: _order((each, ""))):
        keys = sorted(found[program], key=_order)
        said = {key: _version(key[1], found[program][key]) for key in keys}
        columns = [
            [said[key] for key in keys if (key in by_change) is which] for which in (True, False)
        ]
        lines.append(_row((program, *(", ".join(column) for column in columns))))
    return "\n".join(lines)


def _version(version: str, counts: Counter[str]) -> str:
    return f"{version} (**{counts['failed']} failed**)" if counts["failed"] else version


def tables(every: Mapping[str, Result]) -> str:
    """Return the tables of programs and of runs, in Markdown."""
    return "\n".join([*_programs(every), "", *_runs(every)])


def _programs(every: Mapping[str, Result]) -> Iterator[str]:
    yield "| program | of | passed at every change | passed by hand |"
    yield "| --- | --- | --- | --- |"
    found: dict[tuple[str, str, str], dict[str, list[Result]]] = {}
    for name, result in every.items():
        date = "" if is_of_every_change(name) else str(result["date"])
        for row in result["programs"]:
            key = (row["program"], row["version"], row["of"])
            found.setdefault(key, {}).setdefault(date, []).append(row)
    for key in sorted(found, key=_order):
        dates = found[key]
        changes = _kinds(dates.pop("", []))
        by_hand = "; ".join(f"{date}: {_kinds(rows)}" for date, rows in dates.items())
        program, version, of = key
        yield _row((f"{program} {version}", of, changes, by_hand))


def _order(key: tuple[str, ...]) -> tuple[int, str, list[int]]:
    program, version, *_ = key
    place = _FIRST.index(program) if program in _FIRST else len(_FIRST)
    return place, program, [int(each) for each in version.split(".") if each.isdigit()]


def _kinds(rows: list[Result]) -> str:
    """Return the outcomes of a program's tests as text, added up for each kind of test."""
    kinds: dict[str, Counter[str]] = {}
    for row in rows:
        counts = {name: row[name] for name in OUTCOMES if name in row}
        kinds.setdefault(row.get("kind", ""), Counter()).update(counts)
    said = [
        f"{kind} {_counts(counts, passed='')}".strip() for kind, counts in sorted(kinds.items())
    ]
    layouts = sorted({row["cgroups"] for row in rows if "cgroups" in row})
    return ", ".join(said) + (f" (cgroups {', '.join(layouts)})" if layouts else "")


def _counts(counts: Counts, passed: str = " passed") -> str:
    """Return counts of outcomes as text; only a pass counts as passed."""
    if not counts:
        return NOT_COUNTED
    said = [f"{counts['passed']}{passed}"] if counts["passed"] else []
    said += [f"**{counts['failed']} failed**"] if counts["failed"] else []
    said += [f"{counts['skipped']} not run"] if counts["skipped"] else []
    return ", ".join(said) or "none"


def _runs(every: Mapping[str, Result]) -> Iterator[str]:
    yield "| run | date | host | gpuhook | tests | results |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, result in every.items():
        which = "all" if result["selection"] == ALL else _short(result["selection"])
        parts = (f"{part} {_counts(counts)}" for part, counts in result["parts"].items())
        ended = "; ".join(parts) or NOT_COUNTED
        machine = _machine(result["host"])
        yield _row((name, str(result["date"]), machine, result["gpuhook"], which, ended))


def _short(selection: str) -> str:
    """Return the selected tests as text; only the file has a long list."""
    words = selection.split(" ")
    return selection if len(words) <= _FEW else f"{len(words)} parts, listed in the file"


def _machine(host: Mapping[str, str]) -> str:
    labels = {"kernel": "Linux ", "python": "Python ", "cgroups": "cgroups ", "init": "init: "}
    return ", ".join(
        f"{labels.get(name, '')}{value}" for name, value in host.items() if value != "none"
    )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def with_versions(page: str, every: Mapping[str, Result]) -> str:
    """Return the text of the users' page with its table updated."""
    return _between(page, BEGIN, versions(every))


def with_tables(page: str, every: Mapping[str, Result], others: Iterable[suites.Suite]) -> str:
    """Return the text of the details page with updated tables.

    ``others`` are the test suites of other projects.
    """
    page = _between(page, BEGIN, tables(every))
    return _between(page, SUITES_BEGIN, suites.table(others))


def _between(page: str, first: str, text: str) -> str:
    before, begin, rest = page.partition(first + "\n")
    _, end, after = rest.partition("\n" + END)
    if not begin or not end:
        raise BadResultsError(f"the page has no lines\n{first}\n{END}")
    return f"{before}{begin}\n{text}\n{end}{after}"


# What scripts/record does ---------------------------------------------------------------------


def take(path: Path, folder: Path = FOLDER) -> None:
    """Copy a file of results into a folder; BadResultsError if it claims too much."""
    result = read(path)
    words = result["selection"].split(" ")
    if is_of_every_change(path.stem) and not all((REPOSITORY / word).is_dir() for word in words):
        raise BadResultsError(
            f"{path} is of a part of the tests ({result['selection']}), and its name says that it "
            "is of all that every change goes through. Run them without other arguments."
        )
    write(folder / path.name, result)


def missing(claimed: Result, found: Result) -> list[str]:
    """Return the claims of the page for every change that a run hasn't passed.

    Versions are compared by their first two numbers, which a distribution doesn't raise by
    itself. Versions of sid aren't compared.
    """
    had = {key for row in found["programs"] if row["passed"] for key in _claims(row)}
    rows = [row for row in claimed["programs"] if not row["of"].endswith(_ROLLING)]
    lacking = {claim for row in rows for claim in _claims(row)[-1:]} - had
    return sorted(" ".join(claim) for claim in lacking)


def _claims(row: Result) -> list[tuple[str, ...]]:
    """Return a row's claims: that a program was tested, and with which kind of tests."""
    first = (row["program"], ".".join(row["version"].split(".")[:2]), "of", row["of"])
    return [first, (*first, f"({row['kind']})")] if "kind" in row else [first]


def complaint(claimed: Path, found: Result) -> str:
    """Return a message about the claimed tests that a run lacks; empty if it lacks none."""
    lacking = missing(read(claimed), found)
    if not lacking:
        return ""
    return (
        f"{claimed.name} says that every change is tested with {'; '.join(lacking)}, and no such "
        "test has passed. If that is meant, record this run."
    )


def main(words: list[str]) -> None:
    """Copy the named files of results, and write the pages' tables again."""
    try:
        for word in words:
            take(Path(word))
        every = read_all()
        pages = {
            PAGE: with_versions(PAGE.read_text("utf-8"), every),
            DETAILS: with_tables(DETAILS.read_text("utf-8"), every, suites.read_all()),
        }
        for path, text in pages.items():
            path.write_text(text, "utf-8")
    except (BadResultsError, suites.BadSuiteError) as error:
        sys.exit(f"record: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
