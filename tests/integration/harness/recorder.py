"""A low-level runtime that records how it was called before it does its work."""

from dataclasses import dataclass
from pathlib import Path

SCRIPT = """\
#!/bin/sh
# /proc has argv and environment as execve got them, before the shell touches either.
calls={folder}/calls
number=$(ls "$calls" | wc -l)
cat "/proc/$$/cmdline" >"$calls/$number.argv"
cat "/proc/$$/environ" >"$calls/$number.environ"
{rest}
"""


@dataclass(frozen=True)
class Call:
    """One call: the words after the runtime's own path, and the environment."""

    argv: list[str]
    environ: dict[str, str]


@dataclass(frozen=True)
class Recorder:
    """A runtime at ``path`` whose calls can be read."""

    path: Path

    def calls(self) -> list[Call]:
        """Return the calls so far, the oldest first."""
        folder = self.path.parent / "calls"
        numbers = sorted(int(path.stem) for path in folder.glob("*.argv"))
        return [_read(folder, number) for number in numbers]


def recorder(folder: Path, rest: str) -> Recorder:
    """Make a recorder in the new ``folder``; it runs the shell code ``rest`` after recording."""
    (folder / "calls").mkdir(parents=True)
    path = folder / "runtime"
    path.write_text(SCRIPT.format(folder=folder, rest=rest))
    path.chmod(0o755)
    return Recorder(path)


def _read(folder: Path, number: int) -> Call:
    argv = (folder / f"{number}.argv").read_bytes().split(b"\0")[:-1]
    environ = (folder / f"{number}.environ").read_bytes().split(b"\0")[:-1]
    pairs = (setting.decode().partition("=") for setting in environ)
    # The first two words of argv are the interpreter and the script.
    return Call([word.decode() for word in argv[2:]], {name: value for name, _, value in pairs})
