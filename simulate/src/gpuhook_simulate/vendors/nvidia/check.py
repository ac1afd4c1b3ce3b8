"""A check for invalid lines in the state folder, which the libraries skip silently."""

import os
import re
from collections.abc import Iterator

from gpuhook.base.errors import shown
from gpuhook_simulate.vendors.nvidia import state
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine

_MOST = 1 << 20  # characters of a file that are read, as in the libraries
_MOST_LINES = 10  # lines that are reported for each file

_NUMBER = r"[0-9]{1,18}"
_TIME = r"[0-9]{1,10}(\.[0-9]{0,6})?"
_UUID = "[0-9A-Fa-f]{8}-([0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"
# File -> the form of its lines; the group "gpu" must name a GPU of the machine.
_LINES = {
    state.EVENTS: rf"(?P<gpu>\S+)\s+{_NUMBER}(\s+{_NUMBER}\s+{_NUMBER})?",
    state.LOST: r"(?P<gpu>\S+)",
    state.MIG: rf"(?P<gpu>\S+)(\s+MIG-{_UUID}\s+\S+(\s+{_NUMBER}){{5}})?",
    state.ACTIVITY: (
        rf"{_TIME}\s+(boot|(?P<gpu>[^\s:]+)(:{_NUMBER}:{_NUMBER})?\s+("
        rf"process\s+{_NUMBER}\s+(compute|graphics|mps)(\s+{_NUMBER}){{5}}"
        rf"|end\s+{_NUMBER}|accounting\s+(on|off|clear)))"
    ),
}


def skipped_lines(root: str, machine: SimulatedMachine) -> list[str]:
    """Return a sentence for each line of the state folder's files that is skipped.

    Blank lines and those that begin with # are comments.
    """
    known = {str(gpu.index) for gpu in machine.gpus} | {gpu.uuid.lower() for gpu in machine.gpus}
    return [said for name in _LINES for said in _of_file(root, name, known)]


def _of_file(root: str, name: str, known: set[str]) -> Iterator[str]:
    path = os.path.join(root, state.FOLDER, name)
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            text = file.read(_MOST)
    except OSError:
        return
    reported = 0
    for number, line in enumerate(text.split("\n"), 1):
        words = line.strip()
        match = re.fullmatch(_LINES[name], words, re.ASCII)
        gpu = match["gpu"] if match else None
        fine = match and (gpu is None or gpu.lower() in known)
        if not words or words.startswith("#") or fine:
            continue
        reported += 1
        if reported > _MOST_LINES:
            yield f"{path}: more lines than these are skipped"
            return
        yield f"{path}, line {number}, is skipped: {shown(words[:80])}"
