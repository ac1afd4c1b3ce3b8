"""Allowed imports between packages, and modules that a start may load.

Imports are read from the sources, including those inside functions and those only for typing.
What a start loads is counted, because times differ between hosts: one module of the standard
library can cost more than a whole container start may take.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from gpuhook.vendors.registry import BUILT_IN

SOURCES = Path(__file__).parents[2] / "src"
PACKAGE = SOURCES / "gpuhook"

# The parts of gpuhook, lowest first, and the parts that each imports, which are all below it.
# Root runs only these from a container's create to its start.
INSIDE: Mapping[str, set[str]] = {
    "base": set(),
    "core": {"base"},
    "vendors": {"base", "core"},
    "inject": {"base", "core"},
    "cdi_hook": {"base", "inject", "core", "vendors"},
    "prefork": {"cdi_hook", "base", "inject", "core", "vendors"},
    "runtime_shim": {"base", "prefork", "core", "vendors"},
    "prestart_hook": {"base", "inject", "core", "vendors"},
    "_start": {"cdi_hook", "base", "prestart_hook", "runtime_shim", "prefork"},
}
# Parts for commands and services, which no part above imports. cluster, metrics and hpc don't
# import each other, and tools imports none of them: they register their commands
# (tools.extensions).
_CORE = {"base", "core", "inject", "prefork", "runtime_shim", "vendors"}
_SHARED = {*_CORE, "monitor", "tools"}
PARTS = {
    **INSIDE,
    "monitor": _CORE,
    "tools": {*_CORE, "monitor"},
    "nvidia_cli": _SHARED,
    "cluster": _SHARED,
    "metrics": _SHARED,
    "hpc": _SHARED,
}
_MOST = 20_000  # most lines of a part


def dotted(path: Path) -> str:
    """Return a module's name without ``gpuhook.``, or ``gpuhook`` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "gpuhook"


MODULES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part(module: str) -> str:
    """Return the part of gpuhook that a module belongs to; a program is a part itself."""
    return module.partition(".")[0]


def package(module: str) -> str:
    """Return a module's package: its folder, or the module itself if the folder is a part."""
    if MODULES[module].name == "__init__.py":
        return module
    folder = module.rpartition(".")[0]
    return module if folder in PARTS or not folder else folder


def second(module: str) -> str:
    """Return a module's package at the second level: a folder of a part with all below it."""
    return ".".join(module.split(".")[:2])


def imports(text: str) -> Iterator[str]:
    """Yield the gpuhook modules that a source imports anywhere."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports say from where"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            named = [each if _ours(each) in MODULES else str(node.module) for each in inside]
        else:
            continue
        yield from (_ours(name) for name in named if name.partition(".")[0] == "gpuhook")


def _ours(name: str) -> str:
    return name.removeprefix("gpuhook.")


@cache
def graph() -> dict[str, set[str]]:
    """Return the gpuhook modules that each module imports."""
    return {name: {*imports(path.read_text())} - {name} for name, path in MODULES.items()}


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle, or [] if none exists."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges.get(name, ())):
            if found := search(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := search(name, []))), [])


def between(place: Callable[[str], str]) -> dict[str, set[str]]:
    """Return which groups of modules import each other; ``place`` returns a module's group."""
    found: dict[str, set[str]] = {place(name): set() for name in MODULES if name != "gpuhook"}
    for module, others in graph().items():
        if module != "gpuhook":
            found[place(module)] |= {place(other) for other in others if other != "gpuhook"}
    return {each: others - {each} for each, others in found.items()}


def test_start_code_imports_start_code_only() -> None:
    """The code of a container start imports nothing that only commands and services use."""
    through = [
        (module, other)
        for module, others in graph().items()
        for other in others
        if part(module) in INSIDE and part(other) not in {*INSIDE, "gpuhook"}
    ]
    assert through == []


def test_parts_import_only_allowed_parts() -> None:
    found = between(part)
    assert {name: found[name] - PARTS[name] for name in PARTS} == {name: set() for name in PARTS}
    assert {*found} == {*PARTS}
    order = [*PARTS]
    assert [(a, b) for a in order for b in PARTS[a] if order.index(b) >= order.index(a)] == []


def test_packages_have_no_circular_imports() -> None:
    assert circle(between(package)) == []


def test_second_level_packages_have_no_circular_imports() -> None:
    assert circle(between(second)) == []


def test_no_part_is_too_large() -> None:
    sizes = dict.fromkeys(PARTS, 0)
    for name, path in MODULES.items():
        if name != "gpuhook":
            sizes[part(name)] += path.read_text().count("\n")
    assert max(sizes.values()) < _MOST, sizes


def test_the_architecture_page_has_current_file_and_line_counts() -> None:
    page = (SOURCES.parent / "docs/engineering/architecture.md").read_text()
    said = re.findall(r"(\d+) files and\s+([\d,]+) lines", page)
    for (files, lines), names in zip(said, ({*INSIDE}, {*PARTS} - {*INSIDE}), strict=True):
        texts = [path.read_text() for name, path in MODULES.items() if part(name) in names]
        counts = [text.count("\n") for text in texts if text.count("\n") > 1]
        for rounded, exact in ((files, len(counts)), (lines, sum(counts))):
            assert int(rounded.replace(",", "")) == pytest.approx(exact, rel=0.1)


