"""gpuhook config set: several at once, and what is left behind."""

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuhook.nvidia_cli.ctk import ctk
from gpuhook.tools.cli import cli, config

# Begins when all are there; each lets others read what it has read.
CHANGE = """
import os, sys, time
from gpuhook.{module} import {command} as command
from gpuhook.{where} import config, {file}
change = config.set_value
{file}.set_value = lambda *given: (time.sleep(0.05), change(*given))[1]
open(sys.argv[1] + f".{{os.getpid()}}", "w").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.001)
command(sys.argv[2:])
"""
GPUHOOK = CHANGE.format(module="tools.cli", command="cli", where="tools.cli", file="config")
CTK = CHANGE.format(module="nvidia_cli.ctk", command="ctk", where="nvidia_cli", file="ctk_config")
CTK = CTK.replace("change = config.set_value", "change = ctk_config.set_value")
CTK = CTK.replace("import config, ctk_config", "import ctk_config")
SETTINGS = {
    "disable-require": True,
    "swarm-resource": "X",
    "nvidia-container-cli.root": "/x",
    "nvidia-container-runtime.mode": "spec",
    "gpuhook.missing-driver": "ignore",
}


def test_of_several_at_once_each_changes_it(tmp_path: Path) -> None:
    path, go = tmp_path / "config.toml", tmp_path / "go"
    path.write_text("# mine\n")
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    running = []
    for number, (key, value) in enumerate(SETTINGS.items()):
        word = f"{key}={str(value).lower() if value is True else value}"
        file = link if number % 2 else path
        words = ["config", "set", f"--config={file}", word]
        if number > 2:
            words = ["config", f"--config-file={file}", "--in-place", f"--set={word}"]
        argv = [sys.executable, "-c", CTK if number > 2 else GPUHOOK, str(go), *words]
        running.append(subprocess.Popen(argv, stderr=subprocess.PIPE, text=True))
    try:
        end = time.monotonic() + 60
        while len([*tmp_path.glob("go.*")]) < len(running) and time.monotonic() < end:
            time.sleep(0.01)
        go.touch()
        for process in running:
            assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    found = tomllib.loads(path.read_text())
    for key, value in SETTINGS.items():
        within = found
        *sections, last = key.split(".")
        for section in sections:
            within = within[section]
        assert within[last] == value
    assert [each for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize("program", ["gpuhook", "nvidia-ctk"])
def test_who_changes_it_for_long_is_named(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    monkeypatch.setattr(config, "_PATIENCE", 0.05)
    words = ["config", "set", "--config", str(path), "disable-require"]
    if program == "nvidia-ctk":
        words = ["config", "--config-file", str(path), "--in-place", "--set", "disable-require"]
    with config.changing(str(path)):
        done = CliRunner().invoke(cli if program == "gpuhook" else ctk, words)
        assert f"has been changing {path} for more than" in str(done.exception)
    assert not path.exists()
    assert CliRunner().invoke(cli if program == "gpuhook" else ctk, words).exit_code == 0
    assert [*tmp_path.iterdir()] == [path]
