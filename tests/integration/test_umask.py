"""File modes of root's commands, which umask 077, as on hardened hosts, doesn't change."""

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.commands import run
from harness.driver import Driver
from harness.installation import Installation, write_config

COMMANDS = {
    "install": (
        "install",
        "--prefix={folder}",
        "--engine=all",
        "--gpus",
        "--bin-dir={folder}/bin/of",
    ),
    "podman": ("install", "--prefix={folder}", "--engine=podman", "--hook=precreate"),
    "documents": ("install", "--prefix={folder}", "--engine=podman", "--cdi"),
    "refresh": ("refresh", "--config={config}"),
    "config": ("config", "set", "--config={folder}/new/config.toml", "disable-require"),
    "generate": ("cdi", "generate", "--config={config}", "--output={folder}/new/cdi"),
    "driver-folder": ("driver-folder", "--config={config}", "{folder}/new/nvidia"),
}


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of everything in a folder."""
    return {
        str(path.relative_to(folder)): path.lstat().st_mode
        for path in sorted(folder.rglob("*"))
        if not path.is_symlink()
    }


@pytest.fixture
def made(
    installation: Installation, driver: Driver, tmp_path: Path
) -> Callable[[str, str], dict[str, int]]:
    def made(command: str, umask: str) -> dict[str, int]:
        folder = tmp_path / umask
        config = write_config(folder / "etc", driver.root, ["runc"])
        for path in (folder, config.parent, config):
            path.chmod(0o755)
        (folder / "etc/docker").mkdir()
        words = [word.format(folder=folder, config=config) for word in COMMANDS[command]]
        script = f'umask {umask}; exec "$@"'
        env = {"GPUHOOK_CONFIG": str(config)}
        run(["sh", "-c", script, "sh", installation.command, *words], env).ok()
        return modes(folder)

    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_files_made_by_a_command_do_not_depend_on_the_umask(
    made: Callable[[str, str], dict[str, int]], command: str
) -> None:
    closed = made(command, "077")
    # State files are named after the path of the file that they are about.
    assert {path.replace("%2F077%2F", "%2F022%2F"): mode for path, mode in closed.items()} == (
        made(command, "022")
    )
    assert len(closed) > len(("etc", "etc/config.toml", "etc/docker"))
