"""Locks on exclusive devices: one running container at a time has a device of an exclusive kind.

The kinds are in ``[gpuhook] exclusive``. A container's record (``records``) is its lock. The
check for holders and the write happen under one file lock, so only one of several containers
gets a device. A record is valid while the container's first process lives, so nothing needs to
be released. A device and its parts exclude each other; two parts of a device don't.
"""

from gpuhook.base.errors import HeldError, shown
from gpuhook.base.host import proc
from gpuhook.base.state_directory import boot_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from gpuhook.base.state_directory import StateDirectory, StateLock

LOCK = "lock"  # in the folder of the records

_WHOLE, _SHORT = 64, 12  # digits of an id, and of its short form in engines
_HEX = frozenset("0123456789abcdef")
_WAIT = 20.0  # seconds to wait for other processes; each needs a millisecond or two
_MARKS = dict.fromkeys(map(ord, "-_."))  # further characters of a name

# Devices that a container has of one kind, and those plus their parents.
_Held = tuple[frozenset[str], frozenset[str]]

# Holders ---------------------------------------------------------------------------------------


def refuse(
    record: "dict[str, Any]", others: "Iterable[dict[str, Any]]", kinds: tuple[str, ...]
) -> None:
    """Raise HeldError if another record has a device of this one, of these kinds."""
    boot = boot_id()
    wanted = {kind: held for kind, held in _held(record) if kind in kinds}
    nodes = {kind: held for kind, held in record.get("nodes", {}).items() if kind in kinds}
    for other in others if wanted or nodes else ():
        if other.get("boot", boot) != boot:
            continue
        for kind, theirs in _held(other):
            found = _conflict(wanted[kind], theirs) if kind in wanted else None
            if found is not None:
                raise _refusal(f"{kind}={found[0]} {found[1]}", kind, other)
        for kind, device, node in _renumbered(record, other, kinds):
            # protects: lease-renumbered
            raise _refusal(f"{kind}={device}'s node {node} is", kind, other)
        for kind, ours in nodes.items():
            for node in sorted(ours.keys() & other.get("nodes", {}).get(kind, {}).keys()):
                raise _refusal(f"{ours[node]} is", kind, other)


def _renumbered(
    record: "dict[str, Any]", other: "dict[str, Any]", kinds: tuple[str, ...]
) -> "Iterator[tuple[str, str, str]]":
    """Yield kind, device and node if another record has our device's node as another device's.

    Node numbers may have changed since that record was written: after the driver was loaded again,
    or devices were removed and added. A container that had the node can still open it.
    """
    for ours in record["given"]:
        if ours["kind"] not in kinds:
            continue
        for theirs in other["given"]:
            same = ours["nodes"] if theirs["kind"] == ours["kind"] else ()
            named = theirs["nodes"].items()
            pairs = [pair for name, each in named if name not in same for pair in each]
            nodes = {f"{major}:{minor}" for major, minor in pairs}
            for node in sorted(nodes & ours.get("alone", {}).keys()):
                yield ours["kind"], ours["alone"][node], node


def _refusal(what: str, kind: str, other: "dict[str, Any]") -> HeldError:
    remedy = "Stop that container, or request another device; `gpuhook list` shows the holders"
    if other.get("pids", proc.FIRST_PIDS) != proc.pids():
        remedy = (
            "Stop that container, which is in another pid namespace; if it has ended, remove its "
            f"record, containers/{other.get('pid')}-{other.get('started')}* in the state-dir"
        )
    name = holder(other)
    error = HeldError(f"{what} in use by {name}, and {kind} is exclusive here", remedy)
    error.holder = name
    return error


def wants(record: "dict[str, Any]", kinds: tuple[str, ...]) -> str:
    """Return a device of a record that is of these kinds, "" if there is none."""
    for kind, (selected, _) in _held(record):
        if kind in kinds and selected:
            return f"{kind}={min(selected)}"
    nodes = record.get("nodes", {})
    return next((name for kind in kinds for name in nodes.get(kind, {}).values()), "")


def _held(record: "dict[str, Any]") -> "Iterator[tuple[str, _Held]]":
    """Yield a record's devices, by kind."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for given in record["given"]:
        kind = given.get("kind", "")
        selected, every = found.setdefault(kind, (set(), set()))
        selected.update(given["selected"])
        every.update(given["nodes"])
    for name in record.get("documents", ()):
        kind, _, device = name.partition("=")
        selected, _ = found.setdefault(kind, (set(), set()))
        selected.add(device)
    for kind, (selected, every) in found.items():
        yield kind, (frozenset(selected), frozenset(selected | every))


def _conflict(ours: _Held, theirs: _Held) -> "tuple[str, str] | None":
    """Return the first of our devices that conflicts, and how; None if there is no conflict."""
    (selected, every), (their_selected, their_every) = ours, theirs
    for name in sorted(selected & their_selected):
        return name, "is"
    for name in sorted(every & their_selected):
        return name, "is whole, and not in parts,"
    for name in sorted(selected & their_every):
        return name, "is in parts"
    for name in sorted(selected):
        if "all" in their_selected or (name == "all" and their_selected):
            return name, "is"
    return None


def holder(record: "dict[str, Any]") -> str:
    """Return the name of a record's container, as in ``gpuhook list`` where possible."""
    from gpuhook.core.records import engine_names  # noqa: PLC0415 - only for a refusal

    known = engine_names.name_of(record) or _short(record["id"])
    name = _called(known) or f"of process {record['pid']}"
    words = [_called(record[key]) for key in ("namespace", "pod", "container") if record[key]]
    pod = "/".join(words)
    engine = f"{record['engine']}'s container" if record["engine"] else "the container"
    return f"{engine} {name}{f' ({pod})' if pod else ''}"


def _short(container: str) -> str:
    """Return the short form of an id, which engines show and accept."""
    is_id = len(container) == _WHOLE and _HEX.issuperset(container)
    return container[:_SHORT] if is_id else container


def _called(name: str) -> str:
    """Return a name unchanged if it is valid for Kubernetes and engines, else quoted."""
    return name if name.isascii() and name.translate(_MARKS).isalnum() else name and shown(name)


# One at a time ---------------------------------------------------------------------------------


def lock(folder: "StateDirectory") -> "StateLock":
    """Lock the folder of the records, to check holders and write a record.

    HeldError if another process holds the lock too long; OSError if it can't be created.
    """
    try:
        return folder.lock(LOCK, _WAIT)  # protects: lease-lock
    except TimeoutError:
        raise HeldError(
            f"Another process has locked {folder.path}/{LOCK}, so it isn't known which container "
            "has which device",
            "End that process (`lslocks` names it), and start the container again",
        ) from None
