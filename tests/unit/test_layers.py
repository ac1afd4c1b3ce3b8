"""Who may import whom, and what a start may load.

Imports are read from the sources: those inside functions count, and those for typing alone.
What a start loads is counted, because times differ between machines: one module of the
standard library can cost more than a container start may take in all.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from gpuhook.start import preload
from gpuhook.vendors.seam import KNOWN

SOURCES = Path(__file__).parents[2] / "src"
PACKAGE = SOURCES / "gpuhook"

# What every room may import.
FOR_ALL = {"gpuhook", "errors", "names"}

# The lines of docs/engineering/architecture.md, from the bottom up: none imports one above its own.
LINES = (
    ("gpuhook", "names", "errors"),
    ("container", "oci", "host", "engines", "simulate"),
    ("request", "config", "inventory", "cgroup", "loader", "log", "vendors.nvidia.simulate"),
    (
        "cdi", "driver_folder", "plan", "vendors", "vendors.nvidia", "vendors.declared",
        "vendors.declared.simulate",
        "vendors.amd", "vendors.amd.simulate",
        "vendors.neuron", "vendors.neuron.simulate",
        "vendors.gaudi", "vendors.gaudi.simulate",
        "vendors.ascend", "vendors.ascend.simulate",
        "vendors.intel_gpu", "vendors.intel_gpu.simulate",
        "vendors.intel_npu", "vendors.intel_npu.simulate",
    ),
    ("resolve", "start", "inject", "running"),
    (
        "cli", "doctor", "nvidia_cli", "_start", "runtime_shim", "prestart_hook", "cdi_hook",
        "kubernetes", "metrics", "slurm",
        "vendors.nvidia.doctor",
        "vendors.amd.doctor",
        "vendors.neuron.doctor",
        "vendors.gaudi.doctor",
        "vendors.declared.doctor",
        "vendors.ascend.doctor",
        "vendors.intel_gpu.doctor", "vendors.intel_npu.doctor",
    ),
)  # fmt: skip

# A room, or a module at the top -> what else it imports, and may.
LAYERS: Mapping[str, set[str]] = {
    "gpuhook": set(),
    "names": set(),
    "errors": set(),
    "oci": set(),
    "host": set(),
    "simulate": {"host"},
    "container": {"host"},
    "engines": {"host"},
    "loader": {"container"},
    "config": set(),
    "log": {"config", "oci"},
    "request": {"config", "oci"},
    "inventory": {"config", "container", "oci"},
    "cgroup": {"container", "host", "inventory"},
    # The seam names vendors and is typed by what it stands between; a vendor imports no room of
    # a start, and nobody but its own rooms imports a vendor.
    "plan": {"config", "container", "inventory", "loader", "oci", "vendors"},
    "vendors": {
        "config", "container", "inventory", "oci", "plan", "request", "vendors.nvidia",
        "vendors.amd", "vendors.declared", "vendors.gaudi", "vendors.neuron",
        "vendors.ascend",
        "vendors.intel_gpu", "vendors.intel_npu",
    },
    "vendors.declared": {
        "config", "container", "inventory", "loader", "oci", "plan", "vendors",
    },
    "vendors.declared.simulate": {"config", "simulate"},
    "vendors.declared.doctor": {"doctor", "vendors"},
    "vendors.nvidia": {
        "cgroup", "config", "container", "inventory", "loader", "oci", "plan", "request",
        "vendors",
    },
    "vendors.neuron": {"config", "container", "inventory", "oci", "request", "vendors"},
    "vendors.neuron.simulate": {"simulate", "vendors.neuron"},
    "vendors.gaudi": {"config", "container", "inventory", "oci", "vendors"},
    "vendors.gaudi.simulate": {"simulate", "vendors.gaudi"},
    "vendors.gaudi.doctor": {"doctor", "vendors.gaudi"},
    "vendors.neuron.doctor": {"doctor", "vendors.neuron"},
    "vendors.nvidia.simulate": {"simulate"},
    "vendors.nvidia.doctor": {
        "container", "doctor", "inventory", "loader", "vendors", "vendors.nvidia",
    },
    "vendors.amd": {"config", "container", "inventory", "vendors"},
    "vendors.amd.simulate": {"simulate", "vendors.amd"},
    "vendors.amd.doctor": {"container", "doctor", "inventory", "vendors.amd"},
    "vendors.ascend": {
        "config", "container", "host", "inventory", "loader", "oci", "plan", "request", "vendors",
    },
    "vendors.ascend.simulate": {"simulate", "vendors.ascend"},
    "vendors.intel_gpu": {"config", "container", "inventory", "plan", "vendors"},
    "vendors.intel_gpu.simulate": {"simulate", "vendors.intel_gpu"},
    "vendors.intel_gpu.doctor": {"doctor", "vendors", "vendors.intel_gpu"},
    "vendors.intel_npu": {"config", "container", "inventory", "vendors"},
    "vendors.intel_npu.simulate": {"simulate", "vendors.intel_npu"},
    "vendors.intel_npu.doctor": {"doctor", "vendors", "vendors.intel_npu"},
    "vendors.ascend.doctor": {"container", "doctor", "inventory", "oci", "vendors.ascend"},
    # A document is made of plans, and of what vendors say of their devices.
    "cdi": {
        "cgroup", "config", "container", "engines", "host", "inventory", "loader", "oci", "plan",
        "request", "vendors",
    },
    "driver_folder": {
        "cdi", "config", "container", "host", "inventory", "loader", "plan", "vendors",
        "vendors.nvidia",
    },
    "running": {
        "cdi", "cgroup", "config", "container", "engines", "host", "inventory", "oci", "resolve",
        "vendors",
    },
    "resolve": {"config", "inventory", "oci", "plan", "request", "start", "vendors"},
    "inject": {"cgroup", "config", "container", "host", "log", "oci", "plan", "resolve", "running"},
    "start": {
        "cgroup", "config", "container", "host", "inject", "inventory", "loader", "log", "oci",
        "plan", "request", "resolve", "running", "vendors",
    },
    "runtime_shim": {
        "cdi", "cgroup", "config", "container", "inventory", "log", "oci", "plan", "request",
        "resolve", "running", "start",
    },
    "prestart_hook": {"config", "inject", "log", "oci", "resolve", "running", "runtime_shim"},
    "nvidia_cli": {
        "cdi", "cli", "config", "container", "engines", "host", "inject", "inventory", "log", "oci",
        "plan", "request", "running", "vendors", "vendors.nvidia",
    },
    "cdi_hook": {
        "cdi", "config", "inject", "inventory", "log", "oci", "running", "start", "vendors",
    },
    "kubernetes": {
        "cdi", "config", "container", "driver_folder", "engines", "host", "inventory", "request",
        "start", "vendors",
    },
    "metrics": {
        "config", "container", "host", "inventory", "kubernetes", "running", "vendors",
    },
    "_start": {"cdi_hook", "nvidia_cli", "prestart_hook", "runtime_shim", "start"},
    "slurm": {"cdi", "config", "container", "host", "inventory", "oci", "vendors"},
    # What a vendor has for the doctor is found by way of "vendors", when the doctor is called.
    "doctor": {
        "cdi",
        "config", "engines", "host", "inventory", "log", "runtime_shim", "start", "vendors",
    },
    "cli": {
        "cdi", "cgroup", "config", "container", "doctor", "driver_folder", "engines", "host",
        "inject", "inventory", "kubernetes", "metrics", "nvidia_cli", "oci", "plan", "request",
        "resolve", "running", "simulate", "slurm", "start", "vendors", "vendors.nvidia",
        "vendors.nvidia.simulate",
    },
}  # fmt: skip


def dotted(path: Path) -> str:
    """Return a module's name without ``gpuhook.``, "gpuhook" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "gpuhook"


