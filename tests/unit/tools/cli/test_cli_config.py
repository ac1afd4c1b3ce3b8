"""gpuhook config: concurrent changes, and files that are left behind."""

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuhook.nvidia_cli.ctk import ctk
from gpuhook.tools.cli import cli, config

# Waits until all processes have started, and pauses between reading and writing, so that the
# others read the same content.
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


def test_concurrent_config_changes_are_all_kept(tmp_path: Path) -> None:
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
            assert (process.communicate(timeout=300)[1], process.returncode) == ("", 0)
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
def test_a_config_change_blocked_for_long_is_refused(
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


# get, unset, path, edit ------------------------------------------------------------------------


def call(path: Path, *words: str, **environment: str) -> Result:
    first, *rest = words
    line = ["config", first, f"--config={path}", *rest]
    return CliRunner().invoke(cli, line, prog_name="gpuhook", env=environment)


@pytest.mark.parametrize(
    ("key", "value", "default"),
    [
        ("nvidia-container-runtime.mode", "spec", "hook"),
        ("disable-require", "true", "false"),
        ("swarm-resource", "X", ""),
        ("nvidia-container-runtime.runtimes", '["crun", "runc"]', None),
        ("features.disable-cuda-compat-lib-hook", "true", "false"),
    ],
)
def test_a_setting_is_read_and_removed(
    tmp_path: Path, key: str, value: str, default: str | None
) -> None:
    path = tmp_path / "config.toml"
    before = "# mine\n[nvidia-container-cli]\n# kept\nroot = '/x' # too\n"
    path.write_text(before)
    first = call(path, "get", key).output
    assert default is None or first == f"{default}\n"
    assert call(path, "set", f"{key}={value}").exit_code == 0
    assert call(path, "get", key).output == f"{value}\n" != first
    changed = path.read_text()
    assert call(path, "unset", key, "--dry-run").output != changed == path.read_text()
    for _ in range(2):  # the second call has nothing to remove
        assert call(path, "unset", key).exit_code == 0
        assert tomllib.loads(path.read_text())["nvidia-container-cli"] == {"root": "/x"}
    assert call(path, "get", key).output == first
    assert all(line in path.read_text() for line in before.splitlines())


@pytest.mark.parametrize("words", [["get"], ["unset"], ["unset", "disable-require"]])
def test_unknown_keys_are_refused(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("disable-require = true\n")
    done = call(path, *words, "gpuhook.gtae")
    assert "Did you mean gpuhook.gate?" in str(done.exception)
    assert path.read_text() == "disable-require = true\n"


def test_keys_without_effect_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("quux = 1\ndisable-require = true\n")
    assert call(path, "unset", "quux").exit_code == 0
    assert path.read_text() == "disable-require = true\n"


def test_unset_creates_no_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert call(path, "unset", "disable-require").exit_code == 0
    assert call(path, "get", "disable-require").exit_code != 0  # get fails without the named file
    assert not path.exists()


def test_config_path_prints_the_file_in_use(tmp_path: Path) -> None:
    named = tmp_path / "a.toml"
    assert call(named, "path").output == f"{named}\n"
    for chosen in (str(named), None):
        done = CliRunner().invoke(cli, ["config", "path"], env={"GPUHOOK_CONFIG": chosen})
        assert done.output == f"{chosen or '/etc/gpuhook/config.toml'}\n"


def editor(folder: Path, script: str) -> str:
    """Return an editor program that changes the file that it is given."""
    path = folder / "editor"
    path.write_text(f"#!/bin/sh\nset -e\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_config_edit_saves_the_edited_file(tmp_path: Path) -> None:
    """A missing file starts as the commented default, and the file's mode is unchanged."""
    path = tmp_path / "config.toml"
    uncomment = "sed -i 's/^#disable-require = .*/disable-require = true/' \"$1\""
    for script in (uncomment, 'echo \'swarm-resource = "X"\' >"$1"'):
        done = call(path, "edit", VISUAL=editor(tmp_path, script))
        assert (done.exit_code, done.output) == (0, f"wrote {path}\n")
        assert ("disable-require = true" in path.read_text()) is (script == uncomment)
        path.chmod(0o600)
    assert path.read_text() == 'swarm-resource = "X"\n'
    assert path.stat().st_mode & 0o777 == 0o600
    done = call(path, "edit", VISUAL=editor(tmp_path, "true"))
    assert (done.exit_code, done.output) == (0, f"{path}: unchanged\n")


@pytest.mark.parametrize("wrong", ["swarm-resource = 1", "[", "gpuhook = { vendors = 1 }"])
def test_an_edited_file_with_an_error_is_not_saved(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text("disable-require = true\n")
    done = call(path, "edit", VISUAL=editor(tmp_path, f"echo '{wrong}' >\"$1\""))
    assert "error: " in done.stderr
    assert "is unchanged: the edited text has errors" in str(done.exception)
    assert path.read_text() == "disable-require = true\n"


def test_a_change_made_during_the_edit_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("disable-require = true\n")
    script = f"echo 'swarm-resource = \"X\"' >\"$1\"; echo >'{path}'"
    done = call(path, "edit", VISUAL=editor(tmp_path, script))
    assert "was changed by another program" in str(done.exception)
    assert path.read_text() == "\n"
