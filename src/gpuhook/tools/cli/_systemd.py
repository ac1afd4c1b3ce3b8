"""Calls to the host's systemd, where it is running."""

import os
import shutil
import subprocess

_RUNNING = "/run/systemd/system"  # sd_booted(3)
_PATIENCE = 60.0  # seconds


def call(*words: str) -> bool:
    """Run systemctl; return whether it succeeded, False if systemd isn't running."""
    program = shutil.which("systemctl")
    if program is None or not os.path.isdir(_RUNNING):
        return False
    try:
        done = subprocess.run(
            [program, "--quiet", *words], stdin=subprocess.DEVNULL, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
