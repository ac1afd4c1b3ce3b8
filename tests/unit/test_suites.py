"""Table of other projects' test suites, which shows what their files contain."""

import json
from pathlib import Path

import pytest
import suites

COUNTS = {"passed": 3, "failed": 1, "skipped": 2}
RAN: suites.Suite = {
    "suite": "a suite",
    "version": "1.0",
    "date": "2026-11-29",
    "gpuhook": "0.3.0",
    "runs": {"bare": COUNTS, "gpuhook": {**COUNTS, "skipped": 0}},
    "differences": "none",
}
NOT_RUN: suites.Suite = {"suite": "another", "version": "", "not run": "needs a cluster"}


def test_a_suite_is_shown_with_the_bare_runtime_next_to_it() -> None:
    line = suites.table([RAN]).splitlines()[-1]
    assert line == "| a suite | 1.0 | 2026-11-29 | 3 of 4, 2 skipped | 3 of 4 |  | none |"


def test_a_suite_that_was_not_run_is_last_without_counts(tmp_path: Path) -> None:
    for name, suite in (("a", NOT_RUN), ("b", RAN)):
        (tmp_path / f"{name}.json").write_text(json.dumps(suite))
    lines = suites.table(suites.read_all(tmp_path)).splitlines()
    assert lines[-2].startswith("| a suite |")
    assert lines[-1] == "| another |  | not run |  |  |  | needs a cluster |"


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        ({"suite": "a"}, "its keys"),
        ([], "its keys"),
        ({**RAN, "more": 1}, "its keys"),
        ({**RAN, "not run": "too"}, "its keys"),
        ({**RAN, "differences": ""}, "doesn't name the differences"),
        ({**RAN, "runs": {"bare": COUNTS}}, "has no run of gpuhook"),
        ({**RAN, "runs": {"gpuhook": {"passed": 1}}}, "isn't one of"),
        ({**RAN, "runs": {"gpuhook": COUNTS, "other": COUNTS}}, "isn't one of"),
    ],
)
def test_a_suite_file_with_wrong_keys_or_values_is_refused(
    suite: object, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(suite))
    with pytest.raises(suites.BadSuiteError, match=said):
        suites.read(path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text("{")
    with pytest.raises(suites.BadSuiteError, match="can't be read"):
        suites.read(path)


def test_each_suite_is_in_the_table_once() -> None:
    every = [(suite["suite"], suite["version"]) for suite in suites.read_all()]
    assert every
    assert len(every) == len(set(every))
