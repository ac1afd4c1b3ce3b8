"""Commands that write a file for --output, and the owner of that file."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from machines import gpu, machine

from gpuhook.base.config.model import Config
from gpuhook.base.errors import UntrustedPathError
from gpuhook.cluster.labels import node_labels
from gpuhook.core.cdi.generate import SpecSource
from gpuhook.hpc.slurm import devices
from gpuhook.monitor.vendors import survey
from gpuhook.nvidia_cli import ctk_cdi
from gpuhook.nvidia_cli.ctk import ctk
from gpuhook.tools.cdi import refresh
from gpuhook.tools.cli import cdi_generate, cli
from gpuhook.vendors.nvidia.vendor import VENDOR

DOCUMENT = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"env": ["A=1"]}}],
}
# Words of a command -> words that it needs in addition to --output.
COMMANDS = {
    "gpuhook cdi generate": "",
    "gpuhook cdi transform root": "--from /a --to /b",
    "gpuhook labels": "",
    "gpuhook slurm gres": "--node n",
    "gpuhook slurm oci": "",
    "nvidia-ctk cdi generate": "",
    "nvidia-ctk cdi transform root": "--from /a --to /b",
    "nvidia-ctk config": "--set nvidia-container-runtime.mode=cdi",
    "nvidia-ctk config default": "",
    "nvidia-ctk config create-default": "",
    "nvidia-ctk config generate-default": "",
}
PROGRAMS = {"gpuhook": cli, "nvidia-ctk": ctk}


def with_output(words: str, command: click.Command) -> Iterator[str]:
    if any("--output" in option.opts for option in command.params):
        yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from with_output(f"{words} {name}", found)


def test_every_command_with_an_output_option_is_tested() -> None:
    found = {each for name, program in PROGRAMS.items() for each in with_output(name, program)}
    assert found == {*COMMANDS}


@pytest.fixture(autouse=True)
def devices_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SpecSource(VENDOR, machine(gpu(0, 0)), Config(), "/opt/bin/gpuhook-cdi-hook")
    monkeypatch.setattr(cdi_generate, "_sources", lambda *_, **__: ([source], []))
    monkeypatch.setattr(refresh, "source_of", lambda *_, **__: source)
    monkeypatch.setattr(ctk_cdi, "_hook", lambda _: "/opt/bin/gpuhook-cdi-hook")
    monkeypatch.setattr(survey, "present", lambda *_: ([], []))
    monkeypatch.setattr(node_labels, "labels", lambda *_: ({"nvidia.com/gpu.count": "1"}, [], []))
    none = SimpleNamespace(devices=[], warnings=[], failed=[])
    monkeypatch.setattr(devices, "devices_here", lambda _: none)
    monkeypatch.setattr(devices, "links", lambda *_: ({}, []))


@pytest.mark.protects(
    "kept-owner", "another user's file in a world-writable folder is refused as root's output file"
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes into others' files")
@pytest.mark.parametrize("words", COMMANDS)
def test_another_users_output_file_in_a_sticky_folder_is_refused(
    tmp_path: Path, words: str
) -> None:
    """This holds even if the file has the same content, because its owner could change it later."""
    program, *rest = f"{words} {COMMANDS[words]}".split()
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "out.json"

    def run() -> None:
        done = CliRunner().invoke(
            PROGRAMS[program],
            [*rest, "--output", str(path)],
            input=json.dumps(DOCUMENT),
            catch_exceptions=False,
        )
        assert done.exit_code == 0, done.output

    run()
    written = path.read_bytes()
    assert written
    os.chown(path, 1000, 1000)
    path.write_bytes(b"old")
    run()
    assert (path.read_bytes(), path.stat().st_uid) == (written, 1000)
    folder.chmod(0o1777)
    for text in (b"old", written):
        with path.open("r+b") as file:  # no O_CREAT, which fs.protected_regular would refuse
            file.write(text)
            file.truncate()
        with pytest.raises(UntrustedPathError, match="belongs to user 1000, who would control"):
            run()
        assert path.read_bytes() == text
    path.unlink()
    run()
    assert (path.read_bytes(), path.stat().st_uid) == (written, 0)


@pytest.mark.parametrize("words", COMMANDS)
def test_file_names_with_control_characters_are_escaped_on_output(
    tmp_path: Path, words: str
) -> None:
    program, *rest = f"{words} {COMMANDS[words]}".split()
    folder = tmp_path / "\x1b]0;x\x07\x9b2J\u202e\nwrote y\udcff"
    folder.mkdir()
    argv = [*rest, "--output", str(folder / "out.json")]
    for _ in range(2):  # the second run has nothing to change
        done = CliRunner().invoke(
            PROGRAMS[program],
            argv,
            input=json.dumps(DOCUMENT),
            catch_exceptions=False,
            color=True,
        )
        assert done.exit_code == 0, done.output
        assert [line for line in done.output.split("\n") if not line.isprintable()] == []
        assert "\nwrote y" not in done.output
