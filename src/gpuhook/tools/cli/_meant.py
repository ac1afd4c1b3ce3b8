"""What the variables of a container may have been meant to say, where no vendor reads them."""

from collections.abc import Iterable, Mapping
from types import ModuleType

from gpuhook.tools.config.misspelt import similar
from gpuhook.tools.vendors import parts

_LIKENESS = 0.75  # of two names, by difflib; those that mean something else have less


def misspelt(env: Iterable[str], known: Mapping[str, ModuleType]) -> list[str]:
    """Return a sentence for each variable whose name is nearly that of one that asks for devices.

    ``known`` are the vendors there are.
    """
    chosen_by = programs(known)
    return [
        f"No vendor reads {name}. Did you mean {meant}?"
        for name, meant in _near(env, known, chosen_by).items()
        if meant not in chosen_by
    ]


def for_programs(env: Iterable[str], known: Mapping[str, ModuleType]) -> list[str]:
    """Return a sentence for each variable by which programs choose among what they were given."""
    names, chosen_by = [*env], programs(known)
    near = _near(names, known, chosen_by)
    return [
        f"{name} chooses among the {vendor.NOUN}s that a container was given, and gives none: "
        f"set {next(iter(vendor.VARIABLES))}"
        for name in names
        if (vendor := chosen_by.get(near.get(name, name))) is not None and vendor.VARIABLES
    ]


def programs(known: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Return the variables by which programs choose among devices, and whose devices these are."""
    return {name: vendor for vendor in known.values() for name in parts.programs(vendor)}


def _near(
    env: Iterable[str], known: Mapping[str, ModuleType], chosen_by: Iterable[str]
) -> dict[str, str]:
    """Return the variables that nobody reads, and which they are like."""
    every = {*chosen_by, *(name for vendor in known.values() for name in vendor.VARIABLES)}
    found = {}
    for name in env:
        if name in every:
            continue
        plain = name.upper().replace("-", "_").replace(".", "_")
        like = similar(plain, every, _LIKENESS)
        if like:
            found[name] = like[0]
    return found
