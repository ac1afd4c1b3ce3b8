"""What a container wants of exclusive devices: its record, written before it gets anything.

Its devices are those that it asks for and those whose nodes config.json has, whoever put them
there and by whatever name: a document of another kind gives no device a second time. ``leases``
says what that record is worth, and who has a device now.
"""

import os

from gpuhook.ground.cgroup import access
from gpuhook.ground.errors import CdiError, DriverError
from gpuhook.ground.oci.spec import State
from gpuhook.start import contract, given_nodes
from gpuhook.start.inventory.cache import get_inventory
from gpuhook.start.records import leases, records
from gpuhook.start.request.reader import is_privileged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.container.changes import Container
    from gpuhook.ground.oci.spec import Spec
    from gpuhook.start.contract import Grant, Known
    from gpuhook.start.inventory.model import Inventory
    from gpuhook.start.resolve import Resolved

    Numbers = tuple[int, int]  # major and minor

    class Limits(Protocol):
        """What limits the memory of a container's devices: ``start.limits.Limits``."""

        def set(self, process: int, *, container: "Container") -> None:
            """Set all limits; LimitError."""

        def to_json(self) -> list[dict[str, Any]]:
            """Return them as they are written down."""

# What it has ------------------------------------------------------------------------------------


def describe(
    state: "State",
    spec: "Spec",
    grants: "Sequence[Grant]",
    names: "Sequence[str]",
    known: "Known",
    config: "Config",
    *,
    save: bool = True,
) -> "dict[str, Any]":
    """Return the record of a container, with all that it has of exclusive kinds.

    ``spec`` has what documents give; ``names`` are the devices that were asked of them. Those of
    a vendor that we know are told by their nodes: what a document calls 0 need not be what we
    do. Of other kinds the record has the names, and the nodes that are one device's alone.
    ``known`` are the vendors there are. An inventory that had to be made is saved only with
    ``save``.
    """
    record = records.describe(state, spec.data.get("annotations"), grants)
    given = _given(spec, names, config)
    documents = [name for name in names if name.partition("=")[0] in config.exclusive]
    record["nodes"] = {}
    for kind in config.exclusive if given else ():  # protects: claims
        ours = _inventory(kind, grants, known, config, save)
        if ours is None:
            record["nodes"][kind] = _of_documents(kind, given, config)
            continue
        has = given.among({node.numbers for node in ours[1].nodes})
        if found := given_nodes.devices_of(has, ours[1]):
            rules = sorted(access.allowed(spec.device_rules, has))
            _add(record, records.given(*ours, found, rules))
            documents = [name for name in documents if name.partition("=")[0] != kind]
    return {**record, "documents": documents}


class _Given:
    """What a container is given of character devices: by nodes, and by rules of its cgroup."""

    def __init__(self, nodes: "set[Numbers]", rules: "list[dict[str, Any]]") -> None:
        self._nodes = nodes
        self._rules = rules

    def __bool__(self) -> bool:
        return bool(self._nodes or self._rules)

    def among(self, numbers: "set[Numbers]") -> "set[Numbers]":
        """Return which of these it has. A node that a rule allows it can make itself."""
        allowed = access.openable(self._rules, numbers)
        return (numbers & self._nodes) | allowed  # protects: claimed-rule


def _given(spec: "Spec", names: "Sequence[str]", config: "Config") -> _Given:
    """Return what a container is given.

    Of a privileged one that may have every device it is what documents gave: the rest it has by
    its privilege.
    """
    rules = [*given_nodes.objects(spec.device_rules)]
    # protects: claimed-unprivileged
    if not (is_privileged(spec.data) and any(map(given_nodes.allows_all, rules))):
        nodes = given_nodes.numbers(spec.data, os.path.dirname(spec.path))
        return _Given(nodes, rules if given_nodes.opened(rules) else [])
    if not names:
        return _Given(set(), [])
    from gpuhook.start.cdi import apply, saved  # noqa: PLC0415 - for such containers alone

    edits = apply.resolve(saved.read_folders(config), names)
    return _Given(given_nodes.numbers(apply.apply({}, edits)), [])


