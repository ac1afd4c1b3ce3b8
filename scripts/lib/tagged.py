"""Find and replace the statements of the sources that a comment names as protections.

A test that fails without a protection has a marker, ``pytest.mark.protects(TAG, SENTENCE)``.
Its ``instead`` is the replacement of the statement. ``also`` is a second line of defence, with
its tag and its replacement. ``only`` selects parameters of the test, as pytest's -k does.

``# protects: NAME`` stands at the end of a line of the statement, or in a line before it; in
C, // replaces #. The name finds the statement, so its code may change. In a shell script a
statement is a line with its continuation lines; in C it is one line.
"""

import ast
import dataclasses
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

FOLDERS = ("src", "simulate/src", "launchers", "packaging")
STATEMENT = "<the statement>"
_TAG = re.compile(r"^(.*?)[ ]*(?:#|//) protects: ([a-z0-9-]+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Protection:
    """One marker: the protection, the statement's tag, and pytest's arguments for its tests."""

    name: str
    tag: str
    tests: tuple[str, ...]
    instead: str = ""
    also: tuple[str, str] | None = None


def protections(repository: Path) -> list[Protection]:
    """Return the protections that the markers describe, each with all its tests."""
    found: dict[Protection, list[str]] = {}
    for path in sorted((repository / "tests").rglob("test_*.py")):
        if "mark.protects(" in (text := path.read_text()):
            for test, marker in _markers(ast.parse(text)):
                words = {str(each.arg): ast.literal_eval(each.value) for each in marker.keywords}
                tag, name = map(ast.literal_eval, marker.args)
                only = words.pop("only", "")
                one = Protection(name, tag, ("-k", only) if only else (), **words)
                found.setdefault(one, []).append(f"{path.relative_to(repository)}::{test}")
    return [dataclasses.replace(one, tests=(*tests, *one.tests)) for one, tests in found.items()]


def _markers(tree: ast.Module | ast.ClassDef, within: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yield the marked tests of a module or class, by their names for pytest, and their markers."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _markers(node, f"{node.name}::")
        elif isinstance(node, ast.FunctionDef):
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.protects":
                    yield within + node.name, each


def find(repository: Path) -> dict[str, list[str]]:
    """Return the files that contain each name, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, list[str]] = {}
    for file in filter(None, listed.split("\0")):
        path = repository / file
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes().decode("utf-8", "replace")
            for name in sorted({match[2] for match in _TAG.finditer(text)}):
                found.setdefault(name, []).append(file)
    return found


def replace(text: str, name: str, instead: str, suffix: str) -> str:
    """Return the text of a file in which each statement of that name is replaced.

    ``suffix`` of the file's name determines the language: ".py", ".c", or else a shell script.

    ``instead`` is the new statement. For an ``if``, a loop or an ``except`` it is the part up
    to the colon, and STATEMENT in it stands for the old part. If it is empty, the new
    statement does nothing, and a condition never holds. ``ValueError`` means that the
    statement is missing or can't be replaced.
    """
    lines = text.splitlines()
    while (number := _index(lines, name)) is not None:
        before = cast("re.Match[str]", _TAG.match(lines[number]))[1]
        if before:
            lines[number] = before
        else:
            del lines[number]
        first, last, default = _STATEMENTS.get(suffix, _shell)(lines, number)
        new = instead or default
        if not new:
            raise ValueError(f"{name}: say what stands there instead")
        space = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        new = new.replace(STATEMENT, "\n".join(lines[first : last + 1]).strip())
        lines[first : last + 1] = [f"{space}{line}" for line in new.split("\n")]
    return "\n".join(lines) + "\n"


def _index(lines: list[str], name: str) -> int | None:
    """Return the index of the first line with that name, counted from 0."""
    matches = (match and match[2] == name for match in map(_TAG.match, lines))
    return next((number for number, match in enumerate(matches) if match), None)


def _python(lines: list[str], number: int) -> tuple[int, int, str]:
    """Return first and last line of a line's innermost statement, and its default replacement."""
    while not lines[number].strip() or lines[number].lstrip().startswith("#"):
        number += 1
    best: tuple[int, int, ast.stmt | ast.ExceptHandler] | None = None
    for node in _around(ast.parse("\n".join(lines)), number + 1):
        body = getattr(node, "body", [])
        end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        if node.lineno <= number + 1 <= end and (best is None or node.lineno >= best[0]):
            best = node.lineno, end, node
    if best is None:
        raise ValueError(f"no statement is in line {number + 1}")
    first, end, node = best
    if isinstance(node, ast.If):
        default = "elif False:" if lines[first - 1].lstrip().startswith("elif") else "if False:"
    else:
        default = "" if hasattr(node, "body") else "pass"
    return first - 1, end - 1, default


def _around(tree: ast.AST, line: int) -> Iterator[ast.stmt | ast.ExceptHandler]:
    """Yield the statements that contain a line, the outermost first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.match_case):
            yield from _around(node, line)
        elif isinstance(node, ast.stmt | ast.ExceptHandler) and line in _lines_of(node):
            yield node
            yield from _around(node, line)


def _lines_of(node: ast.stmt | ast.ExceptHandler) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _shell(lines: list[str], number: int) -> tuple[int, int, str]:
    """Return the first and last line of a shell statement, and its default replacement."""
    last = number
    while lines[last].endswith("\\"):
        last += 1
    return number, last, ":"


def _c(lines: list[str], number: int) -> tuple[int, int, str]:
    """Return the first and last line of a C statement, and its default replacement."""
    del lines
    return number, number, "(void)0;"


_STATEMENTS = {".py": _python, ".c": _c}
