"""Machines made of files, which the doctor's checks examine in these tests."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import own

from gpuhook.base.config.model import Config
from gpuhook.base.loader import ldcache
from gpuhook.tools.doctor import Case, Finding
from gpuhook.tools.doctor.machine import Machine

VERSION = "535.129.03"
LIBRARIES = own.FOLDER[1:]
BIN = "/opt/gpuhook/bin"
BOOT = 1_700_000_000


class Tree:
    """A machine made of files below its own folder."""

    def __init__(self, root: Path, library: Callable[..., bytes]) -> None:
        self.root = root
        self.config = Config()
        self.users = {0, os.geteuid()}
        self._library = library

    @property
    def case(self) -> Case:
        return Case(Machine(str(self.root), self.users), self.config, BIN)

    def write(self, path: str, text: str | bytes = "", mode: int = 0o644) -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        file.chmod(mode)
        return file

    def program(self, path: str, text: str = "#!/bin/sh\n") -> Path:
        return self.write(path, text, 0o755)

    def link(self, path: str, target: str) -> None:
        link = self.root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def process(
        self,
        pid: int,
        *argv: str,
        started: int = BOOT,
        environ: Iterable[str] | None = ("PATH=/usr/bin",),
        uid: int = 0,
        status: Mapping[str, str] | None = None,
    ) -> None:
        """Add a process that has run since ``started``.

        ``environ`` is None for an environment that can't be read. ``status`` are the lines of
        its status that differ from those of root's own daemons.
        """
        self.write("/proc/stat", f"cpu 1 2 3\nbtime {BOOT}\n")
        ticks = (started - BOOT) * os.sysconf("SC_CLK_TCK")
        name = argv[0].rpartition("/")[2]
        numbers = " ".join(["0"] * 18)
        lines = {
            "Name": name[:15],
            "State": "S (sleeping)",
            "Uid": f"{uid}\t{uid}\t{uid}\t{uid}",
            "NSpid": str(pid),
            "CapEff": "000001ffffffffff",
            **(status or {}),
        }
        text = "".join(f"{key}:\t{value}\n" for key, value in lines.items())
        self.write(f"/proc/{pid}/status", text)
        self.write(f"/proc/{pid}/cmdline", "".join(f"{word}\0" for word in argv))
        self.write(f"/proc/{pid}/stat", f"{pid} ({name}) S {numbers} {ticks} 0\n")
        self.program(f"/proc/{pid}/exe")
        for entry in (pid, "self"):
            if not os.path.lexists(self.root / f"proc/{entry}/ns/user"):
                self.link(f"/proc/{entry}/ns/user", "user:[1]")
        if environ is not None:
            self.write(f"/proc/{pid}/environ", "".join(f"{word}\0" for word in environ))

    def driver(self, module: str = VERSION, installed: str = VERSION, gpus: int = 2) -> None:
        """Write the files of a loaded kernel module and of libraries, but no device nodes."""
        line = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {module}  Thu Oct 19 18:56:32\n"
        self.write("/proc/driver/nvidia/version", line)
        self.write("/proc/devices", "Character devices:\n195 nvidia\n508 nvidia-uvm\n")
        for gpu in range(gpus):
            folder = f"/proc/driver/nvidia/gpus/0000:0{gpu}:00.0"
            self.write(f"{folder}/information", f"Model: \t X\nDevice Minor: \t {gpu}\n")
        names = ["libnvidia-ml.so", "libcuda.so", "libnvidia-ptxjitcompiler.so"]
        for name in names:
            path = f"{LIBRARIES}/{name}.{installed}"
            self.write(path, self._library(f"{name}.1"))
            self.link(f"{LIBRARIES}/{name}.1", f"{name}.{installed}")
        self.cache(*(f"{name}.1" for name in names))
        self.program("/usr/bin/nvidia-smi")

    def cache(self, *names: str) -> None:
        entries = [(name, f"/{LIBRARIES}/{name}", own.FLAGS) for name in names]
        self.write("/etc/ld.so.cache", ldcache.merge(None, entries))

    def docker_answers(self, path: str, answer: Any, status: str = "200 OK") -> socket.socket:
        """Listen on dockerd's socket and return this answer to every request."""
        listener = socket.socket(socket.AF_UNIX)
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        here = os.open(file.parent, os.O_PATH)
        try:  # /proc shortens the path: a socket's path has at most 107 characters
            listener.bind(f"/proc/self/fd/{here}/{file.name}")
        finally:
            os.close(here)
        listener.listen()
        body = json.dumps(answer).encode()
        head = f"HTTP/1.0 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        threading.Thread(target=_serve, args=(listener, head + body), daemon=True).start()
        return listener


def _serve(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)


def said(findings: Iterable[Finding]) -> dict[str, tuple[str, str]]:
    """Return check -> (status, message), and assert that each check occurs once."""
    found = {}
    for finding in findings:
        assert finding.check not in found
        assert finding.status == "ok" or finding.remedy
        assert not finding.message.endswith(".")
        assert not finding.remedy.endswith(".")
        found[finding.check] = (str(finding.status), finding.message)
    return found
