"""scripts/lib/same-files finds every difference between two builds."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/lib/same-files"


@pytest.fixture
def builds(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "one", tmp_path / "another one"
    for folder in folders:
        folder.mkdir()
        (folder / "a wheel").write_bytes(b"PK\0\1")
        (folder / "sdist").write_bytes(b"")
    return folders


def compare(builds: tuple[Path, Path]) -> tuple[int, str]:
    done = subprocess.run([SCRIPT, *builds], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_builds_that_are_the_same(builds: tuple[Path, Path]) -> None:
    assert compare(builds) == (0, "same: a wheel, 4 bytes\nsame: sdist, 0 bytes\n")


@pytest.mark.parametrize("at", [0, 1])
def test_a_file_that_differs_or_is_missing(builds: tuple[Path, Path], at: int) -> None:
    (builds[at] / "a wheel").write_bytes(b"PK\0\2")
    (builds[at] / "sdist").unlink()
    status, said = compare(builds)
    assert status == 1
    assert "differs: a wheel\n" in said
    assert "differs: sdist\n" in said
