"""Prometheus metrics of a service itself: its calls, their failures and their seconds.

The service counts. A process without any privilege serves the text that it gets from the service,
to any client of the address. Nothing listens unless an address is given.

Source: Prometheus' text exposition format 0.0.4.
"""

import json
import socket
from collections.abc import Mapping

from gpuhook.base.cgroup.access import in_first_user_namespace
from gpuhook.base.container import kernel
from gpuhook.base.errors import MetricsError, shown
from gpuhook.monitor.host.child import Clock, Tell
from gpuhook.monitor.host.state_worker import StateWorker

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds
_WAITING = 32  # connections
_LONGEST = 1 << 10  # bytes of a line of the process, which sends none
_UNPRIVILEGED = 65534  # the user and the group without rights of their own


def listen(address: str, option: str = "--listen") -> socket.socket:
    """Return a socket that listens on HOST:PORT; MetricsError, which names the option."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise MetricsError(
            f"{shown(address)} isn't an address", f"Give one like 127.0.0.1:9836 to {option}"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(_WAITING)
    except OSError as error:
        listener.close()
        raise MetricsError(
            f"Nothing can listen at {address}: {error.strerror or error}",
            f"Stop what listens there, or give another address to {option}",
        ) from None
    listener.setblocking(False)
    return listener


class Calls:
    """Counts of calls by labels, and the distribution of their seconds.

    ``name`` is the metrics' common start, ``what`` a noun for the help texts.
    """

    def __init__(self, name: str, what: str, labels: tuple[str, ...]) -> None:
        self._name = name
        self._what = what
        self._labels = labels
        self._failed: dict[tuple[str, ...], int] = {}
        self._seconds: dict[tuple[str, ...], float] = {}
        self._counts: dict[tuple[str, ...], list[int]] = {}  # by bound, and then of all

    def note(self, values: tuple[str, ...], seconds: float, *, failed: bool) -> None:
        """Count a call with these values of the labels."""
        counts = self._counts.setdefault(values, [0] * (len(_BOUNDS) + 1))
        for at, bound in enumerate(_BOUNDS):
            counts[at] += seconds <= bound
        counts[-1] += 1
        self._seconds[values] = self._seconds.get(values, 0.0) + seconds
        self._failed[values] = self._failed.get(values, 0) + failed

    def text(self) -> str:
        """Return the series."""
        name, what = self._name, self._what
        every = {values: counts[-1] for values, counts in self._counts.items()}
        lines = [
            *self._counter(f"{name}s_total", f"{what}, failed ones too.", every),
            *self._counter(f"{name}_failures_total", f"{what} that failed.", self._failed),
            f"# HELP {name}_seconds Seconds that they took.",
            f"# TYPE {name}_seconds histogram",
        ]
        for values, counts in self._counts.items():
            for bound, count in zip((*map(str, _BOUNDS), "+Inf"), counts, strict=True):
                lines.append(f"{name}_seconds_bucket{self._pairs(values, bound)} {count}")
            lines.append(f"{name}_seconds_sum{self._pairs(values)} {self._seconds[values]!r}")
            lines.append(f"{name}_seconds_count{self._pairs(values)} {counts[-1]}")
        return "".join(f"{line}\n" for line in lines)

    def _counter(self, name: str, about: str, counts: Mapping[tuple[str, ...], int]) -> list[str]:
        lines = [f"{name}{self._pairs(values)} {count}" for values, count in counts.items()]
        return [f"# HELP {name} {about}", f"# TYPE {name} counter", *lines]

    def _pairs(self, values: tuple[str, ...], bound: str = "") -> str:
        pairs = [*zip(self._labels, values, strict=True), *([("le", bound)] if bound else [])]
        return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class ServiceMetrics:
    """A service's metrics, and the process that serves them; without an address, nothing.

    The service's loop calls ``tend``, and waits as ``deadline`` and ``writers`` say.
    """

    def __init__(self, calls: Calls, address: str, option: str, tell: Tell, clock: Clock) -> None:
        """Listen at the address; MetricsError if that fails."""
        self._calls = calls
        self._listener = listen(address, option) if address else None
        self._page = None if self._listener is None else _PageWorker(self._listener, tell, clock)
        self._show()
        if self._listener is not None:
            host, port = self._listener.getsockname()[:2]
            tell(f"Metrics at http://{f'[{host}]' if ':' in host else host}:{port}/metrics")

    def note(self, values: tuple[str, ...], seconds: float, *, failed: bool) -> None:
        """Count a call."""
        if self._page is not None:
            self._calls.note(values, seconds, failed=failed)
            self._show()

    def _show(self) -> None:
        if self._page is not None:
            self._page.give(json.dumps(self._calls.text()).encode() + b"\n")

    def tend(self) -> None:
        """Start the process, or start it again."""
        if self._page is not None:
            self._page.tend()

    def deadline(self) -> float | None:
        """Return when ``tend`` is due, None if that isn't known."""
        return None if self._page is None else self._page.deadline()

    def writers(self) -> list[int]:
        """Return descriptors to wait for: ``tend`` writes to them."""
        return [self._page.wants()] if self._page is not None and self._page.wants() >= 0 else []

    def end(self) -> None:
        """Stop the process, and listen no more."""
        if self._page is not None:
            self._page.end()
        if self._listener is not None:
            self._listener.close()


class _PageWorker(StateWorker):
    """The process that serves the newest text."""

    def __init__(self, listener: socket.socket, tell: Tell, clock: Clock) -> None:
        def serve(fd: int) -> int:
            # Its modules are loaded only there, and while files that only root reads may be opened.
            from gpuhook.monitor import metrics_page  # noqa: PLC0415

            rootless = not in_first_user_namespace()
            # protects: service-metrics-unprivileged
            kernel.give_up_root(_UNPRIVILEGED, _UNPRIVILEGED, rootless=rootless)
            return metrics_page.serve(listener, fd)

        title = "The process that serves the service's metrics"
        super().__init__(serve, title, "gpuhook-http", tell, clock, (listener.fileno(),), _LONGEST)
