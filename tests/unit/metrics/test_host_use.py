"""Use of the host by processes."""

import os
import subprocess
import sys
import time

from gpuhook.metrics.host_use import HostUse, ProcessUse

BUSY = """
import sys, time
kept = bytearray(64 << 20)
while time.process_time() < 0.5: pass
print("done", flush=True)
sys.stdin.read()
"""


def test_cpu_time_and_memory_of_a_process_are_measured() -> None:
    """The first value is the mean of the process's life, later ones are since the last sample."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    shift = [0.0]
    use = HostUse(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + shift[0])
    argv = [sys.executable, "-c", BUSY]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        first = use.of(process.pid)
        use.end_sample()
        shift[0] = 3600.0
        second = use.of(process.pid)
        use.end_sample()
        process.communicate()
    assert first.cpu_seconds is not None
    assert first.memory_bytes is not None
    assert 0.4 <= first.cpu_seconds < 60
    assert first.memory_bytes > 64 << 20
    lived = time.clock_gettime(time.CLOCK_BOOTTIME) - now
    assert first.cpu_utilization is not None
    assert first.cpu_utilization >= 0.4 / (lived + 1)
    assert second.cpu_utilization is not None
    assert 0.0 <= second.cpu_utilization < 0.01
    assert use.of(process.pid) == ProcessUse()


def test_a_reused_process_number_starts_a_new_measurement() -> None:
    use = HostUse()
    use._before = {(os.getpid(), 0.0): (1.0, 1e9)}
    share = use.of(os.getpid()).cpu_utilization
    assert share is not None
    assert share >= 0.0
