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

    # A machine has ``count`` devices and ``settings``. ``named`` has requests with the labels of
    # the devices that they mean. ``unknown`` has requests of unknown devices, and ``it_has`` is
    # a pattern for their error.
    count: int
    settings: Settings = field(default_factory=dict)
    named: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    it_has: str
    # Requests that mean no devices.
    nothing: tuple[str, ...] = ()
    # Changes of a machine with two devices, each of which makes a saved inventory stale.
    changes: tuple[Change, ...]
    # A device node of the second device, and the error if its numbers aren't the driver's.
    node: str
    other_numbers: str
    # Settings that leave out the node of the second of two devices, and the path of that node.
    without_node: tuple[Settings, str] | None = None
    orders: tuple[Order, ...] = ()
    # Settings of a machine whose inventory has every kind of content.
    saved: Settings = field(default_factory=dict)
    # Settings that the simulator refuses, and the text of the error.
    refused: tuple[Settings, str] | None = None
    # Whether the vendor's CDI specs have hooks.
    has_hooks: bool = False
    # Whether the simulator puts the vendor's devices on a PCI bus.
    on_pci: bool = True
    # The vendor's modules that a container start imports.
    imported: frozenset[str] = frozenset({"names", "vendor"})
    claim: Claim
    # A pattern for words that only the vendor's folders may contain, and other files that may, too.
    spelled: str
    spelled_in: tuple[str, ...] = ()
    # The doctor's only finding on a machine with four devices; "" if the vendor has its own tests.
    in_order: str = ""
    # The doctor's findings on machines with these settings: status, and beginning of the message.
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
