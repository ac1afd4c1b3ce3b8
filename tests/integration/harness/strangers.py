"""A malicious other user of this host: his processes, his folders and his pipes."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.commands import stop

UID = 65534  # nobody
AS_STRANGER = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups")


def folder_of_his(parent: Path, name: str) -> Path:
    """Make a folder that belongs to the malicious user."""
    made = parent / name
    made.mkdir()
    os.chown(made, UID, UID)
    return made


def pipe_of_his(path: Path) -> Path:
    """Make a pipe of the malicious user whose other end is never opened."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    for each in (path.parent, path):
        os.chown(each, UID, UID)
    return path


@contextmanager
def process(argv: Sequence[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that prints "ready" and then waits for its input to end."""
    # If the tests run in the background (nohup), processes would ignore SIGHUP.
    words = ["env", "--default-signal=HUP", "setpriv", "--pdeathsig", "KILL", *map(str, argv)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        try:
            assert running.stdout.readline() == b"ready\n"
            yield running
        finally:
            running.stdin.close()
            stop(running)


@contextmanager
def pretender(
    program: Path, *words: str | Path, way: Sequence[str] = AS_STRANGER, mode: int = 0o755
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that has a daemon's name and arguments, and does nothing.

    ``program`` is the path to which a shell is copied under that name. ``way`` is the
    beginning of the command line that starts it. By default, the malicious user runs it.
    """
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile("/bin/sh", program)
    program.chmod(mode)
    # The shell itself waits with read. If it could exec its last command, its name would be lost.
    script = "echo ready; read -r end; exit 0"
    with process([*way, program, "-c", script, *words]) as running:
        yield running
