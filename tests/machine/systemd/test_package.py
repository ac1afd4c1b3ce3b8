"""The Debian package with systemd: units run, upgrades ask nothing, a purge leaves nothing."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest
from booted import (
    ALLOWED,
    BUSYBOX,
    DRIVER,
    GIVEN,
    GPUS,
    REQUEST,
    call,
    package,
    packages,
    traces,
)
from harness.commands import run, wait_until
from harness.packages import ADDITIONS, as_one

CONFIG = Path("/etc/gpuhook/config.toml")


def states(*units: str) -> list[str]:
    return run(["systemctl", "is-active", *units]).stdout.split()


def test_only_the_watch_and_cdi_refresh_units_are_enabled_and_active(installed: None) -> None:
    assert states("gpuhook-watch.service", "gpuhook-cdi-refresh.path") == ["active", "active"]
    names = ("gpuhook-watch.service", "gpuhook-cdi-refresh.path", "gpuhook-cdi-refresh.service")
    assert call("systemctl", "is-enabled", *names).split() == ["enabled"] * 3
    assert run(["systemctl", "is-enabled", "gpuhook-metrics.service"]).stdout == "disabled\n"
    assert call("systemctl", "list-units", "--failed", "--plain", "--no-legend", "gpuhook*") == ""


def test_the_metrics_unit_serves_all_gpus_under_its_hardening(installed: None) -> None:
    script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9836/metrics').read())"
    try:
        call("systemctl", "enable", "--now", "gpuhook-metrics.service")
        ask = ["python3", "-c", script]
        wait_until(lambda: run(ask).status == 0, "metrics are served")
        said = call(*ask)
        assert all(f'gpu="{gpu}"' in said or f'index="{gpu}"' in said for gpu in range(GPUS)), said
    finally:
        call("systemctl", "disable", "--now", "gpuhook-metrics.service")


def names(document: Path) -> set[str]:
    """Return the names of the devices in a CDI spec."""
    if not document.exists():
        return set()
    lines = document.read_text().splitlines()
    return {line.split()[-1].strip("'\"") for line in lines if "name:" in line}


def test_cdi_specs_are_updated_by_the_path_unit(installed: None) -> None:
    document = Path("/run/cdi/nvidia.com-gpu.yaml")
    call("gpuhook", "install", "--cdi", "--engine", "docker")
    try:
        assert {"0", "3"} <= names(document)
        call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS + 1))
        call("ldconfig")
        wait_until(lambda: str(GPUS) in names(document), "the new GPU is in the document")
    finally:
        call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS))
        call("gpuhook", "uninstall", "--engine", "docker")


def newer(old: Path, folder: Path) -> Path:
    """Return a package as a next version with changed default settings."""
    root = folder / old.stem
    call("dpkg-deb", "--raw-extract", old, root)
    control = root / "DEBIAN/control"
    # The additional packages require gpuhook in exactly their own version.
    control.write_text(re.sub(r"(?m)(^Version: .*|\(= [^)]*)", r"\1.1", control.read_text()))
    for shipped in root.rglob("config.toml"):
        shipped.write_text(shipped.read_text() + "# A line that the next version has.\n")
    return Path(call("dpkg-deb", "-Znone", "--build", root, folder).split("'")[-2])


def start(docker: tuple[str, ...]) -> None:
    """Start a container that opens the GPUs it asks for."""
    words = [*docker, "run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    said = call(*words, BUSYBOX, "devopen", *(f"/dev/nvidia{minor}" for minor in GIVEN))
    assert said.split()[1::2] == [ALLOWED] * len(GIVEN)


def quietly(
    *words: str | Path, said: IO[str] | int = subprocess.DEVNULL
) -> "subprocess.Popen[bytes]":
    """Start a command without a terminal, in its own process group."""
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(words, start_new_session=True, stdin=nowhere, stdout=said, stderr=said)


def test_an_unattended_upgrade_keeps_settings_and_containers_start(
    docker: tuple[str], tmp_path: Path
) -> None:
    call("gpuhook", "config", "set", "disable-require=true")
    before = CONFIG.read_text()
    try:
        every = [newer(old, tmp_path) for old in packages()]
        said = tmp_path / "said"
        with said.open("w") as file:
            upgrade = quietly("apt-get", "install", "--yes", *every, said=file)
        started = 0
        while upgrade.poll() is None:
            start(docker)
            started += 1
        assert upgrade.returncode == 0, said.read_text()
        assert started > 1
        state = call("dpkg-query", "--show", "--showformat=${db:Status-Status}", "gpuhook")
        assert state == "installed"
        assert "disable-require = true" in CONFIG.read_text()
        assert states("gpuhook-watch.service") == ["active"]
    finally:
        call("dpkg", "--force-confold", "--force-downgrade", "--install", *packages())
        CONFIG.write_text(before)
        call("gpuhook", "config", "set", "disable-require=false")


def test_an_upgrade_from_one_package_keeps_the_service_running(
    installed: None, tmp_path: Path
) -> None:
    """The unit moves to another package, and its process then runs the new modules."""
    unit = "gpuhook-metrics.service"

    def process() -> str:
        return call("systemctl", "show", "--property=MainPID", "--value", unit).strip()

    call("dpkg", "--purge", *ADDITIONS)
    call("dpkg", "--force-downgrade", "--install", as_one(packages(), tmp_path / "one"))
    try:
        call("systemctl", "enable", "--now", unit)
        old = process()
        done = run(["dpkg", "--install", package()], timeout=300.0).ok()
        assert f"{unit} is enabled here, and is now in the package gpuhook-metrics" in done.stderr
        assert (states(unit), process()) == (["active"], old)
        call("dpkg", "--install", *packages())
        assert states(unit) == ["active"]
        assert process() != old
        assert call("systemctl", "is-enabled", unit) == "enabled\n"
        assert run(["systemctl", "is-active", "gpuhook-nri.service"]).stdout == "inactive\n"
    finally:
        call("systemctl", "disable", "--now", unit)
        call("dpkg", "--install", *packages())
    assert call("dpkg", "--audit") == ""


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_a_killed_dpkg_is_repaired_by_installing_again(seconds: float, docker: tuple[str]) -> None:
    """dpkg is killed while it unpacks or later; the repair needn't know at which step."""
    killed = quietly("dpkg", "--install", package())
    time.sleep(seconds)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    run(["dpkg", "--configure", "--pending"])
    call("dpkg", "--install", package())
    assert call("dpkg", "--audit") == ""
    call("dpkg", "--verify", "gpuhook")
    start(docker)


