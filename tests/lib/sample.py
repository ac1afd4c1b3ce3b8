"""One vendor's cases for the tests that every vendor must pass."""

from collections.abc import Callable
from dataclasses import dataclass, field

from node_files import Machine

Settings = dict[str, object]
Change = Callable[[Machine], object]


@dataclass(frozen=True, kw_only=True)
class Order:
    """A simulated machine with ten devices or more.

    ``labels`` are the labels of its devices, in the order of their numbers; ``last`` are the
    device nodes of the last device.
    """

    count: int
    settings: Settings
    labels: tuple[str, ...]
    last: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Four simulated devices in Kubernetes' DRA: the name of their driver, and of one device.

    ``expression`` selects all four; ``resource`` is the extended resource of their device
    class.
    """

    driver: str
    device: str
    expression: str
    resource: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One vendor's cases.

    A request is a value of the vendor's first variable, or several NAME=VALUE separated by
    spaces. Settings are those of the simulator, with _ in place of each - in their names.
    """

    # A machine of ``count`` devices with ``settings``, requests there with the labels of the
    # devices that they mean, requests of unknown devices, and what the error says (a pattern).
    count: int
    settings: Settings = field(default_factory=dict)
    named: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    it_has: str
    # Requests of nothing.
    nothing: tuple[str, ...] = ()
    # Changes of a machine with two devices that make its inventory stale.
    changes: tuple[Change, ...]
    # A node of the second device; and what is said if its numbers aren't the driver's.
    node: str
    other_numbers: str
    # Settings that leave out the second of two devices' nodes, and their paths.
    without_node: tuple[Settings, str] | None = None
    orders: tuple[Order, ...] = ()
    # Settings of a machine whose inventory has all kinds of content.
    saved: Settings = field(default_factory=dict)
    # Settings that the simulator refuses, and the error's text.
    refused: tuple[Settings, str] | None = None
    # Whether its CDI specs have hooks.
    has_hooks: bool = False
    # Whether the simulator puts its devices on a PCI bus.
    on_pci: bool = True
    # Its modules that a container start imports.
    imported: frozenset[str] = frozenset({"names", "vendor"})
    claim: Claim
    # What is spelled only in the vendor's folders (a pattern), or also in these files there.
    spelled: str
    spelled_in: tuple[str, ...] = ()
    # The doctor's only finding on a machine with four devices; "" for tests of the vendor's own.
    in_order: str = ""
    # Its findings on machines with these settings: status, and the beginning of the message.
    findings: tuple[tuple[Settings, str, str], ...] = ()


def changed(path: str, text: str) -> Change:
    """Return a change that writes a file."""
    return lambda made: made.text(path, text)


def created(path: str) -> Change:
    """Return a change that creates a folder."""
    return lambda made: (made.place / path.lstrip("/")).mkdir(parents=True)


def removed(path: str) -> Change:
    """Return a change that removes a file or a link."""
    return lambda made: (made.place / path.lstrip("/")).unlink()


def numbers(count: int) -> tuple[str, ...]:
    """Return the labels of ``count`` devices: their numbers."""
    return tuple(map(str, range(count)))