def test_modules_have_no_circular_imports() -> None:
    assert circle(graph()) == []


def test_circular_imports_are_detected() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    source = "if TYPE_CHECKING:\n    from gpuhook.base import log\n"
    source += "def f():\n    import gpuhook.inject\n"
    assert [*imports(source)] == ["base.log", "inject"]
    assert [*imports("from gpuhook.base.errors import shown\n")] == ["base.errors"]


def test_only_the_simulate_command_refers_to_gpuhook_simulate() -> None:
    knows = {name for name, path in MODULES.items() if "gpuhook_simulate" in path.read_text()}
    assert knows == {"tools.cli.simulate"}


def test_class_names_are_unique() -> None:
    modules: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(name)
    repeated = {name: where for name, where in modules.items() if len(where) > 1}
    assert repeated == {}, "give each class a noun that no other has, with its subject in front"


def test_the_top_package_has_at_most_12_modules() -> None:
    assert len([*PACKAGE.glob("*.py")]) <= 12


# Modules that the interpreter imports when it starts, and modules that cost nothing to import.
FREE = {
    "__main__", "gc", "_abc", "_codecs", "_collections_abc", "_frozen_importlib",
    "_frozen_importlib_external", "_imp", "_io", "_locale", "_signal", "_stat", "_thread",
    "_warnings", "_weakref", "abc", "builtins", "codecs", "encodings", "encodings.aliases",
    "encodings.utf_8", "errno", "genericpath", "io", "marshal", "os", "os.path", "posix",
    "posixpath", "stat", "sys", "time", "zipimport",
}  # fmt: skip
if sys.version_info >= (3, 13):
    FREE.add("linecache")  # the interpreter imports it to remember the text of -c
JSON = {"_json"}
KERNEL = {"_ctypes"}


class Start(NamedTuple):
    """Imports of a start, the maximum number of gpuhook's files among them, and other modules.

    ``beyond`` has the modules that it may load in addition to the free ones.
    The vendors' names are not included: one file for each vendor, requested or not.
    """

    imports: str
    files: int
    beyond: set[str]


NVIDIA = "gpuhook.vendors.nvidia"
SPEC = "gpuhook._start, gpuhook.runtime_shim, gpuhook.core.edit, gpuhook.vendors.registry"
CHOICE = f"gpuhook.core.inventory.cache, gpuhook.core.inventory.selection, {NVIDIA}.vendor"
ACCESS = "gpuhook.base.cgroup.access, gpuhook.prefork.hook_worker"
VENDORS = {f"vendors.{name}" for name in BUILT_IN}
CDI_HOOK = f"gpuhook._start, gpuhook.cdi_hook, gpuhook.core.cdi.hook, {CHOICE}, gpuhook.inject"
STARTS = {
    "runtime, no GPU": Start(SPEC, 20, JSON),
    "runtime, GPU": Start(f"{SPEC}, {CHOICE}, {ACCESS}", 33, JSON),
    "hook, no GPU": Start("gpuhook._start, gpuhook.prestart_hook", 18, JSON),
    "hook, GPU": Start(
        f"gpuhook._start, gpuhook.prestart_hook, {CHOICE}, gpuhook.inject, {NVIDIA}.edits",
        45,
        JSON | KERNEL,
    ),
    "hook of CDI": Start(f"{CDI_HOOK}, {NVIDIA}.edits", 49, JSON | KERNEL),
}


def loaded(start: Start) -> tuple[set[str], set[str]]:
    """Return the gpuhook modules and the others that an isolated interpreter has after a start.

    Packages without code are not counted.
    """
    code = f"import sys; sys.path.append({str(SOURCES)!r}); import {start.imports}"
    words = [sys.executable, "-I", "-S", "-c", f"{code}; print(*sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    every = set(done.stdout.split())
    ours = {name for name in every if name.partition(".")[0] == "gpuhook"}
    found = {_ours(name) for name in ours}
    empty = {name for name in found if len(ast.parse(MODULES[name].read_text()).body) == 1}
    return found - empty, every - ours


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_a_start_loads_only_allowed_modules(start: Start) -> None:
    ours, others = loaded(start)
    assert {part(name) for name in ours} <= {*INSIDE, "gpuhook"}
    assert len(ours - {f"{each}.names" for each in VENDORS}) <= start.files, sorted(ours)
    assert others - FREE - start.beyond == set()


@pytest.mark.parametrize("name", ["runtime, no GPU", "hook, no GPU"])
def test_only_the_names_of_an_unrequested_vendor_are_loaded(name: str) -> None:
    ours, _ = loaded(STARTS[name])
    vendors = {each for each in ours if each.startswith("vendors.")} - {"vendors.registry"}
    assert vendors == {f"{each}.names" for each in VENDORS}


def test_a_start_with_a_saved_inventory_loads_no_device_search() -> None:
    ours, _ = loaded(STARTS["hook, GPU"])
    assert not {"vendors.nvidia.discover", "vendors.nvidia.nvml", "base.loader.elf"} & ours
