"""Calls to the host's systemd, where it is running, and commands for the units of daemons.

Source: sd_pid_get_unit(3): a daemon's unit is the last one in the path of its cgroup.
"""

import os
import shutil
import subprocess

from gpuhook.base.host import proc
from gpuhook.monitor.host.processes import Process

_RUNNING = "/run/systemd/system"  # sd_booted(3)
_PATIENCE = 60.0  # seconds
_SUFFIX = ".service"


def call(*words: str) -> bool:
    """Run systemctl; return whether it succeeded, False if systemd isn't running."""
    return _run("--quiet", *words) is not None


def lines(*words: str) -> list[str]:
    """Return the lines that systemctl prints, none if it fails."""
    return [line for line in (_run(*words) or "").split("\n") if line]


def command_for(verb: str, engine: str, daemons: list[Process]) -> str:
    """Return the systemctl command for an engine's daemons, "" if systemd doesn't run them all."""
    found = [_unit_command(verb, engine, daemon) for daemon in daemons]
    return " && ".join(dict.fromkeys(found)) if all(found) else ""


def _unit_command(verb: str, engine: str, daemon: Process) -> str:
    """Return the systemctl command for a daemon's unit, "" if it has none of its own."""
    return command_in(verb, engine, proc.data_of(f"/proc/{daemon.pid}/cgroup"))


def command_in(verb: str, engine: str, memberships: bytes) -> str:
    """Return the command for the unit in a /proc/PID/cgroup whose name contains the engine's."""
    for line in proc.lines(memberships):
        parts = os.fsdecode(line).split(":", 2)[-1].split("/")
        units = [part for part in parts if part.endswith(_SUFFIX)]
        if units and engine in units[-1] and units[-1].isprintable() and " " not in units[-1]:
            users = any(part.startswith("user@") for part in units[:-1])
            return f"systemctl {'--user ' if users else ''}{verb} {units[-1].removesuffix(_SUFFIX)}"
    return ""


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
