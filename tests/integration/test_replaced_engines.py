"""Engines of a folder that replace the system's, as ``scripts/test --engines`` runs the tests."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.commands import run

ROOT = Path(__file__).parents[2]
With = Callable[..., str]


@pytest.fixture
def replaced(tmp_path: Path) -> With:
    """A function that runs a shell line with a folder's programs in place of the system's."""
    folder = tmp_path / "engines"
    folder.mkdir()
    for name in ("runc", "gpuhook-test-engine"):
        program = folder / name
        program.write_text(f"#!/bin/sh\necho replaced {name}\n")
        program.chmod(0o755)
    (folder / "README").write_text("no program\n")

    def shell(line: str) -> str:
        words = ["unshare", "--mount", str(ROOT / "scripts/lib/with-engines"), str(folder)]
        return run([*words, "sh", "-c", line]).ok().stdout

    return shell


def test_a_program_is_replaced_at_its_absolute_path(replaced: With) -> None:
    place = shutil.which("runc")
    assert replaced(f"{place} --version") == "replaced runc\n"
    assert replaced("runc --version") == "replaced runc\n"
    assert "replaced" not in run([str(place), "--version"]).stdout


def test_a_program_is_replaced_in_an_overlay_of_its_folder(replaced: With, tmp_path: Path) -> None:
    """Since version 1.2, runc starts its own second process from such an overlay."""
    place = Path(shutil.which("runc") or "").resolve()
    (tmp_path / "seen").mkdir()
    (tmp_path / "empty").mkdir()
    layers = f"lowerdir={place.parent}:{tmp_path}/empty"
    mounted = f"mount -t overlay -o {layers} overlay {tmp_path}/seen"
    assert replaced(f"{mounted} && {tmp_path}/seen/runc --version") == "replaced runc\n"


def test_a_program_that_the_system_lacks_is_found(replaced: With) -> None:
    assert shutil.which("gpuhook-test-engine") is None
    assert replaced("gpuhook-test-engine") == "replaced gpuhook-test-engine\n"


def test_a_folder_without_programs_is_refused(tmp_path: Path) -> None:
    words = ["unshare", "--mount", str(ROOT / "scripts/lib/with-engines"), str(tmp_path), "true"]
    done = run(words)
    assert done.status == 2
    assert f"{tmp_path} has no program" in done.stderr
