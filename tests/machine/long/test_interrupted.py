"""What ends in the middle leaves a machine that goes on: dpkg, and a start with a full /run."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from booted import BUSYBOX, GIVEN, REQUEST, call, package
from harness.commands import Result, run

RUN = Path("/run")


def start(docker: tuple[str, ...]) -> Result:
    """Start a container that opens the GPUs it asks for."""
    nodes = [f"/dev/nvidia{minor}" for minor in GIVEN]
    words = ["run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    return run([*docker, *words, BUSYBOX, "devopen", *nodes])


@pytest.mark.parametrize("moment", range(8))
def test_dpkg_is_killed(moment: int, docker: tuple[str]) -> None:
    """Each time a bit later; where it has got to doesn't matter to who configures it again."""
    started = time.monotonic()
    call("dpkg", "--install", package())
    whole = time.monotonic() - started
    killed = subprocess.Popen(
        ["dpkg", "--install", package()],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(whole * (moment + 0.5) / 8)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    run(["dpkg", "--configure", "--pending"])
    call("dpkg", "--install", package())
    assert call("dpkg", "--audit") == ""
    call("dpkg", "--verify", "gpuhook")
    assert start(docker).ok().stdout.split()[1::2] == ["ENXIO", "ENXIO"]


def test_a_container_starts_while_run_is_full(docker: tuple[str]) -> None:
    """Nothing that is saved there is needed: without it a start only takes longer."""
    filler = RUN / "filler"
    call("mount", "-o", "remount,size=64m", RUN)
    start(docker).ok()
    before = call("cat", "/proc/self/mountinfo")
    for path in (RUN / "gpuhook").rglob("*"):
        if path.is_file():
            path.unlink()
    try:
        run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"]).failed()
        full = start(docker)
    finally:
        filler.unlink()
    said = full.stderr.splitlines()
    if full.status != 0:  # the engine, too, keeps in there what it must
        assert "Traceback" not in full.stderr
        assert any("No space left" in line or "no space left" in line for line in said), said
    assert start(docker).ok().stdout.split()[1::2] == ["ENXIO", "ENXIO"]
    assert call("cat", "/proc/self/mountinfo") == before
