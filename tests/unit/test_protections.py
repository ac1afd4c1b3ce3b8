"""Statements named as protections: each has a test with a marker, and can be taken out."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tagged
from build_launcher import FLAGS, compile_with

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts/take-out-protections"


@pytest.fixture(scope="module")
def protections() -> list[tagged.Protection]:
    return tagged.protections(REPOSITORY)


def test_every_protection_has_a_test_and_every_marker_a_protection(
    protections: list[tagged.Protection],
) -> None:
    tags = {tag for each in protections for tag in (each.tag, *(each.also or ())[:1])}
    assert len(tags) > 80
    assert sorted(tags) == sorted(tagged.find(REPOSITORY))


def test_every_protected_statement_can_be_replaced(
    protections: list[tagged.Protection], tmp_path: Path
) -> None:
    places = tagged.find(REPOSITORY)
    checked = tmp_path / "checked"
    checked.mkdir()
    for number, each in enumerate(protections):
        for tag, instead in filter(None, ((each.tag, each.instead), each.also)):
            for file in places[tag]:
                text = (REPOSITORY / file).read_text()
                without = tagged.replace(text, tag, instead, Path(file).suffix)
                assert f"protects: {tag}\n" not in without
                if file.endswith(".py"):
                    same = tagged.replace(text, tag, tagged.STATEMENT, ".py")
                    assert without != same, each.name
                    ast.parse(without)
                    (checked / f"{number}-{tag}-{Path(file).stem}.py").write_text(without)
                elif file.endswith(".c"):
                    (tmp_path / "without.c").write_text(without)
                    compile_with(["gcc", *FLAGS, "-Werror"], tmp_path / "x", tmp_path / "without.c")
                elif without.startswith("#!/bin/sh"):
                    read = subprocess.run(
                        ["sh", "-n"], input=without, capture_output=True, text=True, check=False
                    )
                    assert read.returncode == 0, (each.name, read.stderr)
    # With an undefined name, every test would fail, whatever it checks.
    words = ["check", "--isolated", "--no-cache", "--quiet", "--output-format=concise"]
    undefined = subprocess.run(
        [sys.executable, "-m", "ruff", *words, "--select=F821,F823", str(checked)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert undefined.stdout.replace(f"{checked}/", "") == "", undefined.stderr


@pytest.mark.parametrize(
    ("text", "instead", "without"),
    [
        ("check(a)  # protects: it\n", "", "pass\n"),
        ("check(\n    a,\n    b,  # protects: it\n)\nc()\n", "", "pass\nc()\n"),
        ("# protects: it\n# or not\ncheck(\n    a\n)\n", "", "# or not\npass\n"),
        ("if a and b:  # protects: it\n    c()\n", "", "if False:\n    c()\n"),
        ("if (\n    a\n    and b  # protects: it\n):\n    c()\n", "", "if False:\n    c()\n"),
        (
            "if a:\n    b()\nelif c:  # protects: it\n    d()\n",
            "",
            "if a:\n    b()\nelif False:\n    d()\n",
        ),
        ("while a:  # protects: it\n    b()\n", "while a and c:", "while a and c:\n    b()\n"),
        (
            "try:\n    a()\n# protects: it\nexcept A:\n    b()\n",
            "except B:",
            "try:\n    a()\nexcept B:\n    b()\n",
        ),
        (
            "if a:\n    b = [\n        1,  # protects: it\n    ]\n",
            f"{tagged.STATEMENT}\nb.clear()",
            "if a:\n    b = [\n            1,\n        ]\n    b.clear()\n",
        ),
        ("a = 1  # protects: it\nb()\na = 2  # protects: it\n", "a = 3", "a = 3\nb()\na = 3\n"),
        ("a = 1  # protects: it-not\n", "a = 3", "a = 1  # protects: it-not\n"),
    ],
)
def test_protected_python_statements_are_found_in_any_layout(
    text: str, instead: str, without: str
) -> None:
    assert tagged.replace(text, "it", instead, ".py") == without


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("a || b # protects: it\nc\n", ":\nc\n"),
        ("    # protects: it\n    a \\\n    b\nc\n", "    :\nc\n"),
    ],
)
def test_protected_shell_statements_are_replaced_by_line(text: str, without: str) -> None:
    assert tagged.replace(text, "it", "", "") == without


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("if (a)\n    return; // protects: it\nb();\n", "if (a)\n    (void)0;\nb();\n"),
        ("    // protects: it\n    a();\n    b();\n", "    (void)0;\n    b();\n"),
    ],
)
def test_protected_c_statements_are_replaced_by_line(text: str, without: str) -> None:
    assert tagged.replace(text, "it", "", ".c") == without


def test_a_protected_loop_needs_an_explicit_replacement() -> None:
    with pytest.raises(ValueError, match="it: say what stands there instead"):
        tagged.replace("for a in b:  # protects: it\n    c()\n", "it", "", ".py")


def test_a_missing_test_environment_is_reported_without_a_traceback(tmp_path: Path) -> None:
    """Nothing is taken out if the environment of the tests is missing and can't be made."""
    (tmp_path / "scripts/lib").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    script = Path(shutil.copy(SCRIPT, tmp_path / "scripts"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(
        '@pytest.mark.protects("it", "it holds")\ndef test_it():\n    pass\n'
    )
    for name in ("setup.sh", "tagged.py"):
        shutil.copy(REPOSITORY / "scripts/lib" / name, tmp_path / "scripts/lib")
    for name in ("python3", "flock", "apt-get"):  # no Python for an environment, and no network
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("take-out-protections: what the tests need")
    assert "Traceback" not in done.stderr


def test_a_word_in_no_protections_name_is_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "no such"], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == b"take-out-protections: no protection's name has no such\n"
