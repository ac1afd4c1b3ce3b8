#!/usr/bin/env python3
"""Draw a gpuhook command's terminal output as SVG, or fill in a bundle's config.json.

usage: screenshot.py --output FILE.svg COMMAND...
       screenshot.py --bundle CGROUP DEVICES [POD NAMESPACE CONTAINER]
"""

import argparse
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

PROGRAM = "/opt/gpuhook/bin/gpuhook"
WIDTH, HEIGHT = 112, 50
NAMES = ("sandbox-name", "sandbox-namespace", "container-name")  # parts of CRI's annotation names
# Replacements for output that differs between hosts or days.
SAME = (
    (re.compile(r"/\S*/\.work/installed-\w+"), "/opt/gpuhook"),
    (re.compile(r"\b\d+ ms\b"), "60 ms"),
    (re.compile(r"after \d+\.\d+ s\b"), "after 0.05 s"),
    (re.compile(r"\bPython 3\.\d+\.\d+"), "Python 3.11.2"),
    (re.compile(r"^\d+ +(?=root )", re.MULTILINE), "4711  "),
    (re.compile(r"PID(?:\x1b\[\d+m| )+USER"), "PID\x1b[0m   \x1b[1mUSER"),
    (re.compile(r"\bLinux \d+\.\S+[^.\s]"), "Linux 6.1.0"),
)


def draw(output: Path, words: list[str]) -> None:
    """Write a picture of a terminal that shows a command and its output."""
    text = printed([PROGRAM, *words]).replace("\r\n", "\n")
    for pattern, instead in SAME:
        text = pattern.sub(instead, text)
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True)
    shown = Text.from_ansi(f"$ gpuhook {' '.join(words)}\n{text.rstrip()}")
    console.print(shown, soft_wrap=False)
    svg = console.export_svg(title=f"gpuhook {words[0]}", unique_id=f"gpuhook-{words[0]}")
    # Remove the fonts, because a browser would fetch them from another site.
    plain = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    lines = [line.rstrip() for line in plain.splitlines()]
    output.write_text("\n".join(lines) + "\n")


def printed(argv: list[str]) -> str:
    """Return what a command writes to a terminal; standard error isn't shown."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", HEIGHT, WIDTH, 0, 0))
    about = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    plain = {name: value for name, value in os.environ.items() if name not in about}
    env = {**plain, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(argv, stdout=theirs, stderr=subprocess.DEVNULL, env=env):
        os.close(theirs)
        found = b""
        try:
            while piece := os.read(ours, 1 << 16):
                found += piece
        except OSError:
            pass  # every process has closed the other end
    os.close(ours)
    return found.decode()


def fill(cgroup: str, devices: str, names: list[str]) -> None:
    """Make the container of ./config.json sleep, in a cgroup, with devices and names."""
    path = Path("config.json")
    spec = json.loads(path.read_text())
    spec["process"].update(terminal=False, args=["busybox", "sleep", "1000"])
    spec["process"]["env"] += [
        f"NVIDIA_VISIBLE_DEVICES={devices}",
        "NVIDIA_DRIVER_CAPABILITIES=utility",
    ]
    spec["root"]["readonly"] = False
    spec["linux"]["cgroupsPath"] = cgroup
    pairs = zip(NAMES, names, strict=False)
    spec["annotations"] = {f"io.kubernetes.cri.{key}": name for key, name in pairs}
    path.write_text(json.dumps(spec))


def main() -> None:
    """Run the action that the command line requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--bundle")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.bundle:
        devices, *names = given.words
        fill(given.bundle, devices, names)
    else:
        draw(given.output, given.words)


main()
