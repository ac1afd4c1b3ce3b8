"""Importing at once is importing: the same modules, the same code, never an outdated one."""

import compileall
import shutil
import subprocess
import sys
from pathlib import Path

import preload_lists
import pytest

from gpuhook.base import preload
from gpuhook.vendors.registry import KNOWN

SOURCES = Path(__file__).parents[3] / "src"

GRANT = (
    "gpuhook.core.inventory.cache, gpuhook.core.inventory.selection, gpuhook.vendors.nvidia.vendor"
)
INJECT = "gpuhook.inject, gpuhook.vendors.nvidia.edits"
LISTS = {
    "RUNTIME": "gpuhook.runtime_shim, gpuhook.core.edit, gpuhook.vendors.registry",
    "RUNTIME + preload.INVENTORY + preload.vendor(names) + preload.EDIT": (
        f"gpuhook.runtime_shim, gpuhook.core.edit, gpuhook.vendors.registry, {GRANT}, "
        "gpuhook.base.cgroup.access, gpuhook.prefork.hook_worker"
    ),
    "HOOK": "gpuhook.prestart_hook",
    (
        "HOOK + preload.INVENTORY + preload.vendor(names) + preload.INJECTION "
        "+ preload.vendor_edits(names)"
    ): f"gpuhook.prestart_hook, {GRANT}, {INJECT}",
}
# What the lists of a vendor are in, imported by hand as it is by preloading.
NAMES = "preload.load(preload.REQUEST)\nfrom gpuhook.vendors.nvidia import names\n"
# Imported in the ordinary way.
PRELOAD = ("gpuhook.base", "gpuhook.base.names", "gpuhook.base.preload")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled copy of the package."""
    copy = tmp_path_factory.mktemp("compiled") / "gpuhook"
    shutil.copytree(SOURCES / "gpuhook", copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(str(copy), quiet=2)
    return copy


@pytest.fixture
def package(compiled: Path, tmp_path: Path) -> Path:
    """One that a test may spoil."""
    return Path(shutil.copytree(compiled, tmp_path / "gpuhook"))


def run(package: Path, code: str) -> list[str]:
    """Return what isolated code prints that has the package on its path."""
    begin = f"import sys; sys.path.append({str(package.parent)!r})\n"
    begin += "from gpuhook.base import preload\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", begin + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_lists_are_todays() -> None:
    """If this fails, run .venv/bin/python scripts/lib/preload_lists.py."""
    assert preload_lists.text() in preload_lists.FILE.read_text()


def test_every_vendor_has_its_list() -> None:
    assert all(preload.vendor(names)[-1:] == (f"vendors.{name}.vendor",)
               for name, names in KNOWN.items())  # fmt: skip


@pytest.mark.parametrize(("names", "imports"), LISTS.items(), ids=LISTS.keys())
def test_lists_hold_what_is_imported(compiled: Path, names: str, imports: str) -> None:
    """In an order in which no module makes the import system look for another."""
    ours = f"[m for m in sys.modules if m.startswith('gpuhook.') and m not in {PRELOAD}]"
    code = f"{NAMES}preload.load(preload.{names})\nby_us = {ours}\n"
    assert run(compiled, f"{code}print(*[m for m in by_us if sys.modules[m].__spec__])") == []
    loaded = run(compiled, f"{code}print(*by_us)")
    assert sorted(loaded) == sorted(run(compiled, f"import {imports}\nprint(*{ours})"))


def test_modules_are_the_same(compiled: Path) -> None:
    show = (
        "import gpuhook.runtime_shim, gpuhook.base.config.loader\n"
        "for module in (gpuhook.runtime_shim, gpuhook.base.config.loader):\n"
        "    print(module.__name__, module.__package__, module.__file__, *sorted(vars(module)))\n"
    )
    internal = {"__spec__", "__loader__", "__cached__", "__path__"}
    imported = [word for word in run(compiled, show) if word not in internal]
    loaded = run(compiled, f"preload.load(preload.RUNTIME)\n{show}")
    assert [word for word in loaded if word not in internal] == imported


def test_changed_source_is_what_runs(package: Path) -> None:
    source = package / "core/request/sources.py"
    source.write_text(source.read_text() + "\nCHANGED = 'yes'\n")
    code = (
        "preload.load(preload.RUNTIME)\n"
        "from gpuhook.core.request import sources\n"
        "print(sources.CHANGED)"
    )
    assert run(package, code) == ["yes"]


SPOILERS = {
    "removed": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:10]),
    "of another Python": lambda file: file.write_bytes(b"1234" + file.read_bytes()[4:]),
    "valid by its source's hash": lambda file: file.write_bytes(
        file.read_bytes()[:4] + b"\1\0\0\0" + file.read_bytes()[8:]
    ),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS.keys())
@pytest.mark.parametrize("module", ["base/errors", "base/config/model", "core/inventory/cache"])
def test_unusable_file_is_left_to_the_import_system(
    package: Path, module: str, spoil: object
) -> None:
    folder, _, name = module.rpartition("/")
    [file] = (package / folder / "__pycache__").glob(f"{name}.*.pyc")
    assert callable(spoil)
    spoil(file)
    code = (
        "preload.load(preload.RUNTIME)\n"
        "import gpuhook.runtime_shim, gpuhook.core.inventory.cache\n"
        "from gpuhook.base.config.model import Config\n"
        "print(Config().mode, gpuhook.base.config.loader.DEFAULT_PATH)"
    )
    assert run(package, code) == ["hook", "/etc/gpuhook/config.toml"]


@pytest.mark.parametrize("folder", ["lib-dynload", "nowhere"])
def test_extension_modules_are_the_standard_librarys(compiled: Path, folder: str) -> None:
    """Wherever they are found, and also where that is not where preload looks for them."""
    code = (
        f"preload._EXTENSIONS_FOLDER = {folder!r}\n"
        "preload.load(preload.HOOK + preload.INJECTION)\n"
        "import _json, _ctypes, json, ctypes\n"
        "from gpuhook.base.container import clib\n"
        "from gpuhook.base.oci import jsontext\n"
        "print(jsontext.scanstring is json.decoder.c_scanstring)\n"
        "print(clib.get_errno is ctypes.get_errno, jsontext.loads('[1]'), clib.Library().getpid())"
    )
    first, second, value, pid = run(compiled, code)
    assert (first, second, value) == ("True", "True", "[1]")
    assert int(pid) > 0
