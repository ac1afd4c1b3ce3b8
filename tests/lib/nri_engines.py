"""An engine's treatment of a container's environment, and of a plugin's changes to it.

It follows the sources of containerd (oci.WithEnv, pkg/cri), of CRI-O (mergeEnvs,
AddProcessEnv) and of NRI (pkg/runtime-tools/generate, AdjustEnv), which both use.
tests/integration/test_gate.py shows the same with real engines.
"""

from collections.abc import Iterable, Mapping


def of_containerd(image: Iterable[str], pod: Iterable[str]) -> list[str]:
    """Return containerd's environment, if no name occurs twice: the image's, then the pod's."""
    return [entry for entry in (*image, *pod) if "=" in entry]


def of_crio(image: Iterable[str], pod: Iterable[str]) -> list[str]:
    """Return CRI-O's environment: the pod's entries, then the image's others, each name once."""
    ours = [entry for entry in pod if entry.partition("=")[0]]
    names = {entry.partition("=")[0] for entry in ours}
    others = [each for each in image if "=" in each and each.partition("=")[0] not in names]
    return _once([*ours, *others])


def adjusted(env: Iterable[str], changes: Mapping[str, str]) -> list[str]:
    """Return an environment with a plugin's changes, as NRI's AdjustEnv makes them.

    The first entry of a name is replaced. A later entry of the name overwrites it, in the same
    place.
    """
    if not changes:
        return [*env]
    left, found = dict(changes), list[str]()
    for entry in env:
        name, equals, value = entry.partition("=")
        if equals:
            found.append(f"{name}={left.pop(name, value)}")
    return _once([*found, *(f"{name}={value}" for name, value in left.items())])


def replaced(env: Iterable[str], changes: Mapping[str, str]) -> list[str]:
    """Return the environment that an engine makes if it replaces every entry of a name."""
    kept = [entry for entry in env if entry.partition("=")[0] not in changes]
    return [*kept, *(f"{name}={value}" for name, value in changes.items())]


def replaced_first(env: Iterable[str], changes: Mapping[str, str]) -> list[str]:
    """Return the environment that an engine makes if it replaces only a name's first entry."""
    left, found = dict(changes), list[str]()
    for entry in env:
        name = entry.partition("=")[0]
        found.append(f"{name}={left.pop(name)}" if name in left else entry)
    return [*found, *(f"{name}={value}" for name, value in left.items())]


def _once(env: Iterable[str]) -> list[str]:
    """Return one entry of each name.

    The last entry takes the place of the first. Entries without a name are dropped.
    """
    found: dict[str, str] = {}
    for entry in env:
        name, _, value = entry.partition("=")
        if name:
            found[name] = value
    return [f"{name}={value}" for name, value in found.items()]
