"""Suggestions for environment variables that no vendor reads."""

from collections.abc import Iterable, Mapping
from types import ModuleType

from gpuhook.core.suggest import similar

_LIKENESS = 0.75  # difflib ratio of two names; names with another meaning have less


def misspelt(env: Iterable[str], vendors: Mapping[str, ModuleType]) -> list[str]:
    """Return a sentence for each variable with a name similar to one that requests devices.

    ``vendors`` are all vendors.
    """
    chosen_by = programs(vendors)
    return [
        f"No vendor reads {name}. Did you mean {meant}?"
        for name, meant in _near(env, vendors, chosen_by).items()
        if meant not in chosen_by
    ]


def for_programs(env: Iterable[str], vendors: Mapping[str, ModuleType]) -> list[str]:
    """Return a sentence for each variable that only selects among devices already present."""
    names, chosen_by = [*env], programs(vendors)
    near = _near(names, vendors, chosen_by)
    return [
        f"{name} only selects among the {vendor.NOUN}s of a container, and adds none: "
        f"set {next(iter(vendor.VARIABLES))}"
        for name in names
        if (vendor := chosen_by.get(near.get(name, name))) is not None and vendor.VARIABLES
    ]


def programs(vendors: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Return the variables that programs use to select devices, each with its vendor."""
    return {name: vendor for vendor in vendors.values() for name in vendor.PROGRAM_VARIABLES}


def _near(
    env: Iterable[str], vendors: Mapping[str, ModuleType], chosen_by: Iterable[str]
) -> dict[str, str]:
    """Return the variables that no vendor reads, each with the one it resembles."""
    every = {*chosen_by, *(name for vendor in vendors.values() for name in vendor.VARIABLES)}
    found = {}
    for name in env:
        if name in every:
            continue
        plain = name.upper().replace("-", "_").replace(".", "_")
        like = similar(plain, every, _LIKENESS)
        if like:
            found[name] = like[0]
    return found
