"""Launcher and runtime_argv read every command line as the real runtimes' own parsers do.

Beside the installed runtimes, scripts/test-parsers has those of other releases tested.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.command_lines import TELLING, CommandLines, command_lines, options
from harness.installation import Installation, write_config
from harness.parsers import WORK, Launcher, RealParser, Runtime, launcher, real_parser
from harness.recorder import recorder

from gpuhook.names import CREATING_VERBS
from gpuhook.oci.runtime_argv import Arguments

SEED = int(os.environ.get("GPUHOOK_PARSER_SEED", "1"))
COUNT = int(os.environ.get("GPUHOOK_PARSER_COUNT", "1500"))
SHOWN = 10


def runtimes() -> Iterator[Runtime]:
    """Yield the installed runtimes, and those in the root filesystems named to us."""
    for name in ("runc", "crun"):
        path = shutil.which(name)
        if path:
            yield Runtime(path)
    for root in os.environ.get("GPUHOOK_PARSER_ROOTS", "").split():
        for path in ("/usr/sbin/runc", "/usr/bin/crun"):
            if os.path.exists(root + path):
                yield Runtime(path, Path(root))


@dataclass
class Readers:
    """The three that read a command line: the real runtime, the launcher and Python."""

    real: RealParser
    launcher: Launcher
    crun: bool

    @property
    def lines(self) -> CommandLines:
        return command_lines(self.real.help, SEED)

    def creates(self, argv: list[str]) -> bool:
        """Tell whether the real runtime takes ``argv`` for the creation of a container."""
        return bool(self.real.ask(argv).specs)

    def fault(self, argv: list[str]) -> str:
        """Say how we misread ``argv``; empty if we don't, or if the real runtime refuses it."""
        verdict = self.real.ask(argv)
        if not verdict.specs:
            return ""
        python = Arguments(argv, crun=self.crun)
        if python.verb == "restore":
            return self.fault_of_restore(argv)
        [spec] = verdict.specs
        if read(python) != spec:
            return f"runtime_argv reads {read(python)}, not {spec}"
        if verdict.logs and [python.log] != list(verdict.logs):
            return f"runtime_argv logs to {python.log}, not to {verdict.logs}"
        guess = Arguments(argv)
        if read(guess) != spec and not guess.ambiguous:
            return f"runtime_argv, not told the runtime, reads {read(guess)}, not {spec}"
        verb, bundle = self.launcher.ask(argv)
        if verb == "pass":
            return f"the launcher passes what reads {spec}"
        if verb == "create" and place(None, f"{bundle}/config.json") != spec:
            return f"the launcher reads {bundle}/config.json, not {spec}"
        return ""

    def fault_of_restore(self, argv: list[str]) -> str:
        """Say so if what makes the runtime read a spec isn't the verb restore.

        That verb goes through untouched: its container was prepared when it was created.
        """
        for index, word in enumerate(argv):
            other = [*argv[:index], "state", *argv[index + 1 :]]
            if word == "restore" and Arguments(other, crun=self.crun).verb == "state":
                return "restore isn't the verb" if self.creates(other) else ""
        return "there is no restore"

    def shortened(self, argv: list[str]) -> list[str]:
        """Leave out of a misread command line all that it is misread without."""
        for index in range(len(argv)):
            shorter = argv[:index] + argv[index + 1 :]
            if self.fault(shorter):
                return self.shortened(shorter)
        return argv

    def check(self, lines: Iterable[list[str]]) -> None:
        """Fail and show the shortest command lines that are misread, if some are."""
        wrong = [argv for argv in lines if self.fault(argv)]
        shown = [self.shortened(argv) for argv in sorted(wrong, key=len)[:SHOWN]]
        told = "".join(f"\n{argv}: {self.fault(argv)}" for argv in shown)
        assert not wrong, f"{self.real.version} (seed {SEED}): {len(wrong)} misread{told}"


def place(bundle: str | None, config: str) -> str:
    return os.path.normpath(os.path.join(WORK, bundle or "", config))


def read(arguments: Arguments) -> str:
    """Return the spec that is read for ``arguments``, empty if none is."""
    creates = arguments.verb in CREATING_VERBS
    return place(arguments.bundle, arguments.config) if creates else ""


@pytest.fixture(scope="module", params=list(runtimes()), ids=str)
def readers(request: pytest.FixtureRequest) -> Iterator[Readers]:
    with real_parser(request.param) as real, launcher() as sh:
        yield Readers(real, sh, real.version.startswith("crun"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python find its working directory where the real runtime has its own."""
    monkeypatch.setattr(os, "getcwd", lambda: WORK)


def test_every_option_in_every_spelling(readers: Readers) -> None:
    systematic = list(readers.lines.systematic())
    readers.check(argv for _, argv in systematic)
    accepted = {name for name, argv in systematic if readers.creates(argv)}
    told = {name for text in readers.real.help.values() for name in options(text)}
    assert told - TELLING <= accepted, "their values are no good, or the probe is blind"


def test_random_command_lines(readers: Readers) -> None:
    lines = readers.lines
    argvs = [lines.some() for _ in range(COUNT)]
    readers.check(argvs)
    creating = sum(readers.creates(argv) for argv in argvs[:500])
    assert creating > 100, "most of these command lines must be good ones"


def test_the_low_level_runtime_gets_the_same_words(
    readers: Readers, installation: Installation, workspace: Path, tmp_path: Path
) -> None:
    """Whatever gpu-py makes of a command line, no word is lost; or it says what stops it."""
    recording = recorder(tmp_path / "recorder", "")
    config = write_config(tmp_path / "etc", Path("/"), [recording.path])
    (tmp_path / "config.json").write_text("{}")
    lines = readers.lines
    passed = 0
    for argv in (lines.some() for _ in range(60)):
        done = subprocess.run(
            [installation.runtime, *argv],
            env={"PATH": os.environ["PATH"], "GPUHOOK_CONFIG": str(config)},
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        calls = words_of_calls(tmp_path / "recorder/calls")
        words = [os.fsencode(word) for word in argv]
        if calls[:1] == [[b"--version"]] != [words]:
            del calls[0]  # which runtime it is, it was asked first
        if calls:
            assert calls == [words]
            passed += 1
        else:
            assert done.returncode == 1, argv
            assert b"can't be read" in done.stderr, argv
    assert passed > 20


def words_of_calls(folder: Path) -> list[list[bytes]]:
    """Return the words of all calls, the first one first, and forget them."""
    files = sorted(folder.glob("*.argv"), key=lambda path: int(path.stem))
    found = [path.read_bytes().split(b"\0")[2:-1] for path in files]
    for path in folder.iterdir():
        path.unlink()
    return found
