"""Output of gpuhook stats: devices and containers as tables or JSON."""

import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from gpuhook.base.host import files
from gpuhook.metrics.model import Accelerator, Container, DeviceProcess, Snapshot, Usage
from gpuhook.tools.cli import _device_json, _screen
from gpuhook.tools.cli._containers import nameless

_GIB = 1 << 30
_BUSY, _FULL = 0.7, 0.9  # shares from which a bar is yellow, and red
_ABSENT = "-"
_FIXED = 3  # lines: the heading, the header of the first table, the count of hidden rows
_MORE = 2  # lines that each further table adds: an empty line and its header
_LOOKS = 10  # samples in a device's history
# Orders of the rows, the largest value first: by key and by the option --sort.
MEMORY, LOAD, TIME, NAME = "memory", "load", "time", "name"
ORDERS = {"m": MEMORY, "p": LOAD, "t": TIME, "n": NAME}
_STEPS = "▁▂▃▄▅▆▇█"


_NOBODY = Container("")  # represents processes outside all containers


@dataclass(frozen=True)
class _Usage:
    """Usage of one device by one container; None for each unknown value."""

    container: Container
    device: Accelerator
    assigned: bool
    memory: int | None = None
    share: float | None = None
    processes: int | None = None
    limit: int | None = None
    source: str = ""  # source of the memory value


def as_json(look: Snapshot, seconds: float) -> dict[str, Any]:
    """Return a snapshot in the format of docs/metrics.md; ``seconds`` is its Unix time."""
    of: dict[Container, list[_Usage]] = {}
    for use in _uses(look):
        of.setdefault(use.container, []).append(use)
    return {
        "time": round(seconds, 3),
        "devices": [_measured(each) for each in look.devices],
        "containers": [
            {
                "id": container.id,
                "engine": container.engine,
                "name": container.name,
                "pod": container.pod,
                "namespace": container.namespace,
                "container": container.container,
                "slurm_job": container.slurm_job,
                "devices": [_use_json(use) for use in uses],
            }
            for container, uses in of.items()
        ],
        "processes": [
            {
                "pid": each.pid,
                "uid": each.user,
                "command": each.command,
                "container": each.container,
                "device": each.device,
                "memory_used_bytes": each.memory_bytes,
                "sm_utilization": each.sm_utilization,
                "cpu_seconds": each.cpu_seconds,
                "cpu_utilization": each.cpu_utilization,
                "host_memory_bytes": each.host_memory_bytes,
            }
            for each in look.processes
        ],
        "problems": [*look.problems],
        "notes": [*look.notes],
    }


def _measured(device: Accelerator) -> dict[str, Any]:
    names = (
        "model", "parent", "mig_profile", "minor", "bus_id", "memory_total_bytes",
        "memory_used_bytes", "memory_reserved_bytes", "utilization", "temperature_celsius",
        "power_watts", "power_limit_watts", "clock_mhz", "energy_joules",
        "memory_temperature_celsius", "ecc_corrected", "ecc_uncorrected", "clock_reasons",
        "recovery",
    )  # fmt: skip
    found = {name: getattr(device, name) for name in names}
    xids = device.xids
    identity = _device_json.identity(device.vendor, device.id, device.label)
    return {**identity, **found, "xids": xids and {str(xid): count for xid, count in xids.items()}}


def _use_json(use: _Usage) -> dict[str, Any]:
    return {
        **_device_json.identity(use.device.vendor, use.device.id, use.device.label),
        "assigned": use.assigned,
        "memory_used_bytes": use.memory,
        "memory_limit_bytes": use.limit,
        "memory_source": use.source,
        "sm_utilization": use.share,
        "processes": use.processes,
    }


def _uses(look: Snapshot) -> list[_Usage]:
    """Return the uses of devices, sorted by container title; processes in none come last."""
    used = {(each.container, each.device): each for each in look.usages}
    found = []
    for container in [*sorted(look.containers, key=_title), _NOBODY]:
        for device in look.devices:
            assigned = device.id in container.devices
            # A container without an id has no known processes.
            is_known = container.id or container is _NOBODY
            usage = used.get((container.id, device.id)) if is_known else None
            if assigned or (usage is not None and usage.processes):
                found.append(_use(container, device, usage, assigned=assigned))
    return found


def _use(
    container: Container, device: Accelerator, usage: Usage | None, *, assigned: bool
) -> _Usage:
    if usage is None:
        return _Usage(container, device, assigned)
    values = (usage.memory_bytes, usage.sm_utilization, usage.processes)
    return _Usage(
        container, device, assigned, *values, usage.memory_limit_bytes, usage.memory_source
    )


