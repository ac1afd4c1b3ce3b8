"""A full disk: each command that writes fails with a message, and every file is unchanged."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import run
from harness.driver import Driver
from harness.installation import Installation, write_config

PAGES = 20  # free pages; more than a command needs
NO_SPACE = "No space left on device. Free space on its filesystem, and run this again."
ENGINES = ("docker", "podman")  # one file is changed, the other is new


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small, separate filesystem."""
    place = tmp_path / "disk"
    place.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", place]).ok()
    try:
        yield place
    finally:
        run(["umount", place]).ok()


def content(folder: Path) -> dict[Path, bytes | None]:
    """Return the content of every file below a folder, and None for each folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def fill(disk: Path, left: int) -> Path:
    """Leave ``left`` free pages on the disk; return the file that takes the others."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        space = os.fstatvfs(file.fileno())
        os.posix_fallocate(file.fileno(), 0, (space.f_bfree - left) * space.f_bsize)
    return filler


def daemon(disk: Path) -> Path:
    """Create the settings of a Docker; return their path."""
    path = disk / "etc/docker/daemon.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"log-level": "warn"}\n')
    (disk / "var/lib").mkdir(parents=True)
    return path


def check(disk: Path, words: list[str | Path]) -> None:
    """Check that a command changes nothing without enough space, and that it works with it."""
    before = content(disk)
    for left in range(PAGES):
        filler = fill(disk, left)
        done = run(words)
        filler.unlink()
        if done.status == 0:
            break
        assert content(disk) == before, done
        [line] = done.stderr.splitlines()
        assert line.startswith("gpuhook: ")
        assert "No space left on device" in line
        assert line.endswith(". Free space on its filesystem, and run this again.")
    assert 0 < left < PAGES - 1
    assert content(disk) != before


@pytest.mark.parametrize("engine", ENGINES)
def test_install_on_a_full_disk_fails_and_changes_nothing(
    disk: Path, installation: Installation, configs: dict[str, Path], engine: str
) -> None:
    daemon(disk)
    words: list[str | Path] = ["env", f"GPUHOOK_CONFIG={configs['runc']}", installation.command]
    check(disk, [*words, "install", f"--engine={engine}", f"--prefix={disk}"])


def test_install_with_cdi_specs_can_be_repeated_after_a_full_disk(
    disk: Path, installation: Installation, configs: dict[str, Path]
) -> None:
    """Each file is completely old or completely new, and the next run does the rest."""
    settings = daemon(disk)
    before = content(disk)
    words: list[str | Path] = ["env", f"GPUHOOK_CONFIG={configs['runc']}", installation.command]
    install = [*words, "install", "--engine=docker", f"--prefix={disk}", "--cdi"]
    seen = set()
    for left in range(PAGES):
        filler = fill(disk, left)
        done = run(install)
        filler.unlink()
        seen.add(settings.read_bytes())
        if done.status == 0:
            break
        assert done.stderr.endswith(". Free space on its filesystem, and run this again.\n")
    assert 0 < left < PAGES - 1
    assert len(seen) == 2
    run([*words, "uninstall", "--engine=docker", f"--prefix={disk}"]).ok()
    assert content(disk) == before


def test_config_set_on_a_full_disk_fails_and_changes_nothing(
    disk: Path, installation: Installation, driver: Driver
) -> None:
    config = write_config(disk / "etc", driver.root, ["runc"])
    words: list[str | Path] = [installation.command, "config", "set", "--config", config]
    check(disk, [*words, "disable-require=true"])


def test_refresh_on_a_full_disk_reports_that_nothing_was_saved(
    disk: Path, installation: Installation, driver: Driver
) -> None:
    """refresh reports why it saves nothing, and list works without saving anything."""
    config = write_config(disk / "etc", driver.root, ["runc"])
    state = disk / "etc/state"
    words: list[str | Path] = [installation.command, "refresh", "--config", config]
    for left in range(PAGES):
        filler = fill(disk, left)
        done = run(words)
        listed = run([installation.command, "list", "--config", config]).ok().stdout
        filler.unlink()
        shutil.rmtree(state, ignore_errors=True)
        assert listed.count("NVIDIA H200") == len(driver.gpus)
        if done.status == 0:
            break
        [line] = done.stderr.splitlines()
        assert "nothing was saved" in line
        assert line.endswith(NO_SPACE)
    assert 0 < left < PAGES - 1


def test_refresh_without_room_for_a_state_folder_is_refused(
    disk: Path, installation: Installation, driver: Driver
) -> None:
    run(["mount", "-o", "remount,nr_inodes=1", disk])  # leaves no inode for the folder
    config = write_config(disk.parent / "etc", driver.root, ["runc"])
    config.write_text(config.read_text().replace(str(disk.parent / "etc/state"), f"{disk}/state"))
    done = run([installation.command, "refresh", "--config", config]).failed()
    assert f"The state folder {disk}/state can't be used" in done.stderr
    assert done.stderr.endswith(f"{NO_SPACE}\n")


def test_a_missing_driver_is_reported_on_a_full_disk(
    disk: Path, installation: Installation
) -> None:
    """gpuhook reports the missing driver, and not that it can't save this result."""
    config = write_config(disk / "etc", disk, ["runc"])
    for left in range(4):
        filler = fill(disk, left)
        done = run([installation.command, "list", "--config", config]).failed()
        filler.unlink()
        assert "There is no NVIDIA driver" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_cdi_spec_on_a_full_disk_is_unchanged(
    disk: Path, installation: Installation, configs: dict[str, Path]
) -> None:
    path = disk / "nvidia.com-gpu.yaml"
    path.write_text("old")
    words: list[str | Path] = [installation.command, "cdi", "generate", "--config", configs["runc"]]
    check(disk, [*words, "--output", path])
