"""The commands of docs/install.md and README.md, which work and let a container start.

After the installation of the README, NVIDIA's own commands work, too.
"""

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
from harness.images import REPOSITORY, image
from harness.packages import EVERY

VENV = Path("/opt/gpuhook")


# The commands in NVIDIA's installation guide.
NVIDIAS = (
    "nvidia-ctk runtime configure --runtime=docker",
    "systemctl restart docker",
    "docker run --rm --gpus all ubuntu nvidia-smi",
)
SETTINGS = Path("/etc/docker/daemon.json")


def commands(heading: str, page: str = "docs/install.md") -> list[str]:
    """Return the commands of a section of a page."""
    text = (REPOSITORY / page).read_text().partition(f"## {heading}\n")[2]
    block = re.search(r"```(?:sh)?\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    assert block
    lines = [line.partition(" #")[0].strip() for line in block[1].splitlines()]
    return [line for line in lines if not line.startswith("#")]


def follow(*lines: str) -> None:
    """Run command lines of the page."""
    for line in lines:
        run(["sh", "-c", line], cwd=REPOSITORY, timeout=300.0).ok()


def starts() -> None:
    """Check that a container has the GPUs that it requests."""
    words = ["docker", "run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    said = call(*words, BUSYBOX, "devopen", *(f"/dev/nvidia{minor}" for minor in GIVEN))
    assert said.split()[1::2] == [ALLOWED] * len(GIVEN)


@pytest.fixture
def bare(before: set[str]) -> Iterator[None]:
    """A machine without packages of gpuhook, whose Docker has the images."""
    call("dpkg", "--purge", *EVERY)
    call("docker", "load", "--input", CARRIED / "images.tar")
    for name in ("debian:12", "ubuntu"):
        call("docker", "tag", image("debian"), name)
    yield
    call("dpkg", "--purge", *EVERY)
    shutil.rmtree(VENV, ignore_errors=True)


def test_the_pip_instructions_of_the_install_page_work(bare: None) -> None:
    follow(*commands("With pip"))
    gpuhook = VENV / "bin/gpuhook"
    follow(f"{VENV}/bin/pip install . ./simulate")  # as the page says below the commands
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


def test_the_debian_package_instructions_work(bare: None) -> None:
    follow(*commands("As a Debian package"))
    follow("apt-get install --yes ./dist/gpuhook-simulate_*_all.deb")
    if not DRIVER.exists():
        call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS))
    set_config(f"nvidia-container-cli.root={DRIVER}")
    dry_run, install, restart, trial, doctor = commands("Tell the engines")
    follow(dry_run, install)
    assert "is newer than the running dockerd" in run(doctor.split()).failed().stdout
    follow(restart)
    wait_for_docker()
    follow(trial)
    assert "Run " not in run(doctor.split()).ok().stdout
    starts()
    call("gpuhook", "uninstall")


def shell(*lines: str) -> str:
    """Run lines as an administrator's shell does; return what they printed."""
    script = "\n".join(("set -e", f"PATH={VENV}/bin:$PATH", *lines))
    return run(["sh", "-c", script], cwd=REPOSITORY, timeout=300.0).ok().stdout


def test_nvidias_own_commands_work_after_the_readmes_instructions(bare: None) -> None:
    before = SETTINGS.read_bytes() if SETTINGS.exists() else None
    lines = commands("Install it", "README.md")
    at, end = (lines.index(each) for each in ("systemctl restart docker", "gpuhook list"))
    assert lines[at - 1] == "gpuhook install --engine docker --gpus"
    shell(*lines[: at - 1], f"{VENV}/bin/pip install . ./simulate")
    if not DRIVER.exists():
        shell(f"gpuhook simulate {DRIVER} --gpus {GPUS}")
    shell(f"gpuhook config set nvidia-container-cli.root={DRIVER}")
    told = shell(lines[at - 1])
    assert "docker: For --gpus, restart Docker" in told
    assert "systemctl restart docker" in told
    assert "Try it: docker run --rm --gpus all debian:12 nvidia-smi -L" in told
    call("systemctl", "reset-failed", "docker", "docker.socket", "containerd")
    assert shell(lines[at], lines[at + 1]).count("GPU ") == GPUS
    shell(*(line for line in lines[at + 2 : end] if "explain" in line))
    installed = SETTINGS.read_bytes()
    call("systemctl", "reset-failed", "docker", "docker.socket", "containerd")
    assert "NVIDIA-SMI" in shell(*NVIDIAS)
    assert SETTINGS.read_bytes() == installed
    version = shell("nvidia-ctk --version").split()
    assert "version" in version
    info = call("docker", "info", "--format={{.Runtimes.nvidia}}")
    assert "nvidia-container-runtime" in info  # dev containers look for this runtime
    starts()
    shell(lines[-1])
    assert (SETTINGS.read_bytes() if SETTINGS.exists() else None) == before
    assert not Path("/usr/local/bin/nvidia-ctk").exists()
    call("systemctl", "reset-failed", "docker", "docker.socket", "containerd")
    call("systemctl", "restart", "docker")
