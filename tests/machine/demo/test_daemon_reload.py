"""Containers keep the GPUs of a driver root, whose nodes aren't in /dev, at a daemon-reload."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DRIVER = Path("/var/tmp/gpuhook-reload")
CONFIG = Path("/etc/gpuhook/config.toml")
IMAGE = "gpuhook-reload"
ALLOWED, DENIED = "No such device or address", "Operation not permitted"  # of a node without driver
# What each way is to have after the reload, on cgroup v1 with Debian 12's runc.
WAYS = {"docker": ALLOWED, "runtime": ALLOWED, "precreate": ALLOWED, "prestart": DENIED}


def output(*argv: str | Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """The folder of gpuhook's programs, which hand out simulated GPUs; engines have an image."""
    found = Path(output("scripts/lib/installed")) / "bin"
    output(found / "gpuhook", "simulate", DRIVER, "--gpus=2")
    output("scripts/lib/rootfs", "busybox", f"{DRIVER}-image")
    output("tar", "-C", f"{DRIVER}-image", "-cf", f"{DRIVER}.tar", ".")
    for engine in ("docker", "podman"):
        output(engine, "import", f"{DRIVER}.tar", IMAGE)
    before = CONFIG.read_bytes() if CONFIG.exists() else None
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text(f'[nvidia-container-cli]\nroot = "{DRIVER}"\nload-kmods = false\n')
    try:
        yield found
    finally:
        output(found / "gpuhook", "uninstall", "--reload")
        for engine in ("docker", "podman"):
            output(engine, "rmi", "--force", IMAGE)
        if before is None:
            CONFIG.unlink()
        else:
            CONFIG.write_bytes(before)
        output(found / "gpuhook", "simulate", "--remove", DRIVER)
        output("rm", "-rf", f"{DRIVER}-image", f"{DRIVER}.tar")


def opens(*engine: str) -> str:
    words = [*engine, "exec", IMAGE, "busybox", "sh", "-c", "busybox cat /dev/nvidia0 2>&1; :"]
    return output(*words).rpartition(": ")[2]


@pytest.mark.parametrize("way", WAYS)
def test_daemon_reload(programs: Path, way: str) -> None:
    if way != "docker" and not Path("/sys/fs/cgroup/devices").exists():
        return  # runc's podman on v2 is the other suite's, with a kernel of its own
    for link in Path("/dev/char").iterdir():
        if link.readlink().is_relative_to(DRIVER):
            link.unlink()
    engine = ["docker"] if way == "docker" else ["podman", "--runtime", "runc"]
    words = ["--network=none", f"--name={IMAGE}", "--env=NVIDIA_VISIBLE_DEVICES=0", "--detach"]
    if way == "docker":
        output(programs / "gpuhook", "install", "--engine=docker", "--reload")
        while "gpu-py" not in output("docker", "info", "--format={{.Runtimes}}"):
            time.sleep(0.1)
        words += ["--runtime=gpu-py"]
    elif way == "runtime":
        engine[-1] = str(programs / "gpu-py")
    else:
        output(programs / "gpuhook", "install", "--engine=podman", f"--hook={way}")
    if way != "docker":
        words += ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    try:
        output(*engine, "run", *words, IMAGE, "busybox", "sleep", "1000")
        assert opens(*engine) == ALLOWED
        for _ in range(2):
            output("systemctl", "daemon-reload")
            output("systemd-run", "--wait", "--quiet", "true")  # after what it has queued
            assert opens(*engine) == WAYS[way]
        said = output(programs / "gpuhook", "repair", IMAGE)
        assert ("takes it away" in said) == (WAYS[way] == DENIED), said
        assert opens(*engine) == ALLOWED
    finally:
        subprocess.run([*engine, "rm", "--force", IMAGE], capture_output=True, check=False)


def test_the_doctor_is_content_once_refreshed(programs: Path) -> None:
    output(programs / "gpuhook", "refresh")
    words = [str(programs / "gpuhook"), "doctor", "--format=json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = {each["check"]: each["status"] for each in json.loads(done.stdout)["findings"]}
    assert found.get("dev-char", "ok") == "ok"
