"""A full /run and a full disk: commands exit with an error, and the machine keeps working."""

import os
from pathlib import Path

from booted import BUSYBOX, GIVEN, REQUEST, call
from harness.commands import Result, run

RUN = Path("/run")


OPEN = (BUSYBOX, "devopen", *(f"/dev/nvidia{minor}" for minor in GIVEN))


def start(docker: tuple[str, ...]) -> Result:
    """Start a container that opens the GPUs it asks for."""
    words = ["run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    return run([*docker, *words, *OPEN])


def test_a_container_starts_while_run_is_full(docker: tuple[str]) -> None:
    """Data that gpuhook saves in /run only makes starts faster, so a start doesn't need it."""
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
    if full.status != 0:  # the engine also needs space on this filesystem
        assert "Traceback" not in full.stderr
        assert any("No space left" in line or "no space left" in line for line in said), said
    assert start(docker).ok().stdout.split()[1::2] == ["ENXIO", "ENXIO"]
    assert call("cat", "/proc/self/mountinfo") == before


def test_commands_on_a_full_disk_change_nothing_and_containers_start(docker: tuple[str]) -> None:
    """Commands of root change nothing, and existing containers start."""
    call(*docker, "create", "--name=there", "--runtime=gpu-py", "--env", REQUEST, *OPEN)
    config, filler = Path("/etc/gpuhook/config.toml"), Path("/var/filler")
    before = config.read_bytes()
    fill(filler)
    try:
        for words in (
            ("install", "--engine=podman", "--cdi"),
            ("config", "set", "disable-require"),
        ):
            said = run(["gpuhook", *words]).failed().stderr
            assert "Traceback" not in said
            assert "space" in said
        assert config.read_bytes() == before
        started = run([*docker, "start", "--attach", "there"])
    finally:
        filler.unlink()
    if started.status != 0:
        assert "no space left" in started.stderr.lower()
    call("gpuhook", "install", "--engine=podman")
    call("gpuhook", "uninstall", "--engine=podman")
    assert call(*docker, "start", "--attach", "there").split()[1::2] == ["ENXIO", "ENXIO"]
    call(*docker, "rm", "there")


def fill(filler: Path) -> None:
    """Fill a file system completely, including the blocks that are reserved for root."""
    free = os.statvfs(filler.parent)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
    run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k", "oflag=append", "conv=notrunc"]).failed()
