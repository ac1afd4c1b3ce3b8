"""Claims in the documentation, which must match the result files, and the test runs behind them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import ran
import results
import suites

LIBRARIES = [str(results.REPOSITORY / name) for name in ("tests/lib", "scripts/lib", "src")]
HOST = {"distribution": "Debian trixie", "kernel": "6.12.1", "cgroups": "v2", "security": "none"}
DOCKER = {"program": "Docker", "version": "20.10.24", "of": "Debian bookworm", "cgroups": "v1"}
COUNTS = {"passed": 2, "failed": 0, "skipped": 0}


def result(*programs: Mapping[str, object], **fields: object) -> results.Result:
    made: results.Result = {
        "date": "2026-11-23",
        "gpuhook": "0.2.0",
        "selection": results.ALL,
        "host": HOST,
        "parts": {},
        "programs": list(programs),
    }
    return made | fields


def row(kind: str = "containers", **fields: object) -> dict[str, object]:
    return {**DOCKER, "kind": kind, **COUNTS, **fields}


# The page -------------------------------------------------------------------------------------


def made_now(path: Path) -> str:
    page = path.read_text()
    if path == results.PAGE:
        return results.with_versions(page, results.read_all())
    return results.with_tables(page, results.read_all(), suites.read_all())


@pytest.mark.parametrize("path", [results.PAGE, results.DETAILS], ids=lambda path: path.stem)
def test_result_pages_match_the_result_files(path: Path) -> None:
    assert path.read_text() == made_now(path), "run scripts/record"


@pytest.mark.parametrize("path", [results.PAGE, results.DETAILS], ids=lambda path: path.stem)
@pytest.mark.parametrize(("said", "instead"), [(r"26\.1\.5", "27.1.5"), (r"\| Docker", "|")])
def test_a_manually_edited_claim_is_detected(
    path: Path, said: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = tmp_path / path.name
    edited.write_text(re.sub(said, instead, path.read_text(), count=1))
    assert edited.read_text() != path.read_text()
    monkeypatch.setattr(results, "PAGE" if path == results.PAGE else "DETAILS", edited)
    assert edited.read_text() != made_now(edited)


def test_a_manually_edited_count_is_detected() -> None:
    page = re.sub(r"\d+ passed", "0 passed", results.DETAILS.read_text(), count=1)
    assert page != results.with_tables(page, results.read_all(), suites.read_all())


def test_programs_listed_as_not_run_have_no_results() -> None:
    table = results.PAGE.read_text().partition("\n## What was not run\n")[2].partition("\n## ")[0]
    names = ", ".join(re.findall(r"^\| ([^|-][^|]*) \|", table, re.MULTILINE)).lower()
    assert "cri-o" in names
    ran_by = {each["program"] for one in results.read_all().values() for each in one["programs"]}
    assert [name for name in ran_by if re.search(rf"\b{name.lower()}\b", names)] == []


def test_a_page_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(results.BadResultsError, match="has no lines"):
        results.with_tables("# Support\n", {}, [])
    with pytest.raises(results.BadResultsError, match="has no lines"):
        results.with_versions("# Support\n", {})


def test_versions_are_grouped_by_the_kind_of_test_run() -> None:
    failed, runc = row(version="9.1", failed=3), row(program="runc", version="1.1.5")
    by_hand = result(row(), row(of="Debian sid"), failed, runc, {**runc, "of": "Debian sid"})
    every = {"every-change": result(row(), row("CDI documents")), "by-hand-a": by_hand}
    assert results.versions(every).splitlines()[2:] == [
        "| Docker | 20.10.24 | 9.1 (**3 failed**) |",
        "| runc |  | 1.1.5 |",
    ]


def test_tables_show_failed_and_skipped_counts() -> None:
    failed = row(passed=2, failed=1, skipped=0)
    more = row("CDI documents", passed=0, failed=0, skipped=4, cgroups="v2")
    parts = {"unit": {"passed": 5, "failed": 1, "skipped": 0}}
    made = results.tables({"every-change": result(failed, more, parts=parts)})
    said = "CDI documents 4 not run, containers 2, **1 failed** (cgroups v1, v2)"
    assert f"| Docker 20.10.24 | Debian bookworm | {said} |  |" in made
    assert "| unit 5 passed, **1 failed** |" in made


def test_tables_show_the_dates_of_manual_runs() -> None:
    late, early = result(row(), date="2026-12-01"), result(row(version="9.1"), date="2026-11-30")
    every = {"every-change": result(row()), "by-hand-a": early, "by-hand-b": late}
    lines = results.tables(every).splitlines()
    said = "containers 2 (cgroups v1)"
    assert lines[2:4] == [
        f"| Docker 9.1 | Debian bookworm |  | 2026-11-30: {said} |",
        f"| Docker 20.10.24 | Debian bookworm | {said} | 2026-12-01: {said} |",
    ]


def test_runs_of_one_date_are_added_up() -> None:
    by_hand = {"by-hand-a": result(row()), "by-hand-b": result(row(passed=3, cgroups="v2"))}
    said = results.tables(by_hand)
    assert "|  | 2026-11-23: containers 5 (cgroups v1, v2) |" in said


@pytest.mark.parametrize(
    ("selection", "shown"),
    [
        ("tests/unit tests/machine/booted", "tests/unit tests/machine/booted"),
        (" ".join(f"tests/unit/{each}" for each in range(11)), "11 parts, listed in the file"),
    ],
)
def test_only_a_long_test_selection_is_shortened_in_the_table(selection: str, shown: str) -> None:
    assert f"| {shown} |" in results.tables({"by-hand-a": result(selection=selection)})


def test_uncounted_results_show_no_number() -> None:
    known = {name: DOCKER[name] for name in ("program", "version", "of")}
    zeros = {"passed": 0, "failed": 0, "skipped": 0}
    made = results.tables({"by-hand-a": result(known, parts={"unit": zeros})})
    assert "| 2026-11-23: passed, not counted |" in made
    assert "| unit none |" in made


# The files ------------------------------------------------------------------------------------


def test_manual_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for name, date in (("a", "2026-11-01"), ("every-change", "2026-10-01"), ("b", "2026-11-02")):
        results.write(tmp_path / f"{name}.json", result(date=date))
    assert list(results.read_all(tmp_path)) == ["every-change", "b", "a"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"date": "2026-11-23"}', "{"])
def test_an_invalid_result_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(results.BadResultsError, match=r"a\.json"):
        results.take(tmp_path / "a.json", tmp_path / "taken")
    with pytest.raises(results.BadResultsError, match=r"b\.json"):
        results.take(tmp_path / "b.json", tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize(
    "selection", ["tests/unit -k cdi", "tests/unit/test_results.py", "tests --ignore=tests/unit"]
)
def test_a_partial_run_is_refused_as_the_run_for_every_change(
    selection: str, tmp_path: Path
) -> None:
    made = tmp_path / "every-change.json"
    results.write(made, result(selection=selection))
    with pytest.raises(results.BadResultsError, match="is of a part of the tests"):
        results.take(made, tmp_path / "taken")
    by_hand = made.rename(tmp_path / "by-hand-a.json")
    results.take(by_hand, tmp_path / "taken")
    assert results.read(tmp_path / "taken/by-hand-a.json") == result(selection=selection)


@pytest.mark.parametrize(
    ("found", "lacking"),
    [
        (row(), []),
        (row(version="20.10.25", cgroups="v2"), []),
        (row(version="20.11.24"), ["Docker 20.10 of Debian bookworm (containers)"]),
        (row(of="Debian trixie"), ["Docker 20.10 of Debian bookworm (containers)"]),
        (row("CDI documents"), ["Docker 20.10 of Debian bookworm (containers)"]),
        (row(passed=0, failed=2), ["Docker 20.10 of Debian bookworm (containers)"]),
    ],
)
def test_claims_missing_from_a_run_are_listed(found: dict[str, object], lacking: list[str]) -> None:
    assert results.missing(result(row()), result(found)) == lacking


def test_rolling_distributions_are_not_reported_missing() -> None:
    assert results.missing(result(row(of="Debian sid")), result()) == []


def test_a_claim_without_a_kind_is_met_by_any_kind() -> None:
    known = {name: DOCKER[name] for name in ("program", "version", "of")}
    assert results.missing(result(known), result(row("CDI documents"))) == []
    assert results.missing(result(known), result()) == ["Docker 20.10 of Debian bookworm"]


# What a test ran ------------------------------------------------------------------------------


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that print their versions, and a configuration of gpu-py."""
    for name, says in (("podman", "podman version 5.4.2"), ("crun", "crun version 1.21\nx: 2.2")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(0o755)
    (tmp_path / "config.toml").write_text('[nvidia-container-runtime]\nruntimes = ["crun"]\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ran, "ACTIVE", True)
    monkeypatch.setattr(ran, "_versions", {})
    monkeypatch.setattr(ran, "_noted", set())
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "podman run --rm image",
        "DIR/podman ps",
        "setpriv --pdeathsig TERM podman ps",
        "env -i A=b PATH=DIR:/bin:/usr/bin podman ps",
        "setpriv --pdeathsig TERM env HOME=/x podman --root=/y ps",
    ],
)
def test_a_program_that_ran_is_recorded_with_its_version(podman: Path, line: str) -> None:
    ran.note(line.replace("DIR", str(podman)).split(" "))
    assert ran.noted() == [("podman", "5.4.2", ran.distribution(), ran.cgroups())]
    ran.begin()
    assert ran.noted() == []


