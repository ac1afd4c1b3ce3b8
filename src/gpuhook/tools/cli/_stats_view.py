"""A look at all devices and containers as gpuhook stats shows it: tables, or JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from gpuhook.tools.cli import _screen
from gpuhook.tools.metrics.model import Container, Device, Snapshot, Usage

_SHORT = 12  # characters of a container's id, as Docker prints it
_GIB = 1 << 30
_BUSY, _FULL = 0.7, 0.9  # from where on a bar is yellow, and red
_ABSENT = "-"
# Columns that are there where the terminal is so wide, bars and the less important ones.
_WIDE, _MIDDLE, _NARROW = 110, 72, 44
_FIXED = 5  # lines: the heading, the headers of both tables, one between, what doesn't fit


_NOBODY = Container("")  # stands for processes that are in no container


@dataclass(frozen=True)
class _Use:
    """What one container does on one device; None for each value that nobody knows."""

    container: Container
    device: Device
    assigned: bool
    memory: int | None = None
    share: float | None = None
    processes: int | None = None


def as_json(look: Snapshot, seconds: float) -> dict[str, Any]:
    """Return a look as docs/metrics.md describes it; ``seconds`` is when it was, since 1970."""
    of: dict[Container, list[_Use]] = {}
    for use in _uses(look):
        of.setdefault(use.container, []).append(use)
    return {
        "time": round(seconds, 3),
        "devices": [_device_json(each) for each in look.devices],
        "containers": [
            {
                "id": container.id,
                "engine": container.engine,
                "name": container.name,
                "pod": container.pod,
                "namespace": container.namespace,
                "container": container.container,
                "devices": [_use_json(use) for use in uses],
            }
            for container, uses in of.items()
        ],
        "problems": [*look.problems],
    }


def _device_json(device: Device) -> dict[str, Any]:
    names = (
        "vendor", "id", "label", "model", "parent", "mig_profile", "memory_total_bytes",
        "memory_used_bytes", "memory_reserved_bytes", "utilization", "temperature_celsius",
        "power_watts", "energy_joules",
    )  # fmt: skip
    found = {("index" if name == "label" else name): getattr(device, name) for name in names}
    return {**found, "xids": {str(xid): count for xid, count in device.xids.items()}}


def _use_json(use: _Use) -> dict[str, Any]:
    return {
        "id": use.device.id,
        "index": use.device.label,
        "assigned": use.assigned,
        "memory_used_bytes": use.memory,
        "sm_utilization": use.share,
        "processes": use.processes,
    }


def _uses(look: Snapshot) -> list[_Use]:
    """Return who was given or uses what, by the containers' titles; those in none come last."""
    used = {(each.container, each.device): each for each in look.usages}
    found = []
    for container in [*sorted(look.containers, key=_title), _NOBODY]:
        for device in look.devices:
            assigned = device.id in container.devices
            # Without an id, processes are known of no container at all.
            is_known = container.id or container is _NOBODY
            usage = used.get((container.id, device.id)) if is_known else None
            if assigned or (usage is not None and usage.processes):
                found.append(_use(container, device, usage, assigned=assigned))
    return found


def _use(container: Container, device: Device, usage: Usage | None, *, assigned: bool) -> _Use:
    if usage is None:
        return _Use(container, device, assigned)
    values = (usage.memory_bytes, usage.sm_utilization, usage.processes)
    return _Use(container, device, assigned, *values)


def _title(container: Container) -> str:
    """Return what to call a container: Kubernetes' names, else its engine's, else its id."""
    if container.pod:
        words = (container.namespace, container.pod, container.container)
        return "/".join(word for word in words if word)
    if container is _NOBODY:
        return "(in no container)"
    short = container.id[:_SHORT] if container.engine else container.id
    return container.name or (f"{container.engine}:{short}" if container.engine else short)


# Tables -------------------------------------------------------------------------------------


def tables(look: Snapshot, width: int, *, bars: bool) -> list[RenderableType]:
    """Return both tables as a terminal of that width shows them, whole."""
    return _drawn(look.devices, _uses(look), width, bars=bars, cut=False)


