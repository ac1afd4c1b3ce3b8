#!/usr/bin/env python3
"""What `gpuhook metrics` costs on a full node: a scrape, `gpuhook list`, and doing nothing.

Run as root, with gpuhook[test] installed, on a machine that is quiet:

    python benchmarks/metrics.py [--gpus 16] [--containers 500] [--minutes 2]

A simulated driver stands for GPUs of seven MIG devices each, and a sleeping process with a cgroup
and mounts of its own for each container; it has a record, as gpu-py writes it, and a pause
container of its pod beside it has none. What a real NVML does comes on top.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from device_plugin import memory, name, spent
from machine import isolate
from prometheus_client.parser import text_string_to_metric_families

from gpuhook.core.records import records
from gpuhook_simulate.vendors.nvidia import Options, build

COMMAND = Path(sys.executable).with_name("gpuhook")
PORT = 19836
MIGS = 7
SCRAPES = 20
PAUSE_S = 0.2  # seconds between two scrapes
HIERARCHIES = ("/sys/fs/cgroup/devices", "/sys/fs/cgroup")  # cgroup roots to list: v1's and v2's


class Node:
    """The invented node, in a folder."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        self.state = folder / "state"
        built = build(Options(
            root=str(folder / "driver"), gpus=gpus,
            mig=dict.fromkeys(range(gpus), ("1g.18gb",) * MIGS),
        ))  # fmt: skip
        self.migs = [(gpu, mig) for gpu in built.gpus for mig in gpu.migs]
        self.config.write_text(
            f'[nvidia-container-cli]\nroot = "{built.root}"\n'
            f'[gpuhook]\nstate-dir = "{self.state}"\n',
            encoding="utf-8",
        )
        hierarchy = next(each for each in HIERARCHIES if Path(each, "cgroup.procs").exists())
        self.groups = Path(hierarchy, f"kubepods-{os.getpid()}")
        self.root = folder / "container"
        self.processes: list[subprocess.Popen[bytes]] = []

    def fill(self, containers: int) -> None:
        """Start the containers and their pods' own, and write the records."""
        self.state.mkdir(mode=0o755)
        (self.state / records.FOLDER).mkdir(mode=0o700)
        for path in ("container", "upper", "upper/up", "upper/work"):
            if path == "upper/up":
                run("mount", "-t", "tmpfs", "tmpfs", self.folder / "upper")
            (self.folder / path).mkdir()
        places = f"lowerdir=/,upperdir={self.folder}/upper/up,workdir={self.folder}/upper/work"
        run("mount", "-t", "overlay", "overlay", "-o", places, self.root)
        run("mount", "-t", "proc", "proc", self.root / "proc")
        lines = [f"{time.time() - 60:.6f} 0 accounting off"]
        for number in range(containers):
            _, mig = self.migs[number % len(self.migs)]
            pid = self.start(number, "container")
            self.start(number, "pause")
            self.record(number, pid, mig.uuid)
            place = f"{number % len(self.migs) // MIGS}:{mig.gi}:{mig.ci}"
            lines.append(f"{time.time() - 60:.6f} {place} process {pid} compute {1 << 26} 0 0 0 0")
        activity = self.folder / "driver/simulate/activity"
        with activity.open("a", encoding="utf-8") as file:
            file.write("\n".join(sorted(lines)) + "\n")

    def start(self, number: int, kind: str) -> int:
        """Start a process in a cgroup, with mounts and a root of its own; return its pid."""
        group = self.groups / f"pod{number:08x}-0000-4000-8000-{0:012x}" / identity(number, kind)
        group.mkdir(parents=True)
        script = f"echo $$ > {group}/cgroup.procs; exec unshare -m chroot {self.root} sleep 100000"
        process = subprocess.Popen(["sh", "-c", script])
        self.processes.append(process)
        return process.pid

    def record(self, number: int, pid: int, device: str) -> None:
        """Write a container's record."""
        began = began_at(pid)
        record = {
            "version": records.VERSION, "id": identity(number, "container"), "pid": pid,
            "started": began, "engine": "kubernetes", "bundle": f"/run/bundles/{number}",
            "container": "main", "pod": f"pod-{number}", "namespace": "default",
            "uid": f"{number:08x}-0000-4000-8000-{0:012x}", "image": "registry/image:1",
            "given": [{
                "vendor": "nvidia", "kind": "nvidia.com/gpu",
                "request": {"source": "environment", "devices": [device]},
                "selected": [device], "nodes": {}, "devices": [],
            }],
        }  # fmt: skip
        path = self.state / records.FOLDER / f"{pid}-{began}"
        path.write_text(json.dumps(record), encoding="utf-8")

    def end(self) -> None:
        """End all containers."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for folder, _, _ in os.walk(self.groups, topdown=False):
            os.rmdir(folder)


def identity(number: int, kind: str) -> str:
    """Return a container's id of 64 digits."""
    return f"{number:08x}{len(kind):056x}"


