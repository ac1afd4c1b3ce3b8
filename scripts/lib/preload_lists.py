"""Write the lists of src/gpuhook/base/preload.py: what each kind of start imports, and when.

usage: .venv/bin/python scripts/lib/preload_lists.py

What is imported is measured, in interpreters as the launchers start them: the order is the one in
which modules are complete, so that none asks for a later one. A test (tests/unit/core) fails while
the file has other lists.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

from gpuhook.base.names import VENDORS

SOURCES = Path(__file__).parents[2] / "src"
FILE = SOURCES / "gpuhook/base/preload.py"
BEGIN = "# Made by scripts/lib/preload_lists.py; don't edit the lists below.\n"
END = "# Until here.\n"

# What starts import: the modules that their programs name, and those that are imported later,
# inside of functions. Where nothing is asked for, those of the first two lists are all.
_RUNTIME = ("runtime_shim", "core.edit", "vendors.registry")
_HOOK = ("prestart_hook",)
_INVENTORY = ("core.inventory.cache", "core.inventory.selection")
_EDIT = ("base.cgroup.access", "prefork.hook_worker")
_INJECTION = ("base.cgroup.access", "inject")
_DOCUMENTS = ("core.cdi.apply", "core.cdi.worker_mounts", "core.cdi.parse_cache")
_DOCUMENT_HOOK = ("cdi_hook", "core.cdi.hook")
# Imported in the ordinary way.
_BEFORE = {"gpuhook", "gpuhook.base", "gpuhook.base.names", "gpuhook.base.preload"}


def imported(*modules: str) -> list[str]:
    """Return the modules of ours, without ``gpuhook.``, that importing these imports.

    In the order in which they are complete: the import system puts a module at the end of
    sys.modules when its code has run.
    """
    names = ", ".join(f"gpuhook.{each}" for each in modules)
    code = f"import sys; sys.path.append({str(SOURCES)!r}); import {names}; print(*sys.modules)"
    words = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    ours = [name for name in done.stdout.split() if name.partition(".")[0] == "gpuhook"]
    packages = {name.rpartition(".")[0] for name in ours}
    return [name.removeprefix("gpuhook.") for name in ours if name not in {*_BEFORE, *packages}]


def measure() -> dict[str, tuple[str, ...]]:
    """Return the lists by their names; those of vendors by ``vendors.NAME`` and ``.edits``."""
    runtime, hook = imported(*_RUNTIME), imported(*_HOOK)
    request = [name for name in hook if name in runtime]
    chosen = imported(*_HOOK, *_INVENTORY)
    edit, injection = (imported(*_HOOK, *_INVENTORY, *more) for more in (_EDIT, _INJECTION))
    found = {
        "REQUEST": request,
        "RUNTIME": _without(runtime, request),
        "HOOK": _without(hook, request),
        "INVENTORY": _without(chosen, hook),
        "EDIT": _without(edit, [*runtime, *chosen]),
        "INJECTION": _without(injection, chosen),
        "DOCUMENTS": _without(imported(*_HOOK, *_INVENTORY, *_DOCUMENTS), chosen),
        "DOCUMENT_HOOK": _without(
            imported(*_HOOK, *_INVENTORY, *_INJECTION, *_DOCUMENT_HOOK), injection
        ),
    }
    for vendor in (*VENDORS, "declared"):
        folder = f"vendors.{vendor}"
        granted = imported(*_HOOK, *_INVENTORY, f"{folder}.vendor")
        found[folder] = _without(granted, chosen)
        if (SOURCES / f"gpuhook/vendors/{vendor}/edits.py").exists():
            edits = (f"{folder}.vendor", *_INJECTION, f"{folder}.edits")
            every = imported(*_HOOK, *_INVENTORY, *edits)
            found[f"{folder}.edits"] = _without(every, [*granted, *injection])
    return {name: tuple(modules) for name, modules in found.items()}


def _without(modules: list[str], others: list[str]) -> list[str]:
    return [name for name in modules if name not in others]


def text() -> str:
    """Return the lists as they stand in the file."""
    lists = measure()
    vendors = {name: lists.pop(name) for name in [*lists] if name.startswith("vendors.")}
    # What follows the request in each program, and what goes before the injection.
    first = {"RUNTIME": "*REQUEST", "HOOK": "*REQUEST", "INJECTION": "*INVENTORY"}
    found = [BEGIN]
    for name, modules in lists.items():
        words = [*filter(None, [first.get(name)]), *map(_quoted, modules)]
        found.append(f"{name} = (\n{_filled(words, 4)}\n)  # fmt: skip\n")
    found.append("VENDORS = {\n")
    for name, modules in vendors.items():
        lines = _filled([*map(_quoted, modules)], 8)
        found.append(f"    {_quoted(name.removeprefix('vendors.'))}: (\n{lines}\n    ),\n")
    return "".join([*found, "}  # fmt: skip\n", END])


def _quoted(name: str) -> str:
    return f'"{name}"'


def _filled(words: list[str], indent: int) -> str:
    text = " ".join(f"{word}," for word in words)
    margin = " " * indent
    return textwrap.fill(text, 100, initial_indent=margin, subsequent_indent=margin)


def main() -> None:
    """Write the file again, with the lists of today."""
    before, _, rest = FILE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    FILE.write_text(before + text() + after)


if __name__ == "__main__":
    main()
