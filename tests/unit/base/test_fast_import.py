"""fast_import: the same modules as from the import system, and never outdated code."""

import compileall
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "src"

LOAD = "from gpuhook.base.fast_import import load\n"
CHOICE = (
    "gpuhook.core.inventory.cache", "gpuhook.core.inventory.selection",
    "gpuhook.vendors.nvidia.vendor",
)  # fmt: skip
STARTS = {
    "runtime": ("gpuhook.runtime_shim", "gpuhook.core.edit", "gpuhook.vendors.registry"),
    "hook": ("gpuhook.prestart_hook", *CHOICE, "gpuhook.inject", "gpuhook.vendors.nvidia.edits"),
    "cdi-hook": ("gpuhook.cdi_hook", "gpuhook.core.cdi.hook"),
    "prefork": ("gpuhook.prefork.supervisor",),
}
# An expression for the names of gpuhook's loaded modules.
OURS = "[m for m in sys.modules if m.startswith('gpuhook.')]"
# Imported by the import system before fast_import works: the package and fast_import itself.
BEFORE = {"gpuhook.base", "gpuhook.base.fast_import"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled copy of the package."""
    copy = tmp_path_factory.mktemp("compiled") / "gpuhook"
    shutil.copytree(SOURCES / "gpuhook", copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(str(copy), quiet=2)
    return copy


@pytest.fixture
def package(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the compiled package that a test may change."""
    return Path(shutil.copytree(compiled, tmp_path / "gpuhook"))


def add(package: Path, name: str, text: str) -> None:
    """Add a compiled module."""
    file = package / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert compileall.compile_file(str(file), quiet=2)


def run(package: Path, code: str) -> list[str]:
    """Run isolated code with the package on its path; return the printed lines."""
    begin = f"import sys; sys.path.append({str(package.parent)!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", begin + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def loads(names: tuple[str, ...]) -> str:
    return LOAD + "".join(f"load({name!r})\n" for name in names)


@pytest.mark.parametrize("names", STARTS.values(), ids=STARTS.keys())
def test_all_modules_of_a_start_use_the_fast_import(compiled: Path, names: tuple[str, ...]) -> None:
    by_system = run(
        compiled, f"{loads(names)}print(*[m for m in {OURS} if sys.modules[m].__spec__])"
    )
    assert set(by_system[0].split()) == BEFORE
    [fast] = run(compiled, f"{loads(names)}print(*{OURS})")
    [ordinary] = run(compiled, f"{LOAD}import {', '.join(names)}\nprint(*{OURS})")
    assert sorted(fast.split()) == sorted(ordinary.split())


def test_fast_imported_modules_equal_ordinary_ones(compiled: Path) -> None:
    show = (
        f"for name in sorted({OURS}):\n"
        "    module = sys.modules[name]\n"
        "    print(name, module.__package__, module.__file__, getattr(module, '__path__', None),\n"
        "          *sorted(set(vars(module)) - {'__cached__'}))\n"
    )
    names = STARTS["hook"]
    ordinary = run(compiled, f"{LOAD}import {', '.join(names)}\n{show}")
    fast = run(compiled, f"{loads(names)}{show}")
    assert [line for line in fast if not line.startswith("gpuhook.base.fast_import")] == [
        line for line in ordinary if not line.startswith("gpuhook.base.fast_import")
    ]


def test_later_imports_use_the_fast_import(package: Path) -> None:
    add(
        package,
        "base/late.py",
        "def get():\n    from gpuhook.base import sizes\n    return sizes\n",
    )
    code = "load('gpuhook.base.late')\nfrom gpuhook.base import late\n"
    assert run(package, f"{LOAD}{code}print(late.get().__spec__)") == ["None"]


IMPORTS = {
    "import gpuhook.base.sizes": "gpuhook.base.sizes",
    "import gpuhook.base.sizes as other": "other",
    "from gpuhook.base import sizes": "sizes",
    "from gpuhook import base": "base.sizes",
    "from gpuhook.base.sizes import *": "parse_size",
    "from gpuhook.base.sizes import parse_size as other": "other",
    "import os.path": "os.path",
    "import json.decoder": "json.decoder",
}


@pytest.mark.parametrize(("statement", "value"), IMPORTS.items(), ids=IMPORTS.keys())
def test_import_statements_bind_the_same_names_as_in_python(
    package: Path, statement: str, value: str
) -> None:
    add(
        package,
        "base/user.py",
        f"import gpuhook.base.sizes as first\n{statement}\nvalue = {value}\n",
    )
    code = "load('gpuhook.base.user')\nfrom gpuhook.base import user\nfound = user.value\n"
    plain = f"import gpuhook.base.sizes\n{statement}\nprint(found is {value})"
    assert run(package, LOAD + code + plain) == ["True"]


FAILURES = {
    "no such module": "from gpuhook.base import nothing",
    "no such name": "from gpuhook.base.sizes import nothing",
    "in a module": "import gpuhook.base.sizes.nothing",
    "no such package": "import gpuhook.nothing.sizes",
    "not ours": "import gpuhook_nothing",
}


@pytest.mark.parametrize("statement", FAILURES.values(), ids=FAILURES.keys())
def test_a_failed_import_raises_the_same_error_as_in_python(package: Path, statement: str) -> None:
    add(package, "base/user.py", f"def fail():\n    {statement}\n")
    code = (
        "load('gpuhook.base.user')\n"
        "from gpuhook.base import user\n"
        "def plain():\n"
        f"    {statement}\n"
        "for call in (user.fail, plain):\n"
        "    try: call()\n"
        "    except ImportError as error: print(type(error).__name__, error)\n"
        "print(*[m for m in sys.modules if 'nothing' in m])\n"
    )
    fast, plain, left = run(package, LOAD + code)
    assert fast == plain
    assert left == ""


def test_a_module_that_fails_to_import_is_not_kept(package: Path) -> None:
    add(package, "base/broken.py", "raise ValueError('broken')\n")
    code = (
        "try: load('gpuhook.base.broken')\n"
        "except ValueError as error: print(error, 'gpuhook.base.broken' in sys.modules)\n"
    )
    assert run(package, LOAD + code) == ["broken False"]


def test_modules_may_import_each_other(package: Path) -> None:
    add(package, "base/first.py", "from gpuhook.base import second\nVALUE = 1\n")
    add(
        package, "base/second.py", "from gpuhook.base import first\ndef get(): return first.VALUE\n"
    )
    code = "load('gpuhook.base.first')\nfrom gpuhook.base import second\nprint(second.get())"
    assert run(package, LOAD + code) == ["1"]


def test_a_packages_init_code_runs(package: Path) -> None:
    add(package, "package/__init__.py", "VALUE = 'yes'\n")
    add(package, "package/inner.py", "from gpuhook.package import VALUE\n")
    code = "load('gpuhook.package.inner')\nfrom gpuhook.package import inner\nprint(inner.VALUE)"
    assert run(package, LOAD + code) == ["yes"]


def test_changed_source_code_is_used(package: Path) -> None:
    source = package / "core/request/sources.py"
    source.write_text(source.read_text() + "\nCHANGED = 'yes'\n")
    code = "from gpuhook.core.request import sources\nprint(sources.CHANGED)"
    assert run(package, loads(STARTS["runtime"]) + code) == ["yes"]


SPOILERS: dict[str, Callable[[Path], object]] = {
    "removed": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:10]),
    "of another Python": lambda file: file.write_bytes(b"1234" + file.read_bytes()[4:]),
    "valid by its source's hash": lambda file: file.write_bytes(
        file.read_bytes()[:4] + b"\1\0\0\0" + file.read_bytes()[8:]
    ),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS.keys())
