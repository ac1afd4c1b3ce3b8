"""What the hot path may import, and how much: counts, because times differ between machines.

One module of the standard library can cost more than a container start may take in all.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

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

SPEC = "gpuhook._start, gpuhook.runtime_shim, gpuhook.oci.spec, gpuhook.resolve"
NVIDIA = "gpuhook.vendors.nvidia"
CHOICE = f"gpuhook.inventory.cache, {NVIDIA}.requirements, {NVIDIA}.completeness"
ACCESS = f"{NVIDIA}.device_nodes, gpuhook.cgroup.access, gpuhook.start.helper"
PROGRAMS: dict[str, tuple[str, int, set[str]]] = {
    # program: (imports, gpuhook's own modules at most, modules beyond the free ones)
    "runtime, no GPU": (SPEC, 21, JSON),
    "runtime, GPU": (f"{SPEC}, {CHOICE}, {ACCESS}", 30, JSON),
    "hook, no GPU": ("gpuhook._start, gpuhook.prestart_hook", 20, JSON),
    "hook, GPU": (
        f"gpuhook._start, gpuhook.prestart_hook, {CHOICE}, gpuhook.inject",
        41,
        JSON | KERNEL,
    ),
}


def imported(imports: str) -> set[str]:
    """Return the modules that an isolated interpreter has after these imports."""
    code = f"import sys; sys.path.append({str(SOURCES)!r}); import {imports}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(("imports", "most", "beyond"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_hot_path_imports(imports: str, most: int, beyond: set[str]) -> None:
    found = imported(imports)
    ours = {name for name in found if name.partition(".")[0] == "gpuhook"}
    assert found - ours - FREE - beyond == set()
    rooms = {"gpuhook.request", "gpuhook.oci", "gpuhook.vendors", "gpuhook.vendors.nvidia",
             "gpuhook.start", "gpuhook.inventory", "gpuhook.cgroup", "gpuhook.plan",
             "gpuhook.container", "gpuhook.loader", "gpuhook.running"}  # fmt: skip
    assert len(ours - rooms) <= most, sorted(ours)


def test_runtime_touches_no_kernel_call() -> None:
    found = imported(PROGRAMS["runtime, GPU"][0])
    never = {"container.kernel", "plan.planner", "vendors.nvidia.discover", "loader.elf"}
    assert not {f"gpuhook.{name}" for name in never} & found


def test_making_an_inventory_is_not_on_the_hot_path() -> None:
    found = imported(PROGRAMS["hook, GPU"][0])
    never = {"vendors.nvidia.discover", "vendors.nvidia.nvml", "loader.elf"}
    assert not {f"gpuhook.{name}" for name in never} & found


def test_interpreter_is_started_bare() -> None:
    """What the launcher passes decides what is imported before our first line."""
    launcher = (SOURCES.parent / "launchers/gpu-py").read_text()
    assert 'exec "$gp_python" -I -S -c' in launcher
    assert os.access(SOURCES.parent / "launchers/gpu-py", os.X_OK)
