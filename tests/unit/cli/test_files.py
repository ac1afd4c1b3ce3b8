"""gpuhook install --files and uninstall --files, run on a folder that stands for a system."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuhook.ground.errors import EngineError
from gpuhook.tools.cli import cli

PAGE = "usr/local/share/man/man8/gpu-py.8"
COMPLETION = "usr/local/share/bash-completion/completions/gpuhook"
UNIT = "etc/systemd/system/gpuhook-watch.service"
RECORD = "var/lib/gpuhook/files/record.json"


def tree(folder: Path) -> dict[str, tuple[str, int]]:
    """Return what is below a folder: text or target, and time, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = "link " + os.readlink(path) if path.is_symlink() else ""
        time = path.lstat().st_mtime_ns if path.is_file() else 0
        found[str(path)] = (kind or (path.read_text() if path.is_file() else "folder"), time)
    return found


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A system's folders, some of which have to be made."""
    for folder in ("var/lib", "usr/local/share/man", "etc/systemd/system"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def call(system: Path, *words: str) -> Result:
    given = [words[0], "--files", "--prefix", str(system), *words[1:]]
    return CliRunner().invoke(cli, given, catch_exceptions=False)


def install(system: Path, *words: str) -> Result:
    done = call(system, "install", *words)
    assert done.exit_code == 0, done.output
    return done


def uninstall(system: Path) -> str:
    done = call(system, "uninstall")
    assert done.exit_code == 0, done.output
    return done.output


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_all_of_it_is_taken_back(system: Path) -> None:
    before = tree(system)
    done = install(system)
    for path in (PAGE, COMPLETION, UNIT, "usr/local/share/man/man5/gpuhook.toml.5"):
        assert f"wrote {system / path}\n" in done.output
        assert (system / path).stat().st_mode & 0o777 == 0o644
    prolog = system / "usr/local/libexec/gpuhook/slurm/prolog"
    assert prolog.stat().st_mode & 0o777 == 0o755
    assert "No service is started" in done.output
    assert f"removed {system / UNIT}\n" in uninstall(system)
    assert tree(system) == before
    assert "nothing to undo" in uninstall(system)


def test_the_second_time_nothing_changes(system: Path) -> None:
    install(system)
    before = tree(system)
    done = install(system)
    assert done.output == "unchanged: manual pages, completion and units are up to date\n"
    assert tree(system) == before


def test_a_dry_run_changes_nothing(system: Path) -> None:
    before = tree(system)
    assert f"would write {system / PAGE}\n" in install(system, "--dry-run").output
    assert tree(system) == before


@pytest.mark.parametrize("text", ["somebody's own\n", ""])
def test_a_file_of_somebody_else_stays(system: Path, text: str) -> None:
    theirs = put(system / COMPLETION, text)
    done = install(system)
    assert f"{theirs} exists and isn't as gpuhook placed it" in done.output
    assert (system / PAGE).exists()
    assert str(theirs) not in uninstall(system)
    assert theirs.read_text() == text


def test_the_same_file_of_somebody_else_stays(system: Path) -> None:
    install(system)
    text = (system / COMPLETION).read_text()
    uninstall(system)
    theirs = put(system / COMPLETION, text)
    install(system)
    uninstall(system)
    assert theirs.read_text() == text


def test_a_link_of_somebody_else_stays(system: Path) -> None:
    target = put(system / "home/script", "somebody's own\n")
    link = system / COMPLETION
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    install(system)
    uninstall(system)
    assert link.readlink() == target
    assert target.read_text() == "somebody's own\n"


def test_a_link_that_took_a_files_place_stays(system: Path) -> None:
    install(system)
    page = system / PAGE
    page.rename(system / "moved.8")
    page.symlink_to(system / "moved.8")
    uninstall(system)
    assert page.readlink() == system / "moved.8"


def test_a_file_that_was_changed_since_stays(system: Path) -> None:
    install(system)
    page = put(system / PAGE, "corrected\n")
    assert str(page) in install(system).output
    install(system)
    assert page.read_text() == "corrected\n"
    uninstall(system)
    assert page.read_text() == "corrected\n"


def test_a_file_changed_after_the_last_installation_is_named(system: Path) -> None:
    install(system)
    unit = put(system / UNIT, "[Service]\n")
    assert f"{unit} was changed since: it is left alone" in uninstall(system)
    assert unit.read_text() == "[Service]\n"
    assert not (system / PAGE).exists()
    assert not (system / RECORD).exists()


def test_a_file_that_is_gone_is_placed_again(system: Path) -> None:
    install(system)
    (system / PAGE).unlink()
    assert f"wrote {system / PAGE}\n" in install(system).output


def test_what_an_older_version_placed_is_brought_up_to_date(system: Path) -> None:
    install(system)
    page = put(system / PAGE, "an older page\n")
    old = put(system / "usr/local/share/man/man8/old.8", "a page that is no more\n")
    record = json.loads((system / RECORD).read_text())
    for path in (page, old):
        record["files"][str(path)] = [hashlib.sha256(path.read_bytes()).hexdigest()]
    (system / RECORD).write_text(json.dumps(record))
    done = install(system)
    assert f"changed {page}\n" in done.output
    assert f"removed {old}\n" in done.output
    assert ".Dt GPU-PY 8" in page.read_text()
    assert not old.exists()


def test_what_a_package_has_is_not_placed_again(system: Path) -> None:
    put(system / "usr/share/man/man8/gpu-py.8.gz", "packed")
    put(system / "usr/lib/systemd/system/gpuhook-watch.service", "[Service]\n")
    done = install(system)
    assert (
        "a package has these already, so they are not placed: gpu-py.8, gpuhook-watch"
        in done.output
    )
    assert not (system / PAGE).exists()
    assert not (system / UNIT).exists()
    assert (system / COMPLETION).exists()


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_options_about_engines_are_refused(system: Path, command: str) -> None:
    before = tree(system)
    done = call(system, command, "--engine", "docker")
    assert done.exit_code == 2
    assert "--engine doesn't go with --files: run this twice." in done.output
    assert tree(system) == before


def test_a_damaged_record_is_named(system: Path) -> None:
    install(system)
    (system / RECORD).write_text("[1]")
    for command in ("install", "uninstall"):
        with pytest.raises(EngineError, match="is damaged"):
            call(system, command)
    assert (system / PAGE).exists()
