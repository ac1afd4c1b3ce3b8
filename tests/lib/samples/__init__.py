"""Each vendor's cases for the tests that hold for every vendor: one module each, with ``SAMPLE``.

NVIDIA's devices are found by a library, so its tests have their own machines.
"""

import importlib

from sample import Sample

from gpuhook.vendors import registry


def _sample(name: str) -> Sample:
    found: Sample = importlib.import_module(f"{__name__}.{name}").SAMPLE
    return found


SAMPLES = {name: _sample(name) for name in registry.BUILT_IN if name != "nvidia"}


def rows(field: str) -> list[tuple[str, object]]:
    """Return the vendor with each entry of a field that has several, for parametrize."""
    return [(name, each) for name, sample in SAMPLES.items() for each in getattr(sample, field)]


def having(field: str) -> list[str]:
    """Return the vendors that have something in a field."""
    return [name for name, sample in SAMPLES.items() if getattr(sample, field)]
