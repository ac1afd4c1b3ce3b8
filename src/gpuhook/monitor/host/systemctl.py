"""Calls to the host's systemd, where it is running."""

import os
import shutil
import subprocess

_RUNNING = "/run/systemd/system"  # sd_booted(3)
_PATIENCE = 60.0  # seconds


def call(*words: str) -> bool:
    """Run systemctl; return whether it succeeded, False if systemd isn't running."""
    return _run("--quiet", *words) is not None


def lines(*words: str) -> list[str]:
    """Return the lines that systemctl prints, none if it fails."""
    return [line for line in (_run(*words) or "").split("\n") if line]


def _run(*words: str) -> str | None:
    program = shutil.which("systemctl")
    if program is None or not os.path.isdir(_RUNNING):
        return None
    try:
        done = subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
