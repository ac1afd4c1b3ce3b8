"""The compiler that tests find first, which caches what was built and nothing else."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuhook_simulate.vendors.nvidia import Options, compiler, driver, tables
from gpuhook_simulate.vendors.nvidia.machine import make_machine

GCC = Path(__file__).parents[2] / "lib/compiler/gcc"
KEPT = int(re.findall(r"^KEPT=(\d+)$", GCC.read_text(), re.MULTILINE)[0])
SOURCE = '#include "number.h"\nint number = NUMBER;\n'
FLAGS = ["-shared", "-fPIC", "-nostdlib", "-Wall", "-Wl,--build-id=none"]
LIBRARY_DIR = "/usr/lib/x86_64-linux-gnu"


class Compiler:
    """The caching compiler, with another one behind it whose calls are counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = os.environ["PATH"].removeprefix(f"{GCC.parent}:")
        real = shutil.which("gcc", path=path)
        if real is None:
            pytest.skip("there is no gcc")
        self.folder, self.kept = folder, folder / "kept"
        self.behind, self.calls = folder / "behind/gcc", folder / "calls"
        self.behind.parent.mkdir()
        self.behind.write_text(f'#!/bin/sh\necho >>{self.calls}\nexec {real} "$@"\n')
        self.behind.chmod(0o755)
        self.kept.mkdir()
        self.calls.touch()
        (folder / "number.h").write_text("#define NUMBER 1\n")
        monkeypatch.setenv("PATH", f"{GCC.parent}:{self.behind.parent}:{path}")
        monkeypatch.setenv("GPUHOOK_COMPILED", str(self.kept))

    def start(self, *words: str, source: str = SOURCE) -> subprocess.CompletedProcess[str]:
        argv = ["gcc", f"-I{self.folder}", "-o", str(self.folder / "out"), "-xc", "-", "-xnone"]
        argv += [*FLAGS, *words]
        return subprocess.run(argv, input=source, capture_output=True, text=True, check=False)

    def built(self, *words: str, source: str = SOURCE) -> bytes:
        done = self.start(*words, source=source)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return (self.folder / "out").read_bytes()

    def called(self) -> int:
        """Return how often the compiler behind it was called since the last time."""
        count = len(self.calls.read_text())
        self.calls.write_text("")
        return count


@pytest.fixture
def gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def test_a_driver_is_compiled_once_with_identical_bytes(
    gcc: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_machine(Options(root="/unused", gpus=2))
    built, modes = [], []
    for name in ("first", "remembered", "fresh"):
        if name == "fresh":
            monkeypatch.delenv("GPUHOOK_COMPILED")
        folder = gcc.folder / name
        folder.mkdir()
        (folder / "generated.h").write_text(tables.generated_header(machine, None, LIBRARY_DIR))
        (folder / "generated.c").write_text(tables.generated_source(machine))
        driver.compile_driver(str(folder), compat32=True)
        built.append({each.name: each.read_bytes() for each in folder.iterdir()})
        modes.append({each.name: each.stat().st_mode for each in folder.iterdir()})
        assert (gcc.called() == 0) == (name == "remembered")
    assert len(built[0]) == len(list(gcc.kept.iterdir())) + len(["generated.h", "generated.c"])
    assert built[0] == built[1] == built[2]
    assert modes[0] == modes[1] == modes[2]


def change_header(gcc: Compiler) -> None:
    (gcc.folder / "number.h").write_text("#define NUMBER 2\n")


def change_compiler(gcc: Compiler) -> None:
    with gcc.behind.open("a") as file:
        file.write("# another version\n")


def change_linked(gcc: Compiler) -> None:
    gcc.built(source="int other = 2;\n")
    (gcc.folder / "out").rename(gcc.folder / "other")


@pytest.mark.parametrize("change", [change_header, change_compiler, change_linked])
def test_changed_inputs_are_compiled_again(
    gcc: Compiler, change: Callable[[Compiler], None]
) -> None:
    gcc.built(source="int other = 1;\n")
    linked = str((gcc.folder / "out").rename(gcc.folder / "other"))
    for _ in range(2):
        gcc.built(linked)
    assert gcc.called() == 2
    change(gcc)
    gcc.called()
    gcc.built(linked)
    assert gcc.called() == 1


def test_other_arguments_or_sources_are_compiled_separately(gcc: Compiler) -> None:
    built = [gcc.built(), gcc.built("-Wl,-soname,x"), gcc.built(source="int number = 3;\n")]
    assert gcc.called() == len(set(built)) == 3
    assert [gcc.built(), gcc.built("-Wl,-soname,x"), gcc.built(source="int number = 3;\n")] == built
    assert gcc.called() == 0


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [("int number = none;\n", 1, "error: "), ("static int number;\n", 0, "warning: ")],
)
def test_compiler_errors_and_warnings_are_never_cached(
    gcc: Compiler, source: str, status: int, said: str
) -> None:
    for _ in range(2):
        done = gcc.start(source=source)
        assert done.returncode == status
        assert said in done.stderr
        assert gcc.called()
    assert not any(gcc.kept.iterdir())


def test_other_command_lines_are_passed_to_the_real_compiler(gcc: Compiler) -> None:
    (gcc.folder / "a.c").write_text(SOURCE)
    words = [*FLAGS, "-o", f"{gcc.folder}/out"]
    for argv in (["a.c", *words], [f"{gcc.folder}/a.c", *words], ["--version"]):
        done = subprocess.run(["gcc", *argv], cwd=gcc.folder, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert gcc.called() == 1
    gcc.kept.rmdir()
    gcc.built()
    assert gcc.called() == 1


def test_the_oldest_cached_builds_are_removed(gcc: Compiler) -> None:
    for number in range(KEPT + 3):
        old = gcc.kept / str(number)
        old.touch()
        os.utime(old, (number, number))
    first = gcc.built()
    names = {each.name for each in gcc.kept.iterdir()}
    assert len(names) == KEPT
    assert not {"0", "1", "2", "3"} & names
    gcc.called()
    assert gcc.built() == first
    assert gcc.called() == 0


def test_concurrent_builds_yield_the_same_file(gcc: Compiler) -> None:
    argv = ["gcc", f"-I{gcc.folder}", "-xc", "-", *FLAGS, "-o"]
    each = [
        subprocess.Popen([*argv, str(gcc.folder / f"out{at}")], stdin=subprocess.PIPE, text=True)
        for at in range(8)
    ]
    for one in each:
        one.communicate(SOURCE)
        assert one.returncode == 0
    assert len({(gcc.folder / f"out{at}").read_bytes() for at in range(8)}) == 1
    assert [one.name.startswith(".") for one in gcc.kept.iterdir()] == [False]


def test_driver_sources_include_only_files_of_their_own_folder() -> None:
    """Otherwise a change to another file would go unnoticed."""
    sources = Path(compiler.SOURCES)
    assert {path.parent for path in sources.rglob("*") if path.is_file()} == {sources}
    included = "".join(path.read_text() for path in sources.iterdir())
    assert all("/" not in name for name in re.findall(r'^#include "(.*)"', included, re.MULTILINE))
