"""Shared parts of tests on a machine with enforced SELinux: denials, and podman's callers.

Without auditd, only the kernel's messages report the denials.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from booted import call
from harness.commands import Result, run

POLICY = Path("/etc/selinux/default/policy/policy.34")
CONTEXTS = "/etc/selinux/default/contexts/files/file_contexts"
# How podman is called: by a systemd unit, as with Quadlet, so that podman runs in its own domain,
# or by root in a shell.
CALLERS: dict[str, tuple[str, ...]] = {
    "service": ("systemd-run", "--wait", "--quiet", "--collect"),
    "shell": (),
}
_DENIED = re.compile(
    r"avc:\s+denied\s+\{ (?P<what>[^}]*) \} for .*"
    r"scontext=(?P<source>\S+) tcontext=(?P<target>\S+) tclass=(?P<kind>\S+)"
)
_COMMAND = re.compile(r'comm="([^"]*)"')
# The simulated driver isn't a kernel module. When a node's driver is unknown, the kernel requests
# a module by a name with this prefix.
_NO_DRIVER = 'kmod="char-major-'


@dataclass(frozen=True, order=True)
class Denial:
    """A denial for a source domain and a target type; ``line`` is the kernel's message."""

    source: str
    target: str
    kind: str
    what: str
    command: str
    line: str

    @property
    def rule(self) -> tuple[str, ...]:
        """Return the policy rule that would allow the access."""
        return self.source, self.target, self.kind, self.what

    @property
    def is_of_ours(self) -> bool:
        """Tell whether the access was denied to one of our programs."""
        return self.command.startswith(("gpu-py", "gpuhook", "python"))


class Denials:
    """The denials of this boot, read in parts."""

    def __init__(self) -> None:
        call("sysctl", "--write", "kernel.printk_ratelimit=0")  # log all denials, without a limit
        self._seen = 0
        self.usual: set[tuple[str, ...]] = set()

    def read(self) -> list[Denial]:
        """Return the denials since the last reading."""
        call("journalctl", "--sync")
        said = call("journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat").splitlines()
        new, self._seen = said[self._seen :], len(said)
        assert not [line for line in new if "callbacks suppressed" in line or "audit_lost" in line]
        return [denial for line in new if (denial := _denial(line))]

    def unusual(self) -> list[str]:
        """Return the new denials of our programs, and those that containers without GPUs lack."""
        return [each.line for each in self.read() if each.is_of_ours or each.rule not in self.usual]


def _denial(line: str) -> Denial | None:
    found = _DENIED.search(line)
    if not found or _NO_DRIVER in line:
        return None
    source, target = (found[name].split(":")[2] for name in ("source", "target"))
    command = _COMMAND.search(line)
    return Denial(source, target, found["kind"], found["what"], command[1] if command else "", line)


def podman_run(caller: str, words: Sequence[str]) -> Result:
    """Run a podman container and return its status; its output may be lost."""
    return run([*CALLERS[caller], "podman", "run", "--rm", "--network=none", *words], timeout=300.0)


@contextmanager
def without_the_module(debians: Path) -> Iterator[None]:
    """Make the kernel enforce Debian's own policy, with the labels that this policy sets."""
    ours = POLICY.read_bytes()
    POLICY.write_bytes(debians.read_bytes())
    call("load_policy")
    call("chcon", "-t", "bin_t", "/usr/bin/gpu-py")
    call("chcon", "-R", "-t", "initrc_runtime_t", "/run/gpuhook")
    try:
        yield
    finally:
        POLICY.write_bytes(ours)
        call("load_policy")
        call("restorecon", "-RF", "/usr/bin/gpu-py", "/run/gpuhook")
