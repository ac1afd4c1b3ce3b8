"""Find running engine daemons and read their command lines."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Daemon:
    """A running daemon and the words it was started with."""

    pid: int
    argv: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """Return the value of ``--name VALUE`` or ``--name=VALUE``, None if it isn't given."""
        for position, word in enumerate(self.argv):
            if word.startswith(f"--{name}="):
                return word.partition("=")[2]
            if word == f"--{name}" and position + 1 < len(self.argv):
                return self.argv[position + 1]
        return None

    def reads(self, own: str, ours: str) -> bool:
        """Tell whether the file that the daemon knows as ``own`` is the one we call ``ours``.

        It may run in another mount namespace, so the two are compared as files. A file
        that doesn't exist is compared by name.
        """
        try:
            theirs = os.stat(f"/proc/{self.pid}/root{own}")
            return os.path.samestat(theirs, os.stat(ours))
        except OSError:
            return os.path.abspath(own) == os.path.abspath(ours)


def running(program: str) -> list[Daemon]:
    """Return the running processes whose program has that name (at most 15 characters)."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/comm", encoding="utf-8", errors="replace") as file:
                if file.read().rstrip("\n") != program:
                    continue
            with open(f"/proc/{name}/cmdline", "rb") as command:
                words = command.read().split(b"\0")[:-1]
        except OSError:
            continue
        found.append(Daemon(int(name), tuple(os.fsdecode(word) for word in words)))
    return sorted(found, key=lambda daemon: daemon.pid)
