"""Steps that gpuhook --debug prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

CODE = "from gpuhook.tools.cli import main; main()"
STEP = re.compile(r"gpuhook: +\d+[.]\d{3} s(?: \[\d+\])?: (.*)")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CODE, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_each_step_is_printed_with_its_time(tmp_path: Path) -> None:
    """The steps go only to standard error, and they name no files of Python itself."""
    path = tmp_path / "config\x1b[2J.toml"
    path.write_text("disable-require = true\n")
    words = ["config", "get", f"--config={path}", "disable-require"]
    done = run("--debug", *words)
    assert (done.returncode, done.stdout) == (0, "true\n")
    steps = [STEP.fullmatch(line) for line in done.stderr.splitlines()]
    assert all(steps), done.stderr
    texts = [step[1] for step in steps if step]
    assert texts[0].startswith("runs ")
    assert f"reads {tmp_path}/config\\x1b[2J.toml" in texts
    assert "\x1b" not in done.stderr
    assert not [text for text in texts if text.endswith((".py", ".pyc", ".so"))]
    assert run(*words).stderr == ""


def test_debug_prints_file_changes_and_started_programs(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    done = run("--debug", "config", "set", f"--config={path}", "disable-require")
    assert done.returncode == 0
    assert re.search(r" s: writes .*", done.stderr)
    assert re.search(rf" s: renames .* to .*{path.name}", done.stderr)
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\n")
    editor.chmod(0o755)
    os.environ["VISUAL"] = str(editor)
    try:
        done = run("--debug", "config", "edit", f"--config={path}")
    finally:
        del os.environ["VISUAL"]
    assert re.search(rf" s: runs .*{editor}", done.stderr)