def _title(container: Container) -> str:
    """Return a container's display name: from Kubernetes, else from its engine, else its id."""
    if container.pod:
        words = (container.namespace, container.pod, container.container)
        return "/".join(word for word in words if word)
    if container is _NOBODY:
        return "(in no container)"
    return container.name or nameless(container.engine, container.id)


def filtered(look: Snapshot, containers: Sequence[str], gpus: Sequence[str]) -> Snapshot:
    """Return what a snapshot has of some containers and devices; of all without a name.

    A container is named by its display name, its name in the engine, its pod, or the start of its
    id; a device by its label (3, 0:1) or its id. A GPU's name means its parts, too.
    """
    devices = [
        each
        for each in look.devices
        if not gpus or {each.label, each.id, each.label.partition(":")[0], each.parent} & {*gpus}
    ]
    ids = {each.id for each in devices}
    some = [
        each
        for each in look.containers
        if (not containers or any(_is_named(each, name) for name in containers))
        and (not gpus or ids.intersection(each.devices) or _uses_one(look, each, ids))
    ]
    named = {each.id for each in some} if containers else {each.id for each in look.containers}

    def is_wanted(each: Usage | DeviceProcess) -> bool:
        return each.device in ids and (not containers or each.container in named)

    usages = tuple(filter(is_wanted, look.usages))
    processes = tuple(filter(is_wanted, look.processes))
    if containers:
        theirs = {device for each in some for device in each.devices}
        theirs.update(each.device for each in usages)
        devices = [each for each in devices if each.id in theirs]
    return replace(
        look,
        devices=tuple(devices),
        containers=tuple(some),
        usages=usages,
        processes=processes,
    )


def _is_named(container: Container, name: str) -> bool:
    names = {_title(container), container.name, container.pod, container.container}
    return bool(name) and (name in names or container.id.startswith(name))


def _uses_one(look: Snapshot, container: Container, devices: Collection[str]) -> bool:
    return any(each.container == container.id and each.device in devices for each in look.usages)


# Tables -------------------------------------------------------------------------------------


class History:
    """Utilization of the devices in the last samples, by device id, the newest last."""

    def __init__(self) -> None:
        self._of: dict[str, deque[float | None]] = {}

    def add(self, look: Snapshot) -> None:
        """Add a sample, and drop devices that are gone."""
        self._of = {each.id: self._of.get(each.id, deque(maxlen=_LOOKS)) for each in look.devices}
        for each in look.devices:
            self._of[each.id].append(each.utilization)

    def line(self, device: str) -> str:
        """Return a device's history as a line of blocks, with blanks for unknown values."""
        last = len(_STEPS) - 1
        return "".join(
            " " if share is None else _STEPS[round(min(max(share, 0.0), 1.0) * last)]
            for share in self._of.get(device, ())
        )


def tables(look: Snapshot, width: int, *, bars: bool, order: str = NAME) -> list[Text]:
    """Return the lines of all tables in full, for a terminal of the given width."""
    return _drawn(_Rows.of(look, order), width, bars=bars)


