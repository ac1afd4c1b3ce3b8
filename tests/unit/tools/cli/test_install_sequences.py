"""Uninstall after installs in any order, which restores files and folders."""

import shutil
import tempfile
from pathlib import Path

import installs
from click.testing import CliRunner
from hypothesis import given, settings

from gpuhook.base.errors import GpuhookError
from gpuhook.tools.cli import cli
from gpuhook.tools.vendors.nvidia import program_links


def call(system: Path, *words: str) -> bool:
    """Run a command; return whether it succeeded."""
    programs = [f"--runtime-path={system}/opt/bin/gpu-py"] if words[0] == "install" else []
    more = [
        word.replace("=/opt/", f"={system}/opt/").replace("PREFIX", str(system))
        for word in words[1:]
    ]
    try:
        line = [words[0], f"--prefix={system}", *programs, *more]
        return CliRunner().invoke(cli, line, catch_exceptions=False).exit_code == 0
    except GpuhookError:
        return False


def check(system: Path, texts: dict[str, str], commands: list[list[str]]) -> None:
    (system / "opt/bin").mkdir(parents=True)
    for name in ("gpu-py", *program_links.LINKS.values()):
        (system / "opt/bin" / name).touch(0o755)
    installs.write(system, texts)
    before = installs.content(system)
    for words in commands:
        last = installs.content(system)
        if not call(system, *words):
            assert installs.content(system) == last, words
    assert call(system, "uninstall")
    assert installs.content(system) == before


@settings(max_examples=150)
@given(installs.systems(), installs.commands())
def test_any_install_sequence_is_restored_by_uninstall(
    texts: dict[str, str], commands: list[list[str]]
) -> None:
    system = Path(tempfile.mkdtemp())
    try:
        check(system, texts, commands)
    finally:
        shutil.rmtree(system)


def test_installing_a_hook_for_a_second_stage_is_undone_completely(tmp_path: Path) -> None:
    """The folders of a removed first hook already contain the second hook's file."""
    podman = ["install", "--engine=podman"]
    check(tmp_path, {}, [[*podman, "--hook=precreate"], [*podman, "--hook=prestart"]])


def test_a_folder_for_nvidia_names_outside_the_prefix_is_refused(tmp_path: Path) -> None:
    """It is refused before anything is written."""
    names = ["install", "--engine=docker", "--gpus", "--bin-dir=/opt/names"]
    check(tmp_path, {}, [names, ["install", "--engine=docker"], names])
