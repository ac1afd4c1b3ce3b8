"""Made-up vendors: packages that are registered in gpuhook during a test."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gpuhook.cluster.vendors
import gpuhook.metrics.vendors
import gpuhook.monitor.vendors
import gpuhook.tools.vendors
import gpuhook_simulate.vendors
from gpuhook.vendors import registry

NAMES = """
NAME = TITLE = {name!r}
NOUN = "device"
ID_TITLE = "ID"
VARIABLES = {{"{upper}_VISIBLE_DEVICES": ()}}
VOID = MOUNTS = ""
KIND = "{name}.example/device"
TYPES = ("device", "part")
DRIVER_WORDS = ()
LOST_REMEDY = "Mend it"
"""
VENDOR = """
from gpuhook.base.errors import DriverError
from gpuhook.core.contract import Vendor
from {name} import names


class Absent(Vendor):
    names = names

    def _discover(self, config):
        raise DriverError("there is no {name}", "Buy one")


VENDOR = Absent()
"""


# The packages of vendors' optional modules. Modules that aren't listed are in tools.
PACKAGES = {
    **dict.fromkeys(("claim_config", "cluster", "labels", "plugin", "slices"), "cluster"),
    **dict.fromkeys(("exporter_series", "telemetry"), "metrics"),
    **dict.fromkeys(("events", "links", "settings"), "monitor"),
}


@contextmanager
def known(folder: Path, name: str, **modules: str) -> Iterator[None]:
    """Register a vendor whose package, below ``folder``, has modules with these texts.

    Modules other than ``names`` and ``vendor`` are the vendor's modules for commands;
    ``simulate`` is its simulator.
    """
    words = {"name": name, "upper": name.upper()}
    usual = {"names": NAMES.format(**words), "vendor": VENDOR.format(**words)}
    for module, text in {"__init__": "", **usual, **modules}.items():
        package = folder / name
        if module not in {"__init__", *usual}:
            package = folder / PACKAGES.get(module, "tools") / name
        path = package / f"{module}.py"
        if module == "simulate":
            path = folder / "simulate" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _forget(name)
    sys.path.insert(0, str(folder))
    paths = {
        "cluster": gpuhook.cluster.vendors.__path__,
        "metrics": gpuhook.metrics.vendors.__path__,
        "monitor": gpuhook.monitor.vendors.__path__,
        "tools": gpuhook.tools.vendors.__path__,
        "simulate": gpuhook_simulate.vendors.__path__,
    }
    for part, places in paths.items():
        places.append(str(folder / part))
    importlib.invalidate_caches()
    try:
        registry.BUILT_IN[name] = registry.complete(importlib.import_module(f"{name}.names"))
        yield
    finally:
        registry.BUILT_IN.pop(name, None)
        sys.path.remove(str(folder))
        for part, places in paths.items():
            places.remove(str(folder / part))
        _forget(name)


def _forget(name: str) -> None:
    """Remove imported modules of a vendor with this name, such as those of an earlier test."""
    for package in (
        f"{name}.",
        *(f"gpuhook.{package}.vendors.{name}." for package in ("tools", *PACKAGES.values())),
        f"gpuhook_simulate.vendors.{name}.",
    ):
        for module in [each for each in sys.modules if f"{each}.".startswith(package)]:
            del sys.modules[module]
