"""Made-up vendors: packages that gpuhook knows for the time of a test."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuhook.vendors import seam


@contextmanager
def known(folder: Path, name: str, **modules: str) -> Iterator[None]:
    """Have gpuhook know a vendor whose package, below ``folder``, has modules of these texts."""
    package = folder / name
    package.mkdir(parents=True)
    for module, text in {"__init__": "", "names": f"NAME = {name!r}\n", **modules}.items():
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
