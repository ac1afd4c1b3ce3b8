"""What the variables of a container may have been meant to say, where no vendor reads them."""

from collections.abc import Iterable, Mapping
from types import ModuleType

from gpuhook.tools.config.misspelt import similar

# By which programs choose among the devices that they were given, and whose devices these are.
PROGRAMS: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "nvidia",
    "ROCR_VISIBLE_DEVICES": "amd",
    "HIP_VISIBLE_DEVICES": "amd",
    "ZE_AFFINITY_MASK": "intel_gpu",
    "ONEAPI_DEVICE_SELECTOR": "intel_gpu",
    "NEURON_RT_VISIBLE_CORES": "neuron",
    "NEURON_RT_NUM_CORES": "neuron",
    "ASCEND_RT_VISIBLE_DEVICES": "ascend",
}
_LIKENESS = 0.75  # of two names, by difflib; those that mean something else have less


def misspelt(env: Iterable[str], known: Mapping[str, ModuleType]) -> list[str]:
    """Return a sentence for each variable whose name is nearly that of one that asks for devices.

    ``known`` are the vendors there are.
    """
    return [
        f"No vendor reads {name}. Did you mean {meant}?"
        for name, meant in _near(env, known).items()
        if meant not in PROGRAMS
    ]


def for_programs(env: Iterable[str], known: Mapping[str, ModuleType]) -> list[str]:
    """Return a sentence for each variable by which programs choose among what they were given."""
    names = [*env]
    near = _near(names, known)
    return [
        f"{name} chooses among the {vendor.NOUN}s that a container was given, and gives none: "
        f"set {next(iter(vendor.VARIABLES))}"
        for name in names
        if (vendor := known.get(PROGRAMS.get(near.get(name, name), ""))) is not None
        and vendor.VARIABLES
    ]


def _near(env: Iterable[str], known: Mapping[str, ModuleType]) -> dict[str, str]:
    """Return the variables that nobody reads, and which they are like."""
    asking = [name for vendor in known.values() for name in vendor.VARIABLES]
    found = {}
    for name in env:
        if name in asking or name in PROGRAMS:
            continue
        plain = name.upper().replace("-", "_").replace(".", "_")
        like = similar(plain, [*asking, *PROGRAMS], _LIKENESS)
        if like:
            found[name] = like[0]
    return found
