"""The launcher, compiled for tests, and installed with a Python and a runtime that only report."""

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from build_launcher import FLAGS, NAMES, SOURCE, compile_with

from gpuhook.prefork import launcher_cache

HERE = Path(__file__).parent
PROBE = HERE / "launcher_probe.c"
# With AddressSanitizer and UndefinedBehaviorSanitizer, linked statically so that the program needs
# no library of theirs.
SANITIZED = (
    "gcc", *FLAGS, "-Werror", "-g", "-O1", "-fsanitize=address,undefined", "-static-libasan",
    "-static-libubsan", "-fno-sanitize-recover=all", "-include", str(HERE / "sanitized.h"),
)  # fmt: skip
PATIENCE = 5.0  # seconds that the launcher waits for an answer, in each of two steps
PYTHON = """\
#!/bin/sh
shift 5
echo python "$1" >{log}
"""


class Builds:
    """Launchers that are compiled once, in a folder where they also look for saved data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.saved = folder / "run/gpuhook/launcher"
        self.nowhere = folder / "etc/config.toml"

    @functools.cached_property
    def launcher(self) -> Path:
        """Compile the launcher, with a shorter timeout for answers."""
        return self._compile("launcher", {}, SOURCE, f"-DANSWER_MS={PATIENCE * 1000:.0f}")

    @functools.cached_property
    def bare(self) -> Path:
        """Compile a launcher that finds no config.toml, and low-level runtimes only in PATH."""
        return self._compile("bare", {"DEFAULT_CONFIG": str(self.nowhere), "SEARCH_PATH": ""})

    @functools.cached_property
    def probe(self) -> Path:
        """Compile the probe, which searches in chunks of 128 bytes."""
        return self._compile("probe", {}, PROBE, "-DCHUNK=128")

    def _compile(
        self, name: str, changed: dict[str, str], source: Path = SOURCE, *options: str
    ) -> Path:
        output = self._folder / name
        changed = {"CACHE_FOLDER": str(self.saved), **changed}
        compile_with([*SANITIZED, *options], output, source, changed)
        return output


class Probe:
    """A process that reports how the launcher reads command lines and files."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin = stdin
        self._stdout = stdout

    def arguments(self, argv: Sequence[str]) -> tuple[str, str, bool, str]:
        """Return the verb, the bundle, whether the prefork server is asked, and the creator.

        The verb is "create", "pass", or "" for a command line that Python handles. The creator
        is the runtime that created the container.
        """
        self._ask("arguments", argv)
        return self._read(), self._read(), self._read() == "usual", self._read()

    def set_runtime_dir(self, folder: str) -> None:
        self._ask("runtime-dir", [folder])

    def search(self, triggers: Path, config: Path) -> str:
        """Return whether config.json has a trigger: "some", "none", or "unknown"."""
        self._ask("search", [str(triggers), str(config)])
        return self._read()

    def _ask(self, kind: str, words: Sequence[str]) -> None:
        text = f"{kind} {len(words)}\n".encode()
        self._stdin.write(text + b"".join(os.fsencode(word) + b"\0" for word in words))
        self._stdin.flush()

    def _read(self) -> str:
        text = b""
        while not text.endswith(b"\0"):
            byte = self._stdout.read(1)
            assert byte, "the probe has ended; it says why on standard error"
            text += byte
        return os.fsdecode(text[:-1])


@contextmanager
def probing(program: Path) -> Iterator[Probe]:
    """Run a probe until the end of the block."""
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Probe(process.stdin, process.stdout)
        process.stdin.close()


class Installed:
    """A launcher in a virtual environment whose Python and low-level runtime only report."""

    def __init__(self, folder: Path, builds: Builds) -> None:
        self.folder = folder
        self.saved = builds.saved
        self.config = folder / "etc/config.toml"
        self.log = folder / "log"
        self.bin = folder / "venv/bin"
        self.path = folder / "path"
        self.bundle = folder / "bundle"
        for made in (self.bin, self.path, self.bundle, self.config.parent):
            made.mkdir(parents=True)
        (folder / "venv/pyvenv.cfg").touch()
        package = folder / "venv/lib/python3.11/site-packages/gpuhook"
        package.mkdir(parents=True)
        (package / "_start.py").touch()
        self.install(builds.launcher)
        self.program(self.bin / "python3", PYTHON.format(log=self.log))
        self.runtime("runc")

    def install(self, launcher: Path) -> None:
        """Install a launcher under all of its names, with times in the past."""
        for name in NAMES:
            path = self.bin / name
            path.unlink(missing_ok=True)
            shutil.copy(launcher, path)
            os.utime(path, (time.time() - 10,) * 2)

    def program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)
        os.utime(path, (time.time() - 10,) * 2)

    def runtime(self, name: str) -> None:
        lines = f'echo {name} "$@" >{self.log}', f"cat /proc/$$/environ >{self.log}.env"
        self.program(self.path / name, "\n".join(("#!/bin/sh", *lines, "")))

    def configure(self, text: str = "") -> None:
        """Write the configuration with a time in the past, and save its data for the launcher."""
        self.config.write_text(text)
        past = time.time() - 10
        os.utime(self.config, (past, past))
        os.utime(self.config.parent, (past, past))
        launcher_cache.save(str(self.config))

    def run(self, *argv: str, env: dict[str, str] | None = None) -> str:
        environ = {"PATH": f"{self.path}:/usr/bin:/bin", "GPUHOOK_CONFIG": str(self.config)}
        self.log.unlink(missing_ok=True)
        subprocess.run([self.bin / "gpu-py", *argv], env=environ | (env or {}), check=True)
        return self.log.read_text().strip()

    def create(self, text: str) -> str:
        (self.bundle / "config.json").write_text(text)
        return self.run("create", "--bundle", str(self.bundle), "ID").split()[0]
