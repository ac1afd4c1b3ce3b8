"""Whose mount tables are the host's, asked by a real process below another one."""

import os
import subprocess
import sys
from pathlib import Path

from gpuhook.tools.nvidia_cli import callers

ASK = "import sys; sys.path[:0] = sys.argv[1:]; from gpuhook.tools.nvidia_cli import callers; "
FOLDER = str(Path(callers.__file__).parents[3])


def answer(code: str, *before: str) -> str:
    """Return what a Python below us prints; ``before`` are the programs between it and us."""
    words = [*before, sys.executable, "-c", ASK + code, FOLDER]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_caller_is_the_first_that_runs_another_program() -> None:
    """Here a shell is the engine, in two processes, and this Python called it."""
    shell = ["sh", "-c", '"$0" "$@"; :', "sh", "-c", '"$0" "$@"; :']
    assert answer("print(callers._caller())", *shell) == str(os.getpid())


def test_parent_is_asked_of_proc() -> None:
    assert answer("print(callers.parent())") == str(os.getpid())
    assert callers.parent() == os.getppid()


def test_tables_are_those_of_the_caller_and_of_the_first_process() -> None:
    shell = ["sh", "-c", '"$0" "$@"; :']
    lengths = answer("print(*map(len, callers.mount_tables()))", *shell).split()
    assert len(lengths) == 2
    assert int(lengths[0]) == len(Path("/proc/self/mountinfo").read_bytes())
