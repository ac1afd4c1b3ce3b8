"""Command lines, which launcher and runtime_argv must read as the real runtimes' parsers do.

In addition to the installed runtimes, scripts/test-parsers tests those of other releases.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.command_lines import FILES, TELLING, VALUES, CommandLines, command_lines, options
from harness.installation import Installation, write_config
from harness.parsers import WORK, RealParser, Runtime, real_parser
from harness.recorder import recorder
from launchers import Builds, Probe, probing

from gpuhook.base.names import CREATING_VERBS
from gpuhook.base.oci.runtime_argv import Arguments

SEED = int(os.environ.get("GPUHOOK_PARSER_SEED", "1"))
COUNT = int(os.environ.get("GPUHOOK_PARSER_COUNT", "500"))
SHOWN = 10


def runtimes() -> Iterator[Runtime]:
    """Yield the installed runtimes, and those in the root filesystems of GPUHOOK_PARSER_ROOTS."""
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
    """The three readers of a command line: the real runtime, the launcher and Python."""

    real: RealParser
    launcher: Probe

    @property
    def lines(self) -> CommandLines:
        return command_lines(self.real.help, SEED)

    def creates(self, argv: list[str]) -> bool:
        """Return whether the real runtime creates a container for ``argv``."""
        return bool(self.real.ask(argv).specs)

    def fault(self, argv: list[str]) -> str:
        """Return how we misread ``argv``; empty if we don't, or if the real runtime refuses it."""
        verdict = self.real.ask(argv)
        if not verdict.specs:
            return ""
        python = Arguments(argv)
        if python.verb == "restore":
            return self.fault_of_restore(argv)
        [spec] = verdict.specs
        if not python.unclear:
            if read(python) != spec:
                return f"runtime_argv reads {read(python)}, not {spec}"
            if verdict.logs and python.log is not None and [python.log] != list(verdict.logs):
                return f"runtime_argv logs to {python.log}, not to {verdict.logs}"
        verb, bundle, *_ = self.launcher.arguments(argv)
        if verb == "pass":
            return f"the launcher passes what reads {spec}"
        if verb == "create" and place(bundle) != spec:
            return f"the launcher reads {bundle}/config.json, not {spec}"
        return ""

    def fault_of_restore(self, argv: list[str]) -> str:
        """Return an error if the runtime reads a spec for another reason than the verb restore.

        Arguments of that verb never have only one meaning: each may name the bundle
        (runtime_shim).
        """
        for index, word in enumerate(argv):
            other = [*argv[:index], "state", *argv[index + 1 :]]
            if word == "restore" and Arguments(other).verb == "state":
                return "restore isn't the verb" if self.creates(other) else ""
        return "there is no restore"

    def shortened(self, argv: list[str]) -> list[str]:
        """Remove all words from a misread command line that it is misread without."""
        for index in range(len(argv)):
            shorter = argv[:index] + argv[index + 1 :]
            if self.fault(shorter):
                return self.shortened(shorter)
        return argv

    def check(self, lines: Iterable[list[str]]) -> None:
        """Fail and show the shortest misread command lines, if any line is misread."""
        wrong = [argv for argv in lines if self.fault(argv)]
        shown = [self.shortened(argv) for argv in sorted(wrong, key=len)[:SHOWN]]
        told = "".join(f"\n{argv}: {self.fault(argv)}" for argv in shown)
        assert not wrong, f"{self.real.version} (seed {SEED}): {len(wrong)} misread{told}"


def place(bundle: str | None) -> str:
    return os.path.normpath(os.path.join(WORK, bundle or "", "config.json"))


def read(arguments: Arguments) -> str:
    """Return the spec that is read for ``arguments``, empty if none is."""
    if arguments.config and arguments.verb in CREATING_VERBS:
        return os.path.normpath(os.path.join(WORK, arguments.config))
    return place(arguments.bundle) if arguments.verb in CREATING_VERBS else ""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    with probing(Builds(tmp_path_factory.mktemp("builds")).probe) as found:
        yield found


@pytest.fixture(scope="module", params=list(runtimes()), ids=str)
def readers(request: pytest.FixtureRequest, probe: Probe) -> Iterator[Readers]:
    with real_parser(request.param) as real:
        yield Readers(real, probe)


def test_every_option_in_every_spelling_is_read_as_by_the_runtime(readers: Readers) -> None:
    systematic = list(readers.lines.systematic())
    readers.check(argv for _, argv in systematic)
    accepted = {name for name, argv in systematic if readers.creates(argv)}
    told = {name for text in readers.real.help.values() for name in options(text)}
    assert told - TELLING <= accepted, "their values are no good, or the probe is blind"


# Options in their usual spelling that gpuhook doesn't read, because no engine writes them.
UNREAD = TELLING | {"criu", "program-name", "HANG"}


def test_options_as_engines_write_them_are_not_unclear(readers: Readers) -> None:
    """Options in the usual spelling are read, and aren't reported as unclear."""
    lines = readers.lines
    unread = set()
    for verb, known in lines.after.items():
        for before, options_of in ((True, lines.before), (False, known)):
            for name, takes_value in options_of.items():
                usual = f"--{name}" if len(name) > 1 else f"-{name}"
                words = [usual, VALUES.get(name, FILES)[0]] if takes_value else [usual]
                line = [*words, verb, "id"] if before else [verb, *words, "id"]
                if readers.creates(line) and Arguments(line).unclear:
                    unread.add(name)
    assert unread <= UNREAD


def test_random_command_lines_are_read_as_by_the_runtime(readers: Readers) -> None:
    lines = readers.lines
    argvs = [lines.some() for _ in range(COUNT)]
    readers.check(argvs)
    creating = [argv for argv in argvs[:500] if readers.creates(argv)]
    assert len(creating) > 100, "most of these command lines must be good ones"
    clear = [argv for argv in creating if Arguments(argv).verb in CREATING_VERBS]
    assert len(clear) > 50, "and many of those as engines write them"


def test_the_low_level_runtime_gets_the_same_arguments(
    readers: Readers, installation: Installation, tmp_path: Path
) -> None:
    """gpu-py loses no word of a command line, or it reports why it refuses the line."""
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
        if Arguments(argv).unclear and not calls:
            assert done.returncode == 1, argv
            assert b"It isn't clear what" in done.stderr, argv
        else:
            assert calls == [[os.fsencode(word) for word in argv]]
            passed += 1
    assert passed > 20


def words_of_calls(folder: Path) -> list[list[bytes]]:
    """Return the words of all calls in their order, and delete the record of the calls."""
    files = sorted(folder.glob("*.argv"), key=lambda path: int(path.stem))
    found = [path.read_bytes().split(b"\0")[2:-1] for path in files]
    for path in folder.iterdir():
        path.unlink()
    return found
