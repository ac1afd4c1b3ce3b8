"""Engines and low-level runtimes that the running test has called, as they name themselves.

``harness.commands`` notes each command line that it runs. The pytest plugin ``recording``
turns that on (``ACTIVE``). It records for each test only the programs that its own function
called, because fixtures may start programs for other tests.
"""

import os
import re
import socket
import struct
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

# A program that tests call -> the product's name, and the command that prints its version.
PROGRAMS = {
    "docker": ("Docker", ("dockerd", "--version")),
    "dockerd": ("Docker", ("dockerd", "--version")),
    "ctr": ("containerd", ("containerd", "--version")),
    "containerd": ("containerd", ("containerd", "--version")),
    "podman": ("podman", ("podman", "--version")),
    "runc": ("runc", ("runc", "--version")),
    "crun": ("crun", ("crun", "--version")),
    "apptainer": ("Apptainer", ("apptainer", "--version")),
    **dict.fromkeys(("ch-run", "ch-fromhost"), ("Charliecloud", ("ch-run", "--version"))),
    **dict.fromkeys(
        ("systemd-nspawn", "machinectl"), ("systemd-nspawn", ("systemd-nspawn", "--version"))
    ),
    "lxc-start": ("LXC", ("lxc-start", "--version")),
    **dict.fromkeys(("test-slurm", "srun", "sbatch"), ("Slurm", ("slurmctld", "-V"))),
}
OURS = "gpu-py"
# Programs that run the command that follows their options.
_WRAPPERS = {"env", "nsenter", "setpriv", "unshare"}
_VALUE = re.compile(r"-.*|\d+|KILL|TERM|\w+=.*")
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_TIMEOUT_S = 300.0

# A program's name, its version, its distribution, and the cgroup layout that it saw.
Program = tuple[str, str, str, str]
ACTIVE = False
_noted: set[Program] = set()
_versions: dict[tuple[str, str, str], str] = {}


def begin() -> None:
    """Forget the noted programs."""
    _noted.clear()


def noted() -> list[Program]:
    """Return the programs that were noted since ``begin``."""
    return sorted(_noted)


def note(argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """Note the program that ``argv`` runs, through whatever wrappers; ``env`` is added to ours.

    gpu-py stands for the low-level runtime that its configuration names.
    """
    if not ACTIVE:
        return
    words = [str(word) for word in argv]
    at = _command(words)
    called = os.path.basename(words[at]) if at < len(words) else ""
    if called == OURS:
        called = _low_level({**os.environ, **(env or {}), **_settings(words[:at])})
    if called in PROGRAMS:
        found = _program(called, words[:at])
        _noted.update([found] if found else [])


def note_daemon(path: Path) -> None:
    """Note the program that listens at a Unix socket."""
    if not ACTIVE:
        return
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            size = struct.calcsize("3i")  # struct ucred, unix(7)
            about = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid = struct.unpack("3i", about)[0]
        called = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return  # a test may have ended the process since it answered
    into = ["nsenter", "-t", str(pid), "-m", "--"]
    found = _program(called, into) if called in PROGRAMS else None
    _noted.update([found] if found else [])


def add(name: str, version: str, of: str) -> None:
    """Note a program that a test runs by means of its own."""
    if ACTIVE:
        _noted.add((name, number(version), of, cgroups()))


def number(text: str) -> str:
    """Return the first version in a program's output, without the packagers' additions."""
    found = _VERSION.search(text)
    return found[0] if found else ""


def distribution(root: str | Path = "/") -> str:
    """Return the name of the distribution of a root filesystem: "Debian trixie" (os-release(5))."""
    try:
        lines = Path(root, "etc/os-release").read_text("utf-8", "replace").split("\n")
    except OSError:
        return "unknown"
    known = dict(line.split("=", 1) for line in lines if "=" in line)
    values = {name: value.strip("\"'") for name, value in known.items()}
    named = values.get("VERSION_CODENAME") or values.get("VERSION_ID", "")
    if values.get("PRETTY_NAME", "").endswith("/sid"):
        named = "sid"  # Debian sid has the codename of the next release
    return f"{values.get('NAME', 'unknown').removesuffix(' GNU/Linux')} {named}".strip()


def cgroups(pid: int | str = "self") -> str:
    """Return the cgroup layout that a process sees: v1, v2, or hybrid (v1 and an empty v2 tree)."""
    kinds = {}
    table = Path(f"/proc/{pid}/mountinfo").read_bytes()  # text mode would also split at \r
    for line in table.decode("utf-8", "replace").split("\n")[:-1]:
        fields = line.split(" ")
        kinds[fields[4]] = fields[fields.index("-") + 1]
    if kinds.get("/sys/fs/cgroup") == "cgroup2":
        return "v2"
    return "hybrid" if kinds.get("/sys/fs/cgroup/unified") == "cgroup2" else "v1"


def _command(words: Sequence[str]) -> int:
    """Return the index of the command that finally runs, after wrappers and their options."""
    at = 0
    while at < len(words) and os.path.basename(words[at]) in _WRAPPERS:
        at += 1
        while at < len(words) and _VALUE.fullmatch(words[at]):
            at += 1
    return at


def _settings(words: Sequence[str]) -> dict[str, str]:
    pairs = (word.partition("=") for word in words if not word.startswith("-"))
    return {name: value for name, equals, value in pairs if equals}


def _low_level(env: Mapping[str, str]) -> str:
    """Return the name of the runtime that gpu-py calls, as the tests' configurations spell it."""
    try:
        config = tomllib.loads(Path(env["GPUHOOK_CONFIG"]).read_text("utf-8"))
        return os.path.basename(str(config["nvidia-container-runtime"]["runtimes"][0]))
    except (OSError, LookupError, TypeError, ValueError):
        return ""  # tests of invalid configurations may write anything


def _program(called: str, into: Sequence[str]) -> Program | None:
    """Return the program that the wrappers ``into`` lead to; None if it prints no version."""
    pid = into[into.index("-t") + 1] if "-t" in into else "self"
    name, argv = PROGRAMS[called]
    try:
        # The root's device and inode aren't in the key: the next mounted root may have the same.
        started = Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()[19]
        key = (pid, started, name)
        if key not in _versions:
            words = [*into, *argv]
            done = subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False)
            _versions[key] = number(done.stdout.decode(errors="replace"))
        if not _versions[key]:
            return None
        return name, _versions[key], distribution(f"/proc/{pid}/root"), cgroups(pid)
    except (OSError, subprocess.SubprocessError):
        return None  # the process has ended, or the program doesn't exist