@pytest.mark.parametrize("line", ["gpuhook install podman", "sh -c podman", "env", "which podman"])
def test_a_program_named_only_as_an_argument_is_not_recorded(podman: Path, line: str) -> None:
    ran.note(line.split(" "))
    assert ran.noted() == []


def test_a_gpu_py_run_is_recorded_as_its_low_level_runtime(podman: Path) -> None:
    config = {"GPUHOOK_CONFIG": str(podman / "config.toml")}
    ran.note(["/opt/gpu-py", "run", "x"], config)
    assert [each[:2] for each in ran.noted()] == [("crun", "1.21")]
    ran.begin()
    ran.note(["/opt/gpu-py", "run", "x"], {"GPUHOOK_CONFIG": "/nonexistent"})
    ran.note(["env", f"GPUHOOK_CONFIG={podman}/config.toml", "gpu-py", "state", "x"])
    assert len(ran.noted()) == 1


def test_a_program_without_a_version_is_not_recorded(podman: Path) -> None:
    (podman / "crun").write_text("#!/bin/sh\necho 'it says nothing'\n")
    ran.note(["crun", "list"])
    assert ran.noted() == []


def test_programs_are_not_recorded_unless_requested(
    podman: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ran, "ACTIVE", False)
    ran.note(["podman", "ps"])
    ran.add("runc", "1.2", "Debian sid")
    assert ran.noted() == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('NAME="Debian GNU/Linux"\nVERSION_CODENAME=trixie\nVERSION_ID="13"\n', "Debian trixie"),
        (
            'NAME="Debian GNU/Linux"\nVERSION_CODENAME=x\nPRETTY_NAME="Debian GNU/Linux x/sid"\n',
            "Debian sid",
        ),
        ("NAME='Fedora Linux'\nVERSION_ID=43\n", "Fedora Linux 43"),
        ("", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_distribution_is_read_from_os_release(
    text: str | None, name: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/os-release").write_text(text)
    assert ran.distribution(tmp_path) == name


# A run ----------------------------------------------------------------------------------------

TESTS = """\
import pytest
import ran

@pytest.fixture(scope="session", autouse=True)
def fixture():
    ran.add("Docker", "Docker version 99.1", "Debian sid")  # what no test itself has called

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_one(): ran.add("runc", "runc version 1.1.5+ds1", "Debian sid")
def test_two(): ran.add("runc", "1.1.5", "Debian sid")
def test_three():
    ran.add("runc", "1.1.5", "Debian sid")
    assert False
def test_four(broken): pass
def test_five(): pytest.skip()
def test_six(record_property): record_property("ran", ["podman", "5.4.2+ds1", "Debian x", "v2"])
"""


@pytest.fixture
def run_tests(tmp_path: Path) -> Path:
    """A tree of tests, of which some fail."""
    folder = tmp_path / "tests/integration"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests/conftest.py").write_text('pytest_plugins = ["recording"]\n')
    (folder / "test_cdi_x.py").write_text(TESTS)
    return tmp_path


def pytest_in(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": ":".join(LIBRARIES), "PYTEST_ADDOPTS": ""}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading plugins takes half of a run
    argv = [sys.executable, "-m", "pytest", "-p", "xdist", "--basetemp=temporary", *words]
    argv += ["--results", "out/made.json"]
    return subprocess.run(argv, cwd=tree, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", ["-n0", "-n2"])
def test_a_run_records_the_outcome_of_each_test(run_tests: Path, how: str) -> None:
    done = pytest_in(run_tests, "tests/integration", how)
    assert done.returncode == 1, done.stdout + done.stderr
    made = results.read(run_tests / "out/made.json")
    assert made["parts"] == {"integration": {"passed": 3, "failed": 2, "skipped": 1}}
    rows = {(each["program"], each["version"]): each for each in made["programs"]}
    assert set(rows) == {("runc", "1.1.5"), ("podman", "5.4.2")}
    said = {"of": "Debian sid", "kind": "CDI documents", "passed": 2, "failed": 1, "skipped": 0}
    assert rows["runc", "1.1.5"].items() >= said.items()
    assert rows["podman", "5.4.2"]["cgroups"] == "v2"
    assert made["selection"] == "tests/integration"
    assert "| CDI documents 2, **1 failed**" in results.tables({"every-change": made})


def test_a_partial_run_records_its_selection(run_tests: Path) -> None:
    words = ("tests/integration/test_cdi_x.py", "-k", "one or two", "--deselect=tests/x")
    assert pytest_in(run_tests, *words).returncode == 0
    made = results.read(run_tests / "out/made.json")
    assert made["selection"] == f"{words[0]} -k one or two --deselect=tests/x"


def test_a_run_that_lacks_claimed_programs_fails(run_tests: Path) -> None:
    (run_tests / "claimed.json").write_text(json.dumps(result(row())))
    words = ("tests/integration", "-k", "one or two")  # a selection, which is fine without claims
    done = pytest_in(run_tests, *words, "--claimed=claimed.json")
    assert done.returncode == 1
    assert "tested with Docker 20.10 of Debian bookworm (containers)" in done.stdout


@pytest.mark.parametrize("fault", ["raise KeyboardInterrupt", "pytest.exit('x')"])
def test_an_interrupted_run_leaves_no_earlier_result_file(run_tests: Path, fault: str) -> None:
    (run_tests / "out").mkdir()
    (run_tests / "out/made.json").write_text("{}")
    with (run_tests / "tests/integration/test_cdi_x.py").open("a") as file:
        file.write(f"def test_last(): {fault}\n")
    assert pytest_in(run_tests, "tests").returncode == 2
    assert not (run_tests / "out/made.json").exists()


@pytest.mark.parametrize("how", ["-n0", "-n2"])
def test_a_run_ended_at_the_first_failure_leaves_no_result_file(run_tests: Path, how: str) -> None:
    assert pytest_in(run_tests, "tests", "-x", how).returncode != 0
    assert not (run_tests / "out/made.json").exists()


def test_a_run_with_a_collection_error_leaves_no_result_file(run_tests: Path) -> None:
    (run_tests / "tests/integration/test_other.py").write_text("1/0\n")
    assert pytest_in(run_tests, "tests").returncode == 2
    assert not (run_tests / "out/made.json").exists()
