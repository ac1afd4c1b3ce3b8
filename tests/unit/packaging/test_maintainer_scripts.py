"""Debian's maintainer scripts on a machine where containers start meanwhile."""

import shutil
import subprocess
from pathlib import Path

import pytest

DEBIAN = Path(__file__).parents[3] / "packaging/debian"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("gpuhook/postinst", "configure"),
        ("gpuhook/prerm", "upgrade"),
        ("gpuhook/postrm", "remove"),
        ("gpuhook-simulate/prerm", "upgrade"),
    ],
)
def test_a_folder_that_a_start_writes_into_fails_no_upgrade(
    script: str, why: str, tmp_path: Path
) -> None:
    """rm ends with "Directory not empty" then: here three times, and nothing else is found."""
    done, calls = run_with_rm(script, why, tmp_path, failing=3)
    assert done.returncode == 0, done.stderr
    assert calls > 3 or script != "gpuhook/postinst"


def test_modules_of_the_old_version_that_stay_are_an_error(tmp_path: Path) -> None:
    done, _ = run_with_rm("gpuhook/postinst", "configure", tmp_path, failing=99)
    assert done.returncode != 0


def run_with_rm(
    script: str, why: str, folder: Path, failing: int
) -> tuple["subprocess.CompletedProcess[str]", int]:
    """Run a script with an rm that fails so often at first; return how often it was called, too."""
    for name in ("find", "sh", "wc"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    rm, calls = folder / "rm", folder / "calls"
    calls.touch()
    rm.write_text(f"#!/bin/sh\necho >>{calls}\n[ $(wc -l <{calls}) -gt {failing} ]\n")
    rm.chmod(0o755)
    argv = [str(folder / "sh"), str(DEBIAN / script), why]
    env = {"PATH": str(folder)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    return done, len(calls.read_text().splitlines())
