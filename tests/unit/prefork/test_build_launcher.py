"""Compilation of the launcher: from the modules' constants, hardened, analysed, cross-compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import build_launcher
import pytest
from build_launcher import NoCompilerError, build, check, table

from gpuhook.base import names
from gpuhook.base.config.model import Config
from gpuhook.prefork import launcher_cache
from gpuhook.vendors.registry import BUILT_IN

LEAKS = """\
#include "launcher.c"
static int leak(int size);
static int leak(int size)
{
    char *text = malloc((size_t)size);
    return text == NULL;
}
int again(void);
int again(void) { return leak(3); }
"""


def test_every_vendors_variables_are_trigger_strings() -> None:
    """A new vendor therefore needs no change to the C code."""
    [line] = [each for each in table().splitlines() if "DEFAULT_TRIGGERS" in each]
    triggers = line.partition('"')[2].split("\\n")
    assert triggers[-2:] == [launcher_cache.END_MARKER, '"']
    for vendor in BUILT_IN.values():
        memory = getattr(vendor, "MEMORY_VARIABLES", ())
        memory += getattr(vendor, "MEMORY_ANNOTATIONS", ())[1:]
        assert {*vendor.VARIABLES, *vendor.LEGACY[:1], *memory} <= set(triggers)
    assert names.MEMORY_VARIABLE in triggers
    assert '":runc:crun:"' in table()
    assert Config().runtimes == ("runc", "crun")


def test_the_analyser_reports_nothing_in_the_launcher() -> None:
    check()


def test_the_analyser_reports_a_memory_leak(tmp_path: Path) -> None:
    source = tmp_path / "leaks.c"
    source.write_text(LEAKS)
    with pytest.raises(subprocess.CalledProcessError) as found:
        check(source)
    assert "analyzer-malloc-leak" in found.value.stderr


FOUND = [name for name in build_launcher.COMPILERS if shutil.which(name)]


@pytest.mark.parametrize("compiler", FOUND)
def test_the_launcher_is_hardened_with_every_compiler(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gpu-py"
    links = build_launcher.COMPILERS[compiler]
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build_launcher, "COMPILERS", {compiler: links})
    build(program)
    words = ["readelf", "--wide", "--segments", "--dynamic", str(program)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "GNU_RELRO" in text
    [stack] = [line for line in text.splitlines() if "GNU_STACK" in line]
    assert " RWE " not in stack
    assert "NEEDED" not in text, "it is static wherever the C library can be linked so"


def test_a_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompilerError, match="No C compiler was found for gpu-py"):
        build(tmp_path / "gpu-py")
    assert os.listdir(tmp_path) == []


def test_invalid_build_arguments_are_refused() -> None:
    script = Path(table.__code__.co_filename)
    for words in ([], ["x", "vax"], ["--what"], ["x", "x86_64", "y"]):
        done = subprocess.run([sys.executable, script, *words], capture_output=True, check=False)
        assert done.returncode == 1
        assert b"usage:" in done.stderr
