"""What a command line means: to a real low-level runtime, and to our launcher."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ran

from harness.images import REPOSITORY

PROBE = Path(__file__).parent / "probes/parser.py"
WORK = "/run/parser"  # the folder in which the probe runs the runtime
LAUNCHER = REPOSITORY / "launchers/gpu-py"


@dataclass(frozen=True)
class Runtime:
    """A low-level runtime: its path in a root filesystem, which is perhaps the machine's."""

    path: str
    root: Path = Path("/")

    def __str__(self) -> str:
        where = "" if self.root == Path("/") else f" of {self.root.name}"
        return self.path.rpartition("/")[2] + where

    @property
    def of(self) -> str:
        """The distribution, which is Debian's where the root has the name of a suite."""
        if self.root == Path("/"):
            return ran.distribution()
        return f"Debian {self.root.name}"


@dataclass(frozen=True)
class Verdict:
    """What the real runtime did: the specs it read and the logs it wrote, by path."""

    specs: tuple[str, ...]
    logs: tuple[str, ...]
    status: int


@dataclass
class RealParser:
    """A low-level runtime that is asked what it makes of command lines.

    ``version`` is the first line of what it says of itself, ``help`` what it prints for
    --help of a verb.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]
    runtime: Runtime
    version: str = ""
    help: dict[str, str] = field(default_factory=dict)
    _asked: dict[tuple[str, ...], Verdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        about = self._read()
        self.version = about["version"].partition("\n")[0]
        self.help = about["help"]

    def ask(self, argv: Sequence[str]) -> Verdict:
        """Run it with ``argv``, once."""
        ran.add(self.version.partition(" ")[0], self.version, self.runtime.of)
        if tuple(argv) not in self._asked:
            self.stdin.write(json.dumps(argv).encode() + b"\n")
            self.stdin.flush()
            answer = self._read()
            self._asked[tuple(argv)] = Verdict(
                tuple(answer["specs"]), tuple(answer["logs"]), answer["status"]
            )
        return self._asked[tuple(argv)]

    def _read(self) -> Any:
        line = self.stdout.readline()
        assert line, "the probe died; it says why on standard error"
        return json.loads(line)


@dataclass
class Launcher:
    """The launcher's function read_arguments, in a shell that waits for command lines."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __post_init__(self) -> None:
        self.stdin.write(LAUNCHER.read_bytes().partition(b"\ngp_self=$0")[0] + b"\n")

    def ask(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return its verdict, "create", "pass" or "" for Python, and the bundle."""
        words = b" ".join(os.fsencode(shlex.quote(word)) for word in argv)
        answer = b'printf \'%s\\000%s\\000\' "$gp_verb" "$gp_bundle"'
        self.stdin.write(b"set -- " + words + b'\nread_arguments "$@"\n' + answer + b"\n")
        self.stdin.flush()
        return self._read(), self._read()

    def _read(self) -> str:
        text = b""
        while not text.endswith(b"\0"):
            byte = self.stdout.read(1)
            assert byte, "the shell died; it says why on standard error"
            text += byte
        return os.fsdecode(text[:-1])


@contextmanager
def _talk(argv: Sequence[str]) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, process.stdout
        process.stdin.close()


@contextmanager
def real_parser(runtime: Runtime) -> Iterator[RealParser]:
    """Start the probe of a runtime for a block."""
    probe = [sys.executable, "-I", "-X", "utf8", str(PROBE), str(runtime.root), runtime.path]
    with _talk(["unshare", "--mount", *probe]) as pipes:
        yield RealParser(*pipes, runtime)


@contextmanager
def launcher() -> Iterator[Launcher]:
    """Start a shell with the launcher's functions for a block."""
    with _talk(["sh"]) as pipes:
        yield Launcher(*pipes)