def _inventory(
    kind: str, grants: "Sequence[Grant]", known: "Known", config: "Config", save: bool
) -> "tuple[Any, Inventory] | None":
    """Return a vendor's names and inventory, None where there are none of such a kind."""
    for grant in grants:
        if kind == grant.vendor.names.KIND:
            return grant.vendor.names, grant.inventory
    for names in known.values():
        if kind == names.KIND:
            try:
                return names, get_inventory(config, contract.load(names), save=save)
            except DriverError:
                return None
    return None


def _add(record: "dict[str, Any]", found: "dict[str, Any]") -> None:
    """Add to a record what its container has by nodes of a vendor; a part stands for its whole."""
    for place, given in enumerate(record["given"]):
        if given["vendor"] == found["vendor"]:
            parts = given["nodes"].keys() - {*given["selected"]}
            found["selected"] = [name for name in found["selected"] if name not in parts]
            alone = {**found["alone"], **given["alone"]}
            record["given"][place] = {**records.added(found, given), "alone": alone}
            return
    record["given"].append(found)


def _of_documents(kind: str, given: _Given, config: "Config") -> dict[str, str]:
    """Return nodes of a kind that documents alone describe, "MAJOR:MINOR", and whose each is.

    A node counts as a device's own where the devices that have it contain each other, as ``all``
    and other names for the same do; what belongs to the kind as a whole does not count.
    """
    from gpuhook.start.cdi import apply, saved  # noqa: PLC0415 - for such kinds alone

    owners: dict[Numbers, list[tuple[int, str, set[Numbers]]]] = {}
    for name, device in saved.read_folders(config).devices.items():
        if name.partition("=")[0] != kind:
            continue
        try:
            nodes = given_nodes.numbers(apply.apply({}, device.edits))
        except CdiError:  # a node that this machine hasn't got, so nobody has
            continue
        for pair in given.among(nodes):
            owners.setdefault(pair, []).append((len(nodes), name, nodes))
    found = {}
    for pair, several in sorted(owners.items()):
        several.sort(key=lambda each: each[:2])
        if all(several[at][2] <= several[at + 1][2] for at in range(len(several) - 1)):
            found[f"{pair[0]}:{pair[1]}"] = several[0][1]
    return found


# Who takes it -----------------------------------------------------------------------------------


def check(spec: "Spec", resolved: "Resolved | None", known: "Known", config: "Config") -> bool:
    """Tell whether a container has exclusive devices; HeldError where another one has one of them.

    To say so before the low-level runtime is called, or where no container is started: it is
    made sure when the record is written. ``resolved`` is None where nothing is asked of us.
    """
    record = describe(State("", 0, "", None), spec, *_asked(resolved), known, config)
    device = leases.wants(record, config.exclusive)
    if not device:
        return False
    leases.refuse(record, records.read_every(config.state_dir, device), config.exclusive)
    return True


def take(
    container: "Container",
    state: "State",
    spec: "Spec",
    resolved: "Resolved | None",
    known: "Known",
    config: "Config",
    limits: "Limits | None" = None,
) -> None:
    """Write the record of a container that gets its devices by its config.json; set its limits.

    ``container`` is its root while it is being created.
    HeldError where another container has one of them, LimitError where a limit can't be set.
    """
    record = describe(state, spec, *_asked(resolved), known, config)
    if limits is not None:
        record["limits"] = limits.to_json()
    process, exclusive = container.process, config.exclusive
    with records.Written(config.state_dir, process, record, exclusive=exclusive):
        if limits is not None:
            limits.set(process, container=container)


def _asked(resolved: "Resolved | None") -> "tuple[Sequence[Grant], tuple[str, ...]]":
    return ((), ()) if resolved is None else (resolved.grants, resolved.cdi_devices)
