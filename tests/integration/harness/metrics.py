"""A running server of gpuhook metrics, and its series about containers."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gpuhook_simulate.vendors.nvidia import SimulatedProcess, end_process, run_process
from harness.commands import stop
from harness.driver import Driver

GIB = 1 << 30
GPUHOOK = (sys.executable, "-c", "from gpuhook.tools.cli import main; main()")  # with gRPC
COMMAND = (*GPUHOOK, "metrics")

Samples = list[tuple[str, dict[str, str], float]]


@contextlib.contextmanager
def exporter(config: Path, *options: str) -> Iterator[int]:
    """Serve metrics on a free port until the end of the block; yield the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [*COMMAND, "--listen", f"127.0.0.1:{port}", "--config", str(config), *options]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert b"Listening at" in process.stderr.readline()
        yield port
    finally:
        stop(process)
        if process.stderr is not None:
            process.stderr.close()
    assert process.returncode == 0


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as answer:
        body = answer.read().decode()
    return [
        # The parser adds the suffix _total to every counter's name.
        (name if name in body else name.removesuffix("_total"), sample.labels, sample.value)
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        for name in [sample.name]
    ]


def of_container(samples: Samples, container: str) -> dict[tuple[str, str], float]:
    """Return the values of a container by (series, device), without the series' common prefix."""
    prefix = "gpuhook_container_gpu_"
    return {
        (name.removeprefix(prefix), labels["uuid"]): value
        for name, labels, value in samples
        if name.startswith(prefix) and labels["container_id"] == container
    }


def pid_of(config: Path, container: str) -> int:
    """Return the id of a container's first process from the container's record."""
    files = (config.parent / "state/containers").glob("[0-9]*")
    records = [json.loads(file.read_text()) for file in files]
    return next(int(record["pid"]) for record in records if record["id"] == container)


def labels_of(samples: Samples, container: str) -> dict[str, str]:
    return next(labels for _, labels, _ in samples if labels.get("container_id") == container)


@contextlib.contextmanager
def using(driver: Driver, device: str, pid: int, memory: int, sm: int) -> Iterator[None]:
    root = str(driver.root)
    run_process(root, SimulatedProcess(device, pid, memory, sm))
    try:
        yield
    finally:
        end_process(root, pid)


def devices(samples: Samples) -> list[str]:
    return [labels["uuid"] for name, labels, _ in samples if name == "gpuhook_gpu_info"]


def listening(port: int) -> list[int]:
    """Return the ids of our child processes that serve on a port."""
    word = f"127.0.0.1:{port}"
    found = []
    for pid in children(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has exited
            if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process, except those that only serve HTTP."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    living = [child for child in map(int, text.split()) if state(child) not in {"", "Z"}]
    return [child for child in living if name(child) != "gpuhook-http"]


def name(pid: int) -> str:
    """Return the name of a process, or an empty string if it doesn't exist any more."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def state(pid: int) -> str:
    """Return a process' state as in proc(5), or an empty string if it doesn't exist any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
