"""Command lines other than create and run, which go to the low-level runtime unchanged."""

import os
import subprocess
from pathlib import Path

import pytest
from harness.bundles import GpuBundle
from harness.commands import run
from harness.driver import Driver
from harness.installation import Installation, write_config
from harness.recorder import Recorder, recorder

VERBS = [
    "checkpoint",
    "delete",
    "events",
    "exec",
    "features",
    "kill",
    "list",
    "pause",
    "ps",
    "restore",
    "resume",
    "spec",
    "start",
    "state",
    "update",
    "a-verb-of-the-future",
]
ODD_WORDS = ["two words", "", "*", "$(id)", "`id`", "--", "-x", "new\nline", "create", "\\", "é"]


@pytest.fixture
def recording(workspace: Path, tmp_path: Path) -> Recorder:
    return recorder(tmp_path / "recorder", "cat\nexit 7")


@pytest.fixture
def config(driver: Driver, recording: Recorder, tmp_path: Path) -> Path:
    return write_config(tmp_path / "etc", driver.root, [recording.path])


@pytest.mark.parametrize("verb", VERBS)
def test_arguments_input_and_exit_status_pass_through_unchanged(
    installation: Installation, recording: Recorder, config: Path, verb: str
) -> None:
    words = ["--root", "/a b", "--log=/x y", "--log-format", "json", verb, *ODD_WORDS]
    done = run(
        [installation.runtime, *words], env={"GPUHOOK_CONFIG": str(config)}, stdin=b"input\0\n"
    )
    assert done.status == 7
    assert done.stdout == "input\0\n"
    assert done.stderr == ""
    [call] = recording.calls()
    assert call.argv == words


@pytest.mark.parametrize("words", [["--version"], ["-v"], ["--help"], [], ["--root", "/x", "-h"]])
def test_a_command_line_without_a_verb_passes_through_unchanged(
    installation: Installation, recording: Recorder, config: Path, words: list[str]
) -> None:
    done = run([installation.runtime, *words], env={"GPUHOOK_CONFIG": str(config)})
    assert done.status == 7
    [call] = recording.calls()
    assert call.argv == words


def test_the_environment_passes_through_and_does_not_affect_gpu_py(
    installation: Installation, recording: Recorder, config: Path, tmp_path: Path
) -> None:
    """The low-level runtime gets the caller's environment. Python and the loader get none of it."""
    trap = tmp_path / "sitecustomize.py"
    trap.write_text("raise SystemExit('code of the caller ran')\n")
    environ = {
        "GPUHOOK_CONFIG": str(config),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path),
        "PYTHONHOME": "/proc/none",
        "PYTHONSTARTUP": str(trap),
        "LD_LIBRARY_PATH": str(tmp_path),
        "LISTEN_FDS": "0",
        "XDG_RUNTIME_DIR": "/run/user/0",
        "EMPTY": "",
        "TWO_LINES": "one\ntwo",
        "QUOTES": "'\"`$(id)",
        "lower": "case",
        "IFS": "x",
        "of-no.shell": "value",
    }
    done = subprocess.run(
        [installation.runtime, "state", "x"],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 7, done
    [call] = recording.calls()
    assert call.environ == environ


def test_output_of_real_runtimes_is_unchanged_for_other_verbs(bundle: GpuBundle) -> None:
    low_level = str(bundle.settings).split("/")[-2]
    for words in (["--version"], ["state", "no-such-container"], ["list"], ["no-such-verb"]):
        ours = bundle.call(bundle.gpu_py, *words, env=bundle.env)
        theirs = bundle.call(low_level, *words)
        assert (ours.status, ours.stdout) == (theirs.status, theirs.stdout)


@pytest.mark.parametrize("text", ["[nvidia-container-runtime\n", 'runtimes = "no list"\n'])
def test_a_broken_config_does_not_stop_other_verbs(
    installation: Installation, tmp_path: Path, text: str
) -> None:
    """Containers that run can still be stopped and deleted."""
    config = tmp_path / "config.toml"
    config.write_text(text)
    done = run([installation.runtime, "--version"], env={"GPUHOOK_CONFIG": str(config)}).ok()
    assert "version" in done.stdout
