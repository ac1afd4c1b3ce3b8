"""Debian's maintainer scripts on a host where containers start at the same time."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

OLD = "0.1.0"  # the version before an upgrade; at a first installation, postinst writes config.toml
DEBIAN = Path(__file__).parents[3] / "packaging/debian"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("gpuhook/postinst", "configure"),
        ("gpuhook/prerm", "upgrade"),
        ("gpuhook/postrm", "remove"),
        ("addition/prerm", "upgrade"),
    ],
)
def test_an_upgrade_retries_removal_of_a_folder_in_use(
    script: str, why: str, tmp_path: Path
) -> None:
    """A container start can make rm fail with "Directory not empty"; here it fails three times."""
    done, calls = run_with_rm(script, why, tmp_path, failing=3)
    assert done.returncode == 0, done.stderr
    assert calls > 3 or script != "gpuhook/postinst"


def test_remaining_modules_of_the_old_version_are_an_error(tmp_path: Path) -> None:
    done, _ = run_with_rm("gpuhook/postinst", "configure", tmp_path, failing=99)
    assert done.returncode != 0


def filled(script: str) -> str:
    """Return a script as it is in an additional package without units."""
    text = (DEBIAN / script).read_text()
    return text.replace("@PACKAGE@", "gpuhook-hpc").replace("@FOLDER@", "gpuhook/hpc")


def run_with_rm(
    script: str, why: str, folder: Path, failing: int
) -> tuple["subprocess.CompletedProcess[str]", int]:
    """Run a script with an rm that fails so often at first; return the number of its calls, too."""
    for name in ("find", "sh", "wc"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    rm, calls = folder / "rm", folder / "calls"
    calls.touch()
    rm.write_text(f"#!/bin/sh\necho >>{calls}\n[ $(wc -l <{calls}) -gt {failing} ]\n")
    rm.chmod(0o755)
    argv = [str(folder / "sh"), "-c", filled(script), script, why, OLD]
    env = {"PATH": str(folder)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    return done, len(calls.read_text().splitlines())


def run_below(
    root: Path, script: str, why: str, path: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a script as if a folder were the root folder of the host."""
    text = filled(script)
    for name in ("/etc/gpuhook", "/var/lib/gpuhook", "/run/gpuhook", "/usr/lib/gpuhook"):
        text = text.replace(name, f"{root}{name}")
    env = {"PATH": path or os.defpath}
    argv = ["/bin/sh", "-c", text, script, why, OLD]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_a_purge_empties_a_linked_configuration_folder(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "etc/gpuhook"
    elsewhere.mkdir()
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    (elsewhere / "config.toml").touch()
    done = run_below(tmp_path, "gpuhook/postrm", "purge")
    assert (done.returncode, done.stderr) == (0, "")
    assert [*elsewhere.iterdir()] == []


@pytest.mark.parametrize("empty", [True, False])
def test_a_purge_succeeds_if_a_mounted_folder_can_be_emptied(empty: bool, tmp_path: Path) -> None:
    """A mount point can't be removed, but emptied; if it can't be emptied, the purge fails."""
    for name in ("etc/gpuhook", "var/lib/gpuhook"):
        (tmp_path / name).mkdir(parents=True)
    if not empty:
        (tmp_path / "var/lib/gpuhook/file").touch()
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("rm", "rmdir"):
        (programs / name).write_text('#!/bin/sh\n[ "$1" = -f ]\n')
        (programs / name).chmod(0o755)
    text = run_below(tmp_path, "gpuhook/postrm", "purge", f"{programs}:{os.defpath}")
    assert (text.returncode == 0) is empty


@pytest.mark.parametrize(
    ("script", "why"), [("gpuhook/postinst", "configure"), ("gpuhook/prerm", "upgrade")]
)
def test_stale_modules_behind_a_link_are_removed(script: str, why: str, tmp_path: Path) -> None:
    """If an administrator made the folder a link, dpkg leaves the link, and unpacks behind it."""
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "usr/lib/gpuhook"
    stale = elsewhere / "gpuhook/__pycache__"
    stale.mkdir(parents=True)
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    programs = tmp_path / "programs"  # without py3clean and py3compile
    programs.mkdir()
    for name in ("find", "rm", "sh"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    assert run_below(tmp_path, script, why, str(programs)).returncode == 0
    assert not stale.exists()
