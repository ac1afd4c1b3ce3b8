"""An engine's treatment of a container's environment, and of a plugin's changes to it.

As their sources have it: containerd (oci.WithEnv, pkg/cri), CRI-O (mergeEnvs, AddProcessEnv) and
NRI (pkg/runtime-tools/generate, AdjustEnv), which both use. tests/integration/test_gate.py shows
the same with real ones.
"""

from collections.abc import Iterable, Mapping


def of_containerd(image: Iterable[str], pod: Iterable[str]) -> list[str]:
    """Return the environment: of both, one after the other, where nothing has a name twice yet."""
    return [entry for entry in (*image, *pod) if "=" in entry]


def of_crio(image: Iterable[str], pod: Iterable[str]) -> list[str]:
    """Return the environment: the pod's names, and the image's others, once each."""
    ours = [entry for entry in pod if entry.partition("=")[0]]
    names = {entry.partition("=")[0] for entry in ours}
    others = [each for each in image if "=" in each and each.partition("=")[0] not in names]
    return _once([*ours, *others])


def adjusted(env: Iterable[str], changes: Mapping[str, str]) -> list[str]:
    """Return an environment with a plugin's changes, as NRI's AdjustEnv makes them.

    The first entry of a name is replaced; a later one is set over it, at the same place.
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
    """Return it as an engine would that replaces every entry of a name."""
    kept = [entry for entry in env if entry.partition("=")[0] not in changes]
    return [*kept, *(f"{name}={value}" for name, value in changes.items())]


def replaced_first(env: Iterable[str], changes: Mapping[str, str]) -> list[str]:
    """Return it as an engine would that replaces the first entry, and keeps the others."""
    left, found = dict(changes), list[str]()
    for entry in env:
        name = entry.partition("=")[0]
        found.append(f"{name}={left.pop(name)}" if name in left else entry)
    return [*found, *(f"{name}={value}" for name, value in left.items())]


def _once(env: Iterable[str]) -> list[str]:
    """Return one entry of each name, the last at the place of the first; none without a name."""
    found: dict[str, str] = {}
    for entry in env:
        name, _, value = entry.partition("=")
        if name:
            found[name] = value
    return [f"{name}={value}" for name, value in found.items()]
