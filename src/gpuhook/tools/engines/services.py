"""The systemd units of running daemons, and the commands that reload or restart them.

Source: sd_pid_get_unit(3): a daemon's unit is the last one in the path of its cgroup.
"""

import os

from gpuhook.base.host import proc
from gpuhook.monitor.host.processes import Process

_SUFFIX = ".service"


def command(verb: str, engine: str, daemons: list[Process]) -> str:
    """Return the systemctl command for an engine's daemons, "" if systemd doesn't run them all."""
    found = [unit_command(verb, engine, daemon) for daemon in daemons]
    return " && ".join(dict.fromkeys(found)) if all(found) else ""


def unit_command(verb: str, engine: str, daemon: Process) -> str:
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
