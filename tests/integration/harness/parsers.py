"""The meaning of a command line for a real low-level runtime."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ran

PROBE = Path(__file__).parent / "probes/parser.py"
WORK = "/run/parser"  # the folder in which the probe runs the runtime


@dataclass(frozen=True)
class Runtime:
    """A low-level runtime: its path in a root filesystem, which may be the host's."""

    path: str
    root: Path = Path("/")

    def __str__(self) -> str:
        where = "" if self.root == Path("/") else f" of {self.root.name}"
        return self.path.rpartition("/")[2] + where

    @property
    def of(self) -> str:
        """The distribution of the root: this host's, or the Debian suite that names the root."""
        if self.root == Path("/"):
            return ran.distribution()
        return f"Debian {self.root.name}"


@dataclass(frozen=True)
class Verdict:
    """Effects of the real runtime: the specs it read and the logs it wrote, by path."""

    specs: tuple[str, ...]
    logs: tuple[str, ...]
    status: int


@dataclass
class RealParser:
    """A low-level runtime whose own parser reads command lines.

    ``version`` is the first line of its output for --version. ``help`` is its output for
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
        """Return the effects of ``argv``; run the runtime only once for the same ``argv``."""
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


@contextmanager
def _talk(argv: Sequence[str]) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, process.stdout
        process.stdin.close()


@contextmanager
def real_parser(runtime: Runtime) -> Iterator[RealParser]:
    """Run the probe of a runtime until the end of the block."""
    probe = [sys.executable, "-I", "-X", "utf8", str(PROBE), str(runtime.root), runtime.path]
    with _talk(["unshare", "--mount", *probe]) as pipes:
        yield RealParser(*pipes, runtime)
