"""Made-up vendors: packages that gpuhook knows for the time of a test."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuhook.vendors import seam

NAMES = """
NAME = TITLE = {name!r}
NOUN = ANY_NOUN = "device"
ID_TITLE = "ID"
VARIABLES = {{"{upper}_VISIBLE_DEVICES": ()}}
LEGACY = ()
MOUNTS = AUTOMATIC = ""
KIND = "{name}.example/device"
TYPES = ("device", "part")
FIXED_MAJORS = ()
SWARM_RESOURCE = ""
DEFAULT_KIND = False
PCI_VENDOR = ""
DRIVER_WORDS = MODULES = HOOK_MODULES = ()
LOST_REMEDY = "Mend it"
"""
VENDOR = """
from gpuhook.errors import DriverError
from gpuhook.vendors.seam import Vendor
from {name} import names


class Absent(Vendor):
    names = names

    def _discover(self, config):
        raise DriverError("there is no {name}", "Buy one")


VENDOR = Absent()
"""


@contextmanager
def known(folder: Path, name: str, **modules: str) -> Iterator[None]:
    """Have gpuhook know a vendor whose package, below ``folder``, has modules of these texts."""
    package = folder / name
    package.mkdir(parents=True)
    words = {"name": name, "upper": name.upper()}
    usual = {"names": NAMES.format(**words), "vendor": VENDOR.format(**words)}
    for module, text in {"__init__": "", **usual, **modules}.items():
        (package / f"{module}.py").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        seam.KNOWN[name] = importlib.import_module(f"{name}.names")
        yield
    finally:
        seam.KNOWN.pop(name, None)
        sys.path.remove(str(folder))
        for module in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[module]