MODULES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """Return the room of a module: its folder, or itself at the top.

    What a vendor has for one command is a room, be it a module or a folder.
    """
    if module.startswith("vendors.") and module.rpartition(".")[2] in ("doctor", "simulate"):
        return module
    whole = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    return whole or module


def imports(text: str) -> Iterator[str]:
    """Yield the modules of ours that a source imports anywhere."""
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


def graph() -> dict[str, set[str]]:
    """Return what each module imports of ours."""
    return {name: {*imports(path.read_text())} - {name} for name, path in MODULES.items()}


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of a circle, [] if there is none."""
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


def test_rooms_import_what_the_table_says() -> None:
    found: dict[str, set[str]] = {room(name): set() for name in MODULES}
    for module, others in graph().items():
        found[room(module)] |= {room(other) for other in others}
    assert {each: found[each] - {each} - FOR_ALL for each in found} == LAYERS


def test_no_room_imports_one_above() -> None:
    line = {each: number for number, rooms in enumerate(LINES) for each in rooms}
    assert set(line) == set(LAYERS)
    assert [(a, b) for a, others in LAYERS.items() for b in others if line[b] > line[a]] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle(graph()) == []


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    source = "if TYPE_CHECKING:\n    from gpuhook import log\ndef f():\n    import gpuhook.errors\n"
    assert [*imports(source)] == ["log", "errors"]
    assert [*imports("from gpuhook.errors import shown\n")] == ["errors"]


def test_top_holds_a_handful() -> None:
    assert len([*PACKAGE.glob("*.py")]) <= 12


def test_rooms_on_the_way_of_a_start_are_empty() -> None:
    """preload makes them without a look at their ``__init__``."""
    vendors = [name for each in KNOWN.values() for name in (*each.MODULES, *each.HOOK_MODULES)]
    ours = (*preload.RUNTIME, *preload.HOOK, *preload.INVENTORY, *preload.EDIT)
    named = {*ours, *preload.INJECTION, *vendors}
    rooms = {room(name) for name in named if "." in name} - named
    assert {"request", "vendors.nvidia"} <= rooms
    for each in [*rooms, "vendors"]:
        [docstring] = ast.parse(MODULES[each].read_text()).body
        assert isinstance(docstring, ast.Expr)


# What the interpreter itself has imported when it begins, and what costs nothing to import.
FREE = {
    "__main__", "gc", "_abc", "_codecs", "_collections_abc", "_frozen_importlib",
    "_frozen_importlib_external", "_imp", "_io", "_locale", "_signal", "_stat", "_thread",
    "_warnings", "_weakref", "abc", "builtins", "codecs", "encodings", "encodings.aliases",
    "encodings.utf_8", "errno", "genericpath", "io", "marshal", "os", "os.path", "posix",
    "posixpath", "stat", "sys", "time", "zipimport",
}  # fmt: skip
if sys.version_info >= (3, 13):
    FREE.add("linecache")  # by the interpreter, to remember what -c was given
JSON = {"_json"}
KERNEL = {"_ctypes"}


class Start(NamedTuple):
    """What a start imports, how many of our files that are at most, and what it may load.

    ``rooms`` are those it has modules from, ``beyond`` what else than free modules it loads.
    The names of vendors come on top of that: one file for each, asked for or not.
    """

    imports: str
    files: int
    rooms: set[str]
    beyond: set[str]


NVIDIA = "gpuhook.vendors.nvidia"
SPEC = "gpuhook._start, gpuhook.runtime_shim, gpuhook.oci.spec, gpuhook.resolve"
CHOICE = f"gpuhook.inventory.cache, gpuhook.inventory.selection, {NVIDIA}.vendor"
ACCESS = "gpuhook.cgroup.access, gpuhook.start.helper"
TOP = {"gpuhook", "_start", "errors", "log", "names", "resolve"}
VENDORS = {f"vendors.{name}" for name in KNOWN}
RUNTIME = {
    *TOP, *VENDORS, "runtime_shim", "config", "inventory", "oci", "request", "start", "vendors",
}  # fmt: skip
HOOK = RUNTIME - {"runtime_shim"} | {"prestart_hook"}
CDI_HOOK = f"gpuhook._start, gpuhook.cdi_hook, gpuhook.cdi.hook, {CHOICE}, gpuhook.inject"
WORK = {"inject", "cgroup", "plan", "container", "host", "loader", "running"}
STARTS = {
    "runtime, no GPU": Start(SPEC, 21, RUNTIME, JSON),
    "runtime, GPU": Start(f"{SPEC}, {CHOICE}, {ACCESS}", 33, {*RUNTIME, "cgroup", "host"}, JSON),
    "hook, no GPU": Start("gpuhook._start, gpuhook.prestart_hook", 20, HOOK, JSON),
    "hook, GPU": Start(
        f"gpuhook._start, gpuhook.prestart_hook, {CHOICE}, gpuhook.inject, {NVIDIA}.edits",
        46,
        {*HOOK, *WORK},
        JSON | KERNEL,
    ),
    "hook of CDI": Start(
        f"{CDI_HOOK}, {NVIDIA}.edits",
        49,
        {*HOOK - {"prestart_hook", "resolve"}, "cdi", "cdi_hook", *WORK},
        JSON | KERNEL,
    ),
}


def loaded(start: Start) -> tuple[set[str], set[str]]:
    """Return the modules of ours, and the others, that an isolated interpreter has then.

    Rooms that hold nothing are left out: no file is read for them.
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
def test_start_loads_no_more_than_it_may(start: Start) -> None:
    ours, others = loaded(start)
    assert {room(name) for name in ours} == start.rooms
    assert len(ours - {f"{each}.names" for each in VENDORS}) <= start.files, sorted(ours)
    assert others - FREE - start.beyond == set()


@pytest.mark.parametrize("name", ["runtime, no GPU", "hook, no GPU"])
def test_a_vendor_that_is_not_asked_for_is_its_names_alone(name: str) -> None:
    ours, _ = loaded(STARTS[name])
    vendors = {each for each in ours if each.startswith("vendors.")} - {"vendors.seam"}
    assert vendors == {f"{each}.names" for each in VENDORS}


def test_making_an_inventory_is_not_on_the_hot_path() -> None:
    ours, _ = loaded(STARTS["hook, GPU"])
    assert not {"vendors.nvidia.discover", "vendors.nvidia.nvml", "loader.elf"} & ours


def test_interpreter_is_started_bare() -> None:
    """What the launcher passes decides what is imported before our first line."""
    launcher = (SOURCES.parent / "launchers/gpu-py").read_text()
    assert 'exec "$gp_python" -I -S -c' in launcher
    assert os.access(SOURCES.parent / "launchers/gpu-py", os.X_OK)
