"""The commands of docs/install.md do what it says, as they stand there, and a container starts."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import (
    ALLOWED,
    BUSYBOX,
    CARRIED,
    DRIVER,
    GIVEN,
    GPUS,
    REQUEST,
    call,
    set_config,
    wait_for_docker,
)
from harness.commands import run
from harness.images import REPOSITORY

VENV = Path("/opt/gpuhook")


def commands(heading: str) -> list[str]:
    """Return the commands of a section."""
    text = (REPOSITORY / "docs/install.md").read_text().partition(f"## {heading}\n")[2]
    block = re.search(r"```sh\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    assert block
    return [line.partition(" #")[0].strip() for line in block[1].splitlines()]


def follow(*lines: str) -> None:
    """Run command lines of the page."""
    for line in lines:
        run(["sh", "-c", line], cwd=REPOSITORY, timeout=300.0).ok()


def starts() -> None:
    """See that a container has the GPUs that it asks for."""
    words = ["docker", "run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    said = call(*words, BUSYBOX, "devopen", *(f"/dev/nvidia{minor}" for minor in GIVEN))
    assert said.split()[1::2] == [ALLOWED] * len(GIVEN)


@pytest.fixture
def bare(before: set[str]) -> Iterator[None]:
    """Nothing of ours is installed; Docker has the images."""
    call("dpkg", "--purge", "gpuhook-simulate", "gpuhook")
    call("docker", "load", "--input", CARRIED / "images.tar")
    yield
    call("dpkg", "--purge", "gpuhook-simulate", "gpuhook")
    shutil.rmtree(VENV, ignore_errors=True)


def test_with_pip(bare: None) -> None:
    follow(*commands("With pip"))
    gpuhook = VENV / "bin/gpuhook"
    follow(f"{VENV}/bin/pip install . ./simulate")  # as the table below says
    if not DRIVER.exists():
        call(gpuhook, "simulate", DRIVER, "--gpus", str(GPUS))
    call(gpuhook, "config", "set", f"nvidia-container-cli.root={DRIVER}")
    unit = "/etc/systemd/system/gpuhook-watch.service"
    assert unit in call(gpuhook, "files").split()
    Path(unit).write_text(call(gpuhook, "files", unit))
    call("systemctl", "enable", "--now", "gpuhook-watch")
    call(gpuhook, "install", "--engine", "docker", "--reload")
    call(gpuhook, "doctor")
    starts()
    call(gpuhook, "uninstall", "--reload")
    call("systemctl", "disable", "--now", "gpuhook-watch")
    Path(unit).unlink()
    call("systemctl", "daemon-reload")


def test_as_a_debian_package(bare: None) -> None:
    follow(*commands("As a Debian package"))
    follow("apt-get install --yes ./dist/gpuhook-simulate_*_all.deb")
    if not DRIVER.exists():
        call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS))
    set_config(f"nvidia-container-cli.root={DRIVER}")
    *lines, doctor = commands("Tell the engines")
    follow(*lines)
    remedy = "systemctl reload docker"
    assert f"Run {remedy}" in run(doctor.split()).failed().stdout
    follow(remedy)
    wait_for_docker()
    assert "Run " not in run(doctor.split()).ok().stdout
    starts()