def began_at(pid: int) -> int:
    """Return when a process began; once it is what it will be, sleep."""
    path = Path(f"/proc/{pid}")
    while (path / "comm").read_text(encoding="utf-8").strip() != "sleep":
        time.sleep(0.001)
    return int((path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])


def run(*argv: str | Path) -> None:
    """Run a program, which must go well."""
    subprocess.run(argv, check=True)


def scrape() -> tuple[float, dict[str, float], int]:
    """Scrape once; return the seconds, those of each step, and how many samples there are."""
    before = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=60) as answer:
        body = answer.read().decode()
    took = time.perf_counter() - before
    samples = [each for family in text_string_to_metric_families(body) for each in family.samples]
    steps = {
        each.labels["step"]: each.value
        for each in samples
        if each.name == "gpuhook_metrics_step_duration_seconds"
    }
    return took, steps, len(samples)


@contextlib.contextmanager
def exporter(config: Path, *options: str) -> Iterator[int]:
    """Serve; give the process id."""
    argv = [COMMAND, "metrics", f"--listen=127.0.0.1:{PORT}", f"--config={config}", *options]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE)
    try:
        while b"Listening" not in process.stderr.readline():  # type: ignore[union-attr]
            pass
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def family_of(pid: int) -> list[int]:
    """Return a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [pid, *map(int, children.split())]


def print_scrapes(config: Path, *options: str) -> None:
    """Print what scrapes take, beside the driver; processor time counts on a busy machine, too."""
    with exporter(config, *options) as pid:
        first, _, _ = scrape()
        rows, before = [], spent(pid)
        for _ in range(SCRAPES):
            time.sleep(PAUSE_S)
            rows.append(scrape())
        processor = (spent(pid) - before) / SCRAPES
    own = [took - steps["driver"] for took, steps, _ in rows]
    steps = {name: statistics.median(row[1][name] for row in rows) * 1000 for name in rows[0][1]}
    print(
        f"scrape {' '.join(options) or 'plain':16} {rows[0][2]} samples: "
        f"beside NVML {statistics.median(own) * 1000:.0f} ms (most {max(own) * 1000:.0f}, "
        f"first {first * 1000:.0f} with all), {processor:.0f} ms of processor time; "
        + ", ".join(f"{name} {value:.0f}" for name, value in steps.items())
    )


def print_list(config: Path) -> None:
    """Print what `gpuhook list` takes."""
    times = []
    for _ in range(5):
        before = time.perf_counter()
        subprocess.run(
            [COMMAND, "list", f"--config={config}"], check=True, stdout=subprocess.DEVNULL
        )
        times.append(time.perf_counter() - before)
    print(f"list: {statistics.median(times):.2f} s (most {max(times):.2f})")


def print_idle(config: Path, minutes: float) -> None:
    """Print what it costs between scrapes: with the driver open, and processor time."""
    with exporter(config) as pid:
        scrape()
        time.sleep(3)
        pids = family_of(pid)
        before = [spent(each) for each in pids]
        time.sleep(minutes * 60)
        used = [spent(each) - old for each, old in zip(pids, before, strict=True)]
        sizes = [memory(each) for each in pids]
        for each, size, took in zip(pids, sizes, used, strict=True):
            print(f"idle {name(each):16} {size:6.1f} MiB {took / minutes:8.2f} ms a minute")
        share = sum(used) / minutes / 600
        print(f"idle {'all':16} {sum(sizes):6.1f} MiB, {share:.3f} % of a core")


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--containers", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=1.5)
    chosen = parser.parse_args()
    isolate()
    with tempfile.TemporaryDirectory(prefix="metrics-", dir="/run") as folder:
        node = Node(Path(folder), chosen.gpus)
        try:
            node.fill(chosen.containers)
            print_scrapes(node.config)
            print_scrapes(node.config, "--cadvisor", "--dcgm")
            print_list(node.config)
            print_idle(node.config, chosen.minutes)
        finally:
            node.end()
            subprocess.run(["umount", "-R", node.root, node.folder / "upper"], check=False)


if __name__ == "__main__":
    main()
