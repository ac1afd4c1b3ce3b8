"""Simulated processes on simulated GPUs, as lines of the state folder's activity file.

The libraries compute the resulting memory, power and other values (c/activity.c).
"""

import os
import re
from dataclasses import dataclass

from gpuhook.base.errors import SimulateError, shown
from gpuhook_simulate.vendors.nvidia import state
from gpuhook_simulate.vendors.nvidia.machine import SimulatedGpu, SimulatedMig

KINDS = ("compute", "graphics", "mps")
_MOST_PID = 1 << 22  # the kernel's PID_MAX_LIMIT

_PROCESS = re.compile(
    r"(?P<device>[A-Za-z0-9-]+),(?P<pid>[0-9]{1,9}),(?P<bytes>[0-9]{1,18})(?P<unit>[KMG]?)"
    r"(?P<percents>(,[0-9]{1,9}){0,4})(,(?P<kind>[a-z]+))?"
)


@dataclass(frozen=True, slots=True)
class SimulatedProcess:
    """A simulated process, with its usage of a device in bytes and percent.

    ``device`` is a GPU's number or UUID or a MIG device's UUID, ``kind`` one of KINDS.
    """

    device: str
    pid: int
    memory: int = 0
    sm: int = 0
    memory_use: int = 0
    encoder: int = 0
    decoder: int = 0
    kind: str = KINDS[0]


def parse_process(word: str) -> SimulatedProcess:
    """Parse ``DEVICE,PID,BYTES[,SM[,MEMORY[,ENCODER[,DECODER]]]][,KIND]``.

    BYTES may end in K, M or G (powers of 1024). SimulateError for anything else.
    """
    match = _PROCESS.fullmatch(word)
    if not match:
        raise SimulateError(
            f"{shown(word)} doesn't describe a process",
            "Write GPU,PID,BYTES,SM percent, like 0,4711,8G,60",
        )
    percents = [int(number) for number in match["percents"].split(",") if number]
    names = ("sm", "memory_use", "encoder", "decoder")
    return SimulatedProcess(
        device=match["device"],
        pid=int(match["pid"]),
        memory=int(match["bytes"]) << " KMG".index(match["unit"] or " ") * 10,
        kind=match["kind"] or KINDS[0],
        **dict(zip(names, percents, strict=False)),
    )


def run_process(root: str, process: SimulatedProcess) -> None:
    """Start a process on a device, or change its usage.

    SimulateError if the device doesn't exist or an amount is invalid.
    """
    if not 0 < process.pid <= _MOST_PID:
        raise SimulateError(f"{process.pid} is not a process id", f"Give 1 to {_MOST_PID}")
    if process.kind not in KINDS:
        raise SimulateError(
            f"There are no processes of the kind {shown(process.kind)}",
            f"Use one of {', '.join(KINDS)}",
        )
    percents = (process.sm, process.memory_use, process.encoder, process.decoder)
    for percent in percents:
        if not 0 <= percent <= 100:
            raise SimulateError(f"{percent} is not a percentage", "Give 0 to 100")
    with state.locked(root):
        gpu, mig = state.load_machine(root).device(process.device)
        most = mig.profile.memory if mig else gpu.model.memory
        if not 0 <= process.memory <= most << 20:
            raise SimulateError(
                f"A process can't have {process.memory} bytes of {shown(process.device)}",
                f"Give 0 to {most << 20}",
            )
        if gpu.mig_enabled and not mig:
            raise SimulateError(
                f"GPU {gpu.index} is in MIG mode", "Name one of its MIG devices, by its UUID"
            )
        numbers = " ".join(map(str, (process.memory, *percents)))
        line = f"process {process.pid} {process.kind} {numbers}"
        _append_activity(root, f"{_place(gpu, mig)} {line}")


def end_process(root: str, pid: int) -> None:
    """End a simulated process on all its devices; SimulateError if it runs on none."""
    with state.locked(root):
        state.load(root)
        places = _places(root, pid)
        if not places:
            raise SimulateError(
                f"No process {pid} runs on the simulated machine",
                "Give a process id that was used with gpuhook simulate --process",
            )
        for place in places:
            _append_activity(root, f"{place} end {pid}")


def _places(root: str, pid: int) -> list[str]:
    """Return the devices on which a process runs, by the lines of the activity file."""
    places: dict[str, None] = {}
    path = os.path.join(root, state.FOLDER, state.ACTIVITY)
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            match line.split():
                case [_, place, "process", found, *_] if found == str(pid):
                    places[place] = None
                case [_, place, "end", found] if found == str(pid):
                    places.pop(place, None)
    return list(places)


def _append_activity(root: str, words: str) -> None:
    state.append(root, state.ACTIVITY, f"{state.time_text()} {words}\n")


def _place(gpu: SimulatedGpu, mig: SimulatedMig | None) -> str:
    return f"{gpu.index}:{mig.gi}:{mig.ci}" if mig else f"{gpu.index}"
