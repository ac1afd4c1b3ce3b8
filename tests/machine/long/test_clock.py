"""Clock jumps by days, forwards and backwards: gpuhook neither waits nor keeps stale data."""

import time
from collections.abc import Iterator

import pytest
from booted import BUSYBOX, DRIVER, GPUS, call, running, set_config
from harness.commands import Result, run, wait_until

DAY = 86400
SCRAPE = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9836/metrics').read())"
SOON = 45.0  # seconds; 0.1 s of work takes a few on an emulated machine


@pytest.fixture(params=[20, -20], ids=["forth", "back"])
def jump(request: pytest.FixtureRequest) -> Iterator["Jump"]:
    """A jump of the clock by twenty days; the clock is set right again at the end."""
    made = Jump(request.param)
    yield made
    made.undo()


class Jump:
    def __init__(self, days: int) -> None:
        self._days = days
        self._began = time.time() - time.monotonic()

    def make(self) -> None:
        call("date", "--set", f"@{time.time() + self._days * DAY}")

    def undo(self) -> None:
        call("date", "--set", f"@{self._began + time.monotonic()}")


@pytest.fixture(autouse=True)
def whole(docker: tuple[str]) -> Iterator[None]:
    """Restore the driver's GPUs at the end."""
    yield
    call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS))
    call("gpuhook", "refresh")


def start(gpu: int) -> Result:
    words = ["docker", "run", "--rm", "--network=none", "--runtime=gpu-py"]
    return run([*words, f"--env=NVIDIA_VISIBLE_DEVICES={gpu}", BUSYBOX, "busybox", "true"])


def test_a_found_gpu_is_given_again_after_a_clock_jump(jump: Jump) -> None:
    """Only the elapsed time tells gpuhook that it may ask the driver again."""
    call("systemctl", "stop", "gpuhook-watch")
    try:
        call("gpuhook", "simulate", DRIVER, "--lost", "3")
        call("gpuhook", "refresh")
        assert "lost" in start(3).failed().stderr
        jump.make()
        call("gpuhook", "simulate", DRIVER, "--found", "3")
        wait_until(lambda: start(3).status == 0, "it is given", timeout=SOON)
    finally:
        call("systemctl", "start", "gpuhook-watch")


def test_the_watch_notices_changes_after_a_clock_jump(jump: Jump) -> None:
    unit = f"clock-{'forth' if jump._days > 0 else 'back'}"
    call("systemctl", "stop", "gpuhook-watch")
    try:
        call(
            *("systemd-run", f"--unit={unit}", "--service-type=notify"),
            *("/usr/bin/gpuhook", "watch", "--interval", "3"),
        )
        jump.make()
        call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS + 1))
        said = ("journalctl", f"--unit={unit}", "--output=cat", "--no-pager")
        wait_until(lambda: f"{GPUS + 1} GPUs" in call(*said), "it has looked", timeout=SOON)
    finally:
        call("systemctl", "stop", unit)
        call("systemctl", "start", "gpuhook-watch")


def test_metrics_are_updated_after_a_clock_jump(jump: Jump) -> None:
    ask = ("python3", "-c", SCRAPE)
    try:
        call("systemctl", "start", "gpuhook-metrics")
        wait_until(lambda: run(ask).status == 0, "metrics are served")
        jump.make()
        call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS + 1))
        newest = f'="{GPUS}"'
        wait_until(lambda: newest in run(ask).stdout, "the new GPU is in them", timeout=SOON)
    finally:
        call("systemctl", "stop", "gpuhook-metrics")


def test_a_lease_is_held_through_a_clock_jump_until_the_container_ends(
    jump: Jump, docker: tuple[str]
) -> None:
    set_config("gpuhook.exclusive=nvidia.com/gpu")
    try:
        request = "NVIDIA_VISIBLE_DEVICES=0"
        with running("holder", docker, ["--network=none", "--runtime=gpu-py"], request):
            jump.make()
            assert "is in use by" in start(0).failed().stderr
            start(1).ok()
        start(0).ok()
    finally:
        set_config("gpuhook.exclusive=")
