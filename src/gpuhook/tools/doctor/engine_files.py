"""Readers of engines' files and of their programs' output for the doctor."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

from gpuhook.base import names
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.engines import marks

_PATIENCE = 5.0  # seconds
_PROGRAM_KEYS = ("BinaryName", "runtime_path", "runtime_engine")


def imports(machine: Machine, path: str) -> list[str]:
    """Return the files that containerd's configuration imports, recursively."""
    found = [path]
    for each in found:
        for pattern in strings(toml(machine, each)[0].get("imports")):
            absolute = os.path.join(os.path.dirname(each), pattern)
            found += [name for name in machine.glob(absolute) if name not in found]
    return found[1:]


def toml(machine: Machine, path: str) -> tuple[dict[str, Any], str]:
    """Return a file's tables and its error; a missing file counts as empty."""
    try:
        return tomllib.loads(machine.text(path) or ""), ""
    except tomllib.TOMLDecodeError as error:
        return {}, str(error)


def table(table: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a subtable, empty if the value isn't a table."""
    value = table.get(key)
    return value if isinstance(value, dict) else {}


def strings(value: object) -> list[str]:
    """Return the strings in a list, none if the value isn't a list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def programs_of(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name of the runtime's table, program) for each configured program."""
    if not isinstance(value, dict):
        return
    for key, entry in value.items():
        if key in _PROGRAM_KEYS and isinstance(entry, str):
            yield name, entry
        yield from programs_of(entry, name if key == "options" else key)


def version_of(machine: Machine, program: str) -> str:
    """Return a program's version from --version, "" if it is missing or unknown."""
    path = machine.which(program, names.SEARCH_PATH) or ""
    return version_in(output(machine, path, "--version"))


def version_in(said: bytes) -> str:
    """Return the version in a program's output, "" for none."""
    found = re.search(rb"\b\d{1,4}\.\d[\d.]*", said)
    return found[0].decode() if found else ""


def output(machine: Machine, path: str, *words: str, name: str = "") -> bytes:
    """Return a program's output, b"" if it is missing or doesn't answer.

    ``name`` is its argv[0], if given: some programs behave differently by name.
    """
    try:
        done = subprocess.run(
            [name or machine.path(path), *words],
            executable=machine.path(path),
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout


def unread(machine: Machine, engine: str, path: str, version: str = "") -> str:
    """Return why an engine can't read a file with a byte order mark, "" if it may read it.

    ``version`` is the engine's version, read from its program if not given.
    """
    program = {"docker": "dockerd"}.get(engine, engine)
    return marks.problem(
        engine, machine.data(path), lambda: version or version_of(machine, program) or None
    )