@dataclass(frozen=True)
class _Rows:
    """Rows of the tables: devices, uses by containers, processes."""

    look: Snapshot
    devices: Sequence[Accelerator]
    uses: Sequence[_Usage]
    processes: Sequence[DeviceProcess]

    @classmethod
    def of(cls, look: Snapshot, order: str) -> "_Rows":
        """Return all rows of a snapshot, in the chosen order."""
        uses, processes = _uses(look), [*look.processes]
        processes.sort(key=lambda each: (-_rank(each, order), each.pid))
        if order != NAME:
            uses.sort(key=lambda each: (each.container is _NOBODY, -_rank(each, order)))
        return cls(look, look.devices, uses, processes)

    def fitting(self, lines: int, first: int = 0) -> "_Rows":
        """Return the rows that fit; each table gets at least a third of the lines if needed.

        Tables with more rows begin with the row ``first``, or show their last rows.
        """
        every = (self.devices, self.uses, self.processes)
        further = sum(bool(each) for each in every[1:])
        space = max(len(every), lines - _FIXED - _MORE * further)
        taken = [min(len(each), space // len(every)) for each in every]
        for place, each in enumerate(every):
            taken[place] += min(len(each) - taken[place], space - sum(taken))
        starts = [min(first, len(each) - count) for each, count in zip(every, taken, strict=True)]
        devices, uses, processes = (slice(at, at + n) for at, n in zip(starts, taken, strict=True))
        return _Rows(self.look, self.devices[devices], self.uses[uses], self.processes[processes])

    def further(self, lines: int) -> int:
        """Return the largest useful ``first`` of ``fitting``."""
        shown = self.fitting(lines)
        pairs = zip(
            (self.devices, self.uses, self.processes),
            (shown.devices, shown.uses, shown.processes),
            strict=True,
        )
        return max(len(every) - len(some) for every, some in pairs)

    def __len__(self) -> int:
        return len(self.devices) + len(self.uses) + len(self.processes)


def _rank(row: _Usage | DeviceProcess, order: str) -> float:
    """Return the value that a row is sorted by, the largest first; unknown ones come last."""
    if isinstance(row, _Usage):
        values = {MEMORY: row.memory, LOAD: row.share}
    else:
        by_load = row.sm_utilization
        values = {MEMORY: row.memory_bytes, LOAD: by_load, TIME: row.cpu_seconds}
        values[NAME] = row.memory_bytes
    value = values.get(order)
    return -1.0 if value is None else float(value)


@dataclass(frozen=True)
class View:
    """A full-screen view of a snapshot, adapted to the terminal's size at each drawing.

    Each row is one line. Rows that don't fit are counted below; problems come last.
    """

    look: Snapshot
    heading: str
    history: History = field(default_factory=History)
    order: str = NAME
    first: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        width = options.max_width
        problems = self._problems()
        space = self._space(console, options)
        every = _Rows.of(self.look, self.order)
        rows = every.fitting(space, min(self.first, every.further(space)))
        yield _screen.one_line(_screen.text(self.heading, _screen.FAINT))
        lines = _drawn(rows, width, bars=True, cut=True, history=self.history)
        yield from map(_screen.one_line, lines)
        if hidden := len(every) - len(rows):
            more = f"{hidden} more: Up and Down scroll, gpuhook stats --no-stream shows all"
            yield _screen.one_line(_screen.text(more, _screen.FAINT))
        yield from problems

    def scrolled(self, console: Console, rows: int) -> "View":
        """Return the view moved by a number of rows, as far as there are more."""
        every = _Rows.of(self.look, self.order)
        last = every.further(self._space(console, console.options))
        return replace(self, first=max(0, min(self.first, last) + rows))

    def _problems(self) -> list[Text]:
        every = (*self.look.problems, *self.look.notes)
        return [_screen.text(f"{each}.", _screen.POOR) for each in every]

    def _space(self, console: Console, options: ConsoleOptions) -> int:
        """Return the number of lines for the tables."""
        below = sum(len(each.wrap(console, options.max_width)) for each in self._problems())
        return (options.height or console.height) - below


def _drawn(
    rows: _Rows, width: int, *, bars: bool, cut: bool = False, history: History | None = None
) -> list[Text]:
    if not rows.devices:
        return [_screen.text("No devices.")]
    blocks = history if history is not None and _screen.has_blocks() else None
    lines = [_device_row(each, blocks) for each in rows.devices]
    drawn = _draw(_DEVICES, lines, width, bars=bars, cut="MODEL")
    if rows.uses:
        lines = [_use_row(use) for use in rows.uses]
        drawn.append(Text(""))
        drawn += _draw(_CONTAINERS, lines, width, bars=bars, cut="CONTAINER" if cut else "")
    if rows.processes:
        users = _users()
        titles = {each.id: _title(each) for each in rows.look.containers}
        labels = {each.id: each.label for each in rows.look.devices}
        lines = [_process_row(each, users, titles, labels) for each in rows.processes]
        drawn.append(Text(""))
        drawn += _draw(_PROCESSES, lines, width, bars=bars, cut="COMMAND" if cut else "")
    return drawn


# Titles of columns, then the columns to drop when space is short, in this order. Bars have
# titles of blanks, each of another length, so that titles are unique.
_Columns = tuple[tuple[str, ...], tuple[str, ...]]
_DEVICES: _Columns = (
    ("GPU", "MODEL", "UTIL", " ", "HISTORY", "MEMORY", "  ", "TEMP", "CLOCK", "POWER", "XIDS"),
    ("CLOCK", "HISTORY", "  ", " ", "MODEL", "POWER", "TEMP", "XIDS", "MEMORY"),
)
_CONTAINERS: _Columns = (
    ("CONTAINER", "GPU", "SM", " ", "MEMORY", "  ", "PROCESSES"),
    ("  ", " ", "PROCESSES", "SM", "MEMORY"),
)
_PROCESSES: _Columns = (
    ("PID", "USER", "GPU", "SM", "MEMORY", "CPU", "HOST MEMORY", "TIME", "COMMAND", "CONTAINER"),
    ("TIME", "CONTAINER", "HOST MEMORY", "USER", "CPU", "SM", "MEMORY"),
)


def _draw(
    columns: _Columns,
    rows: Sequence[Sequence[Text | None]],
    width: int,
    *,
    bars: bool,
    cut: str,
) -> list[Text]:
    titles, less = columns
    shown = [
        place
        for place, title in enumerate(titles)
        if (bars or title.strip()) and any(row[place] is not None for row in rows)
    ]
    header = [titles[place] for place in shown]
    lines = [[row[place] for place in shown] for row in rows]
    return _screen.table(header, lines, less=less, cut=cut, width=width)


def _device_row(device: Accelerator, history: History | None) -> list[Text | None]:
    used, total = device.memory_used_bytes, device.memory_total_bytes
    xids = ", ".join(
        f"{xid} ({count} times)" if count > 1 else str(xid)
        for xid, count in (device.xids or {}).items()
    )
    temperature, clock = device.temperature_celsius, device.clock_mhz
    return [
        _screen.text(device.label),
        _screen.text(device.model),
        _percent(device.utilization),
        _bar(device.utilization),
        None if history is None else _screen.text(history.line(device.id).rjust(_LOOKS)),
        _memory(used, total),
        _bar(_share(used, total)),
        _screen.text(_ABSENT if temperature is None else f"{temperature:.0f} C"),
        _screen.text(_ABSENT if clock is None else f"{clock:.0f} MHz"),
        _power(device.power_watts, device.power_limit_watts),
        _screen.text(xids, _screen.BAD),
    ]


def _use_row(use: _Usage) -> list[Text | None]:
    used, limit = use.memory, use.limit
    return [
        _screen.text(_title(use.container), _screen.FAINT if use.container is _NOBODY else ""),
        _screen.text(use.device.label),
        _percent(use.share),
        _bar(use.share),
        _memory(used, limit),
        _bar(_share(used, limit or use.device.memory_total_bytes)),
        _screen.text(_ABSENT if use.processes is None else use.processes),
    ]


def _process_row(
    process: DeviceProcess,
    users: Mapping[int, str],
    titles: Mapping[str, str],
    labels: Mapping[str, str],
) -> list[Text | None]:
    user = process.user
    return [
        _screen.text(process.pid),
        _screen.text(_ABSENT if user is None else users.get(user, user)),
        _screen.text(labels.get(process.device, process.device)),
        _percent(process.sm_utilization),
        _memory(process.memory_bytes, None),
        _percent(process.cpu_utilization),
        _memory(process.host_memory_bytes, None),
        _clock(process.cpu_seconds),
        _screen.text(process.command or _ABSENT),
        _screen.text(titles.get(process.container, process.container) or _ABSENT),
    ]


def _users() -> dict[int, str]:
    """Return the names of the host's local users; other sources could block."""
    try:
        lines = os.fsdecode(files.read("/etc/passwd")).split("\n")
    except (OSError, ValueError):
        return {}
    fields = [line.split(":") for line in lines]
    return {int(each[2]): each[0] for each in fields if len(each) > 2 and each[2].isdecimal()}


def _power(watts: float | None, limit: float | None) -> Text:
    if watts is None:
        return _screen.text(_ABSENT)
    return _screen.text(f"{watts:.0f}{'' if limit is None else f' / {limit:.0f}'} W")


def _percent(share: float | None) -> Text:
    return _screen.text(_ABSENT if share is None else f"{share:4.0%}")


def _clock(seconds: float | None) -> Text:
    """Return processor time as hours, minutes and seconds."""
    if seconds is None:
        return _screen.text(_ABSENT)
    minutes, rest = divmod(int(seconds), 60)
    return _screen.text(f"{minutes // 60:3}:{minutes % 60:02}:{rest:02}")


def _memory(used: int | None, total: int | None) -> Text:
    """Return bytes in GiB with two decimals."""
    if used is None:
        return _screen.text(_ABSENT)
    whole = "" if total is None else f" / {total / _GIB:.0f}"
    return _screen.text(f"{used / _GIB:6.2f}{whole} GiB")


def _share(used: int | None, total: int | None) -> float | None:
    return None if used is None or not total else used / total


def _bar(share: float | None) -> Text:
    if share is None:
        return _screen.text("")
    style = _screen.BAD if share >= _FULL else _screen.POOR if share >= _BUSY else _screen.GOOD
    return _screen.bar(share, style)
