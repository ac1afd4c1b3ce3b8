"""Print the test files that a change touches: those changed, and unit tests of changed modules.

usage: changed.py [COMMIT]

A change is the difference from COMMIT, by default from the upstream branch, including files
that git doesn't track yet. A unit test belongs to a module that it imports. Integration tests
start programs and import nothing, so only changed integration tests are printed.
"""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def _lines(*words: str) -> list[str]:
    done = subprocess.run(
        ["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def _base() -> str:
    try:
        return _lines("merge-base", "HEAD", "@{upstream}")[0]
    except subprocess.CalledProcessError:
        return "HEAD"


def changed(base: str) -> list[str]:
    """Return the paths that differ from a commit, new ones included."""
    paths = _lines("diff", "--name-only", base)
    return sorted({*paths, *_lines("ls-files", "--others", "--exclude-standard")})


def module(path: str) -> str:
    """Return the name of the module in a file of the sources, "" for another file."""
    _, is_source, rest = path.partition("src/")
    if not is_source or not rest.endswith(".py"):
        return ""
    return rest.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def tests_of(paths: list[str]) -> list[str]:
    """Return the test files for these changed paths."""
    found = {path for path in paths if re.fullmatch(r"tests/.*/test_\w+\.py", path)}
    imports = [_imports(name) for name in map(module, paths) if name]
    if imports:
        found.add("tests/unit/test_layers.py")
        for file in (REPOSITORY / "tests/unit").rglob("test_*.py"):
            text = file.read_text()
            if any(each.search(text) for each in imports):
                found.add(str(file.relative_to(REPOSITORY)))
    return sorted(path for path in found if (REPOSITORY / path).exists())


def _imports(name: str) -> re.Pattern[str]:
    """Return the pattern of a statement that imports a module."""
    package, _, last = name.rpartition(".")
    whole = rf"import {re.escape(name)}\b|from {re.escape(name)} import"
    within = rf"from {re.escape(package)} import (\([^)]*|[^(\n]*)\b{re.escape(last)}\b"
    return re.compile(rf"^(?:{whole}|{within})", re.MULTILINE)


if __name__ == "__main__":
    base = sys.argv[1] if len(sys.argv) > 1 else _base()
    sys.stdout.write("".join(f"{path}\n" for path in tests_of(changed(base))))
