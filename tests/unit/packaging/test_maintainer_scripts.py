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
    """rm ends with "Directory not empty" then; here always, and nothing else is found."""
    for name in ("find", "sh"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    rm = tmp_path / "rm"
    rm.write_text(f"#!/bin/sh\necho failed >>{tmp_path}/rm-was-called\nexit 1\n")
    rm.chmod(0o755)
    argv = [str(tmp_path / "sh"), str(DEBIAN / script), why]
    env = {"PATH": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rm-was-called").exists() or why == "upgrade"  # with nothing compiled