@dataclass(frozen=True)
class View:
    """A look on the whole terminal, whatever size that has when it is drawn.

    Each row is one line. What doesn't fit is counted below, and what is missing comes last.
    """

    look: Snapshot
    heading: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        width = options.max_width
        problems = [_screen.text(f"{each}.", _screen.POOR) for each in self.look.problems]
        below = sum(len(each.wrap(console, width)) for each in problems)
        devices, uses = self.look.devices, _uses(self.look)
        room = max(2, (options.height or console.height) - _FIXED - below)
        of_devices = min(len(devices), max(room // 2, room - len(uses)))
        of_uses = min(len(uses), room - of_devices)
        hidden = len(devices) + len(uses) - of_devices - of_uses
        yield _screen.one_line(_screen.text(self.heading, _screen.FAINT))
        yield from _drawn(devices[:of_devices], uses[:of_uses], width, bars=True, cut=True)
        if hidden:
            more = f"{hidden} more: gpuhook stats --no-stream shows all"
            yield _screen.one_line(_screen.text(more, _screen.FAINT))
        yield from problems


def _drawn(
    devices: Sequence[Device], uses: Sequence[_Use], width: int, *, bars: bool, cut: bool
) -> list[RenderableType]:
    if not devices:
        return [_screen.text("No devices.")]
    rows = [_device_row(each) for each in devices]
    drawn = [_draw(_DEVICES, rows, width, bars=bars, cut="MODEL" if cut else "")]
    if uses:
        rows = [_use_row(each) for each in uses]
        drawn += ["", _draw(_CONTAINERS, rows, width, bars=bars, cut="CONTAINER" if cut else "")]
    return drawn


# Title, whether it is a bar, and from which width of the terminal on it is shown.
_Column = tuple[str, bool, int]
_DEVICES: tuple[_Column, ...] = (
    ("GPU", False, 0), ("MODEL", False, _MIDDLE), ("UTIL", False, 0), ("", True, _MIDDLE),
    ("MEMORY", False, 0), ("", True, _MIDDLE), ("TEMP", False, _WIDE), ("POWER", False, _WIDE),
    ("XIDS", False, _NARROW),
)  # fmt: skip
_CONTAINERS: tuple[_Column, ...] = (
    ("CONTAINER", False, 0), ("GPU", False, 0), ("SM", False, 0), ("", True, _MIDDLE),
    ("MEMORY", False, 0), ("", True, _MIDDLE), ("PROCESSES", False, _MIDDLE),
)  # fmt: skip


def _draw(
    columns: Sequence[_Column],
    rows: Sequence[Sequence[RenderableType]],
    width: int,
    *,
    bars: bool,
    cut: str,
) -> RenderableType:
    chosen = [
        place
        for place, (_, is_bar, least) in enumerate(columns)
        if width >= least and (bars or not is_bar)
    ]
    header = [columns[place][0] for place in chosen]
    return _screen.table(header, [[row[place] for place in chosen] for row in rows], cut=cut)


def _device_row(device: Device) -> list[RenderableType]:
    used, total = device.memory_used_bytes, device.memory_total_bytes
    xids = ", ".join(
        f"{xid} ({count} times)" if count > 1 else str(xid) for xid, count in device.xids.items()
    )
    temperature, power = device.temperature_celsius, device.power_watts
    return [
        _screen.text(device.label),
        _screen.text(device.model),
        _percent(device.utilization),
        _bar(device.utilization),
        _memory(used, total),
        _bar(_share(used, total)),
        _screen.text(_ABSENT if temperature is None else f"{temperature:.0f} C"),
        _screen.text(_ABSENT if power is None else f"{power:.0f} W"),
        _screen.text(xids, _screen.BAD),
    ]


def _use_row(use: _Use) -> list[RenderableType]:
    used, total = use.memory, use.device.memory_total_bytes
    return [
        _screen.text(_title(use.container), _screen.FAINT if use.container is _NOBODY else ""),
        _screen.text(use.device.label),
        _percent(use.share),
        _bar(use.share),
        _memory(used, None),
        _bar(_share(used, total)),
        _screen.text(_ABSENT if use.processes is None else use.processes),
    ]


def _percent(share: float | None) -> Text:
    return _screen.text(_ABSENT if share is None else f"{share:4.0%}")


def _memory(used: int | None, total: int | None) -> Text:
    """Return bytes for people, with two digits that count where there is little."""
    if used is None:
        return _screen.text(_ABSENT)
    whole = "" if total is None else f" / {total / _GIB:.0f}"
    return _screen.text(f"{used / _GIB:6.2f}{whole} GiB")


def _share(used: int | None, total: int | None) -> float | None:
    return None if used is None or not total else used / total


def _bar(share: float | None) -> RenderableType:
    if share is None:
        return _screen.text("")
    style = _screen.BAD if share >= _FULL else _screen.POOR if share >= _BUSY else _screen.GOOD
    return _screen.bar(share, style)