@pytest.fixture
def failed(installed: None) -> list[str]:
    """Failed units of two packages."""
    units = ["gpuhook-metrics.service", "gpuhook-watch.service"]
    folders = [Path(f"/run/systemd/system/{unit}.d") for unit in units]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "once.conf").write_text("[Service]\nRestart=no\n")
        call("systemctl", "daemon-reload")
        call("systemctl", "start", *units)
        call("systemctl", "kill", "--signal=KILL", *units)
        wait_until(lambda: states(*units) == ["failed"] * len(units), "they have failed")
    finally:
        for folder in folders:
            shutil.rmtree(folder)
        call("systemctl", "daemon-reload")
    return units


def test_a_purge_removes_all_files_units_and_settings(before: set[str], failed: list[str]) -> None:
    """Systemd lists no units either, not even those that had failed."""
    assert states(*failed) == ["failed"] * len(failed)
    call("gpuhook", "install", "--engine", "docker", "--cdi", "--reload")
    assert "/usr/bin/gpu-py" in traces()
    call("apt-get", "purge", "--yes", "gpuhook")
    assert traces() == before
    assert call("systemctl", "list-units", "--all", "--plain", "--no-legend", "gpuhook*") == ""
    assert "gpu-py" not in call("docker", "info", "--format", "{{json .Runtimes}}")
