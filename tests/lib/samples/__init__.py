"""Each vendor's cases for the tests that every vendor must pass: one module each, with ``SAMPLE``.

NVIDIA's devices are found through a library, so its tests have their own simulated machines.
"""

import importlib

from sample import Sample

from gpuhook.vendors import registry


def _sample(name: str) -> Sample:
    found: Sample = importlib.import_module(f"{__name__}.{name}").SAMPLE
    return found


SAMPLES = {name: _sample(name) for name in registry.BUILT_IN if name != "nvidia"}


def rows(field: str) -> list[tuple[str, object]]:
    """Return a pair of vendor and entry for each entry of a field, for parametrize."""
    return [(name, each) for name, sample in SAMPLES.items() for each in getattr(sample, field)]


def having(field: str) -> list[str]:
    """Return the vendors whose sample has a value in a field."""
    return [name for name, sample in SAMPLES.items() if getattr(sample, field)]