@pytest.mark.parametrize(
    "module", ["base/errors", "base/config/model", "core/inventory/cache", "core/__init__"]
)
def test_an_unusable_bytecode_file_is_left_to_the_import_system(
    package: Path, module: str, spoil: Callable[[Path], object]
) -> None:
    folder, _, name = module.rpartition("/")
    [file] = (package / folder / "__pycache__").glob(f"{name}.*.pyc")
    spoil(file)
    code = (
        "import gpuhook.runtime_shim, gpuhook.core.inventory.cache\n"
        "from gpuhook.base.config.model import Config\n"
        "print(Config().mode, gpuhook.base.config.loader.DEFAULT_PATH)"
    )
    assert run(package, loads(STARTS["runtime"]) + code) == ["hook /etc/gpuhook/config.toml"]


@pytest.mark.parametrize("folder", ["lib-dynload", "nowhere"])
def test_extension_modules_are_the_standard_librarys(compiled: Path, folder: str) -> None:
    """They are used wherever they are, even if fast_import doesn't look for them there."""
    code = (
        "from gpuhook.base import fast_import\n"
        f"fast_import._EXTENSIONS_FOLDER = {folder!r}\n"
        f"{loads(STARTS['hook'])}"
        "import _json, _ctypes, json, ctypes\n"
        "from gpuhook.base.container import clib\n"
        "from gpuhook.base.oci import jsontext\n"
        "print(jsontext.scanstring is json.decoder.c_scanstring)\n"
        "print(clib.get_errno is ctypes.get_errno, jsontext.loads('[1]'))\n"
        "print(clib.CLibrary().getpid())"
    )
    first, second, pid = run(compiled, code)
    assert (first, second) == ("True", "True [1]")
    assert int(pid) > 0
