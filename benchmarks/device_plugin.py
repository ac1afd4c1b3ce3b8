#!/usr/bin/env python3
"""What the device plugin costs a node when nothing happens: memory, and processor time per minute.

Run as root, with gpuhook[test] installed, on a machine that is quiet:

    python benchmarks/device_plugin.py [--gpus 8] [--mig 7] [--minutes 2]

A simulated driver stands for the GPUs and the kubelet of the tests for a kubelet, so what a real
NVML does in its own process comes on top.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/lib"))

from kubelet import Kubelet

COMMAND = Path(sys.executable).with_name("gpuhook")
RESOURCE = "nvidia.com/gpu"
SETTLE_S = 5.0  # seconds to wait after the kubelet has the device list


def memory(pid: int) -> float:
    """Return a process' proportional share of memory (PSS) in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    [pss] = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    return int(pss) / 1024


def spent(pid: int) -> float:
    """Return the processor time that a process has used, in milliseconds."""
    text = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii")
    return int(text.split()[0]) / 1e6


def name(pid: int) -> str:
    """Return what a process is called."""
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


@contextlib.contextmanager
def running(folder: Path, gpus: int, migs: int) -> Iterator[list[int]]:
    """Give the processes of a plugin that has handed a simulated machine to a kubelet."""
    root, config = folder / "driver", folder / "config.toml"
    mig = [f"--mig={gpu}:{','.join(['1g.18gb'] * migs)}" for gpu in range(gpus) if migs]
    subprocess.run(
        [COMMAND, "simulate", root, f"--gpus={gpus}", *mig], check=True, stdout=subprocess.DEVNULL
    )
    config.write_text(
        f'[nvidia-container-cli]\nroot = "{root}"\n[gpuhook]\nstate-dir = "{folder}/state"\n',
        encoding="utf-8",
    )
    with Kubelet(folder / "kubelet") as kubelet:
        kubelet.start()
        words = ["device-plugin", f"--config={config}", "--mig-strategy=single"]
        words.append(f"--kubelet-socket={kubelet.folder}/kubelet.sock")
        plugin = subprocess.Popen([COMMAND, *words])
        try:
            kubelet.wait_for(RESOURCE, healthy=gpus * (migs or 1))
            time.sleep(SETTLE_S)
            children = Path(f"/proc/{plugin.pid}/task/{plugin.pid}/children").read_text()
            yield [plugin.pid, *map(int, children.split())]
        finally:
            plugin.terminate()
            plugin.wait()


def main() -> None:
    """Measure, and print a line for each process and one for all."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--mig", type=int, default=0, help="MIG devices of each GPU, up to 7")
    parser.add_argument("--minutes", type=float, default=2.0)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="plugin-", dir="/run") as folder,
        running(Path(folder), chosen.gpus, chosen.mig) as pids,
    ):
        before = [spent(pid) for pid in pids]
        time.sleep(chosen.minutes * 60)
        used = [(spent(pid) - old) / chosen.minutes for pid, old in zip(pids, before, strict=True)]
        sizes = [memory(pid) for pid in pids]
        for pid, size, each in zip(pids, sizes, used, strict=True):
            print(f"{name(pid):16} {size:6.1f} MiB {each:8.1f} ms a minute")
        share = sum(used) / 600
        print(f"{'all':16} {sum(sizes):6.1f} MiB {sum(used):8.1f} ms a minute, {share:.3f} %")


if __name__ == "__main__":
    main()
