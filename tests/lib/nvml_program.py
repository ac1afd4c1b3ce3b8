"""A simulated root of plain files, and a program that uses its NVML while tests change the root."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

LIBRARY_DIR = "/usr/lib/test-linux-gnu"

_PROGRAM = """
import ctypes, json, os, sys, time
import pynvml as n

def attempt(call, *args):
    try:
        return call(*args)
    except n.NVMLError as error:
        return f"error {error.value}"

def gpu(index):
    return n.nvmlDeviceGetHandleByIndex(index)

def event(data):
    uuid = attempt(n.nvmlDeviceGetUUID, data.device)
    return [uuid, data.eventType, data.eventData, data.gpuInstanceId, data.computeInstanceId]

def wait(events, milliseconds):
    try:
        return event(n.nvmlEventSetWait_v2(events, milliseconds))
    except n.NVMLError as error:
        return f"error {error.value}"

n.nvmlInit()
for line in sys.stdin:
    code = json.loads(line)
    try:
        value = eval(code)
    except SyntaxError:
        value = exec(code)
    except n.NVMLError as error:
        value = f"error {error.value}"
    print(json.dumps(value), flush=True)
"""


def environment(root: Path, **more: str) -> dict[str, str]:
    """Return the environment of a program that finds the root's libraries by name."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {"LD_LIBRARY_PATH": f"{root}{LIBRARY_DIR}", "PYTHONPATH": paths, **more}


class Program:
    """A process that has loaded pynvml as ``n`` and started it.

    _PROGRAM defines its other names.
    """

    def __init__(self, root: Path, **more: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=environment(root, **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self, code: str) -> None:
        """Start to evaluate an expression or to run statements, without waiting for an answer."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the result of ``begin``, or ``error N`` for the NVML error N."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    def ask(self, code: str) -> Any:
        """Return the value of an expression, or None after statements."""
        self.begin(code)
        return self.answer()

    def is_sleeping(self) -> bool:
        """Tell whether the process waits in the kernel."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        return stat.rpartition(")")[2].split()[0] == "S"

    def processor_ticks(self) -> int:
        """Return the processor time that it has used, in clock ticks."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
