"""The doctor, with simulated drivers and real dockerds."""

import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run, wait_until
from harness.docker import Docker, dockerd
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.namespaces import Namespace

PRIVATE = "a-value-that-is-no-ones-business"


class Doctor:
    """The doctor, run as a user runs it."""

    def __init__(self, installation: Installation, config: Path) -> None:
        self.argv: list[str | Path] = [installation.command, "doctor", "--config", config]

    def findings(self, *options: str | Path, status: int | None = None) -> list[dict[str, str]]:
        done = run([*self.argv, "--format", "json", *options])
        answer: dict[str, Any] = json.loads(done.stdout)
        worst = {"ok": 0, "warning": 1, "failure": 2}[answer["status"]]
        assert done.status == worst, str(done)
        assert status in (None, done.status), str(done)
        found: list[dict[str, str]] = answer["findings"]
        return found

    def status(self, check: str) -> str:
        [found] = [each for each in self.findings() if each["check"] == check]
        return found["status"]

    def docker(self, engine: Docker) -> dict[str, str]:
        """Return the status of each check that concerns this dockerd."""
        own = [each for each in self.findings() if str(engine.folder) in each["message"]]
        return {each["check"]: each["status"] for each in own}


@pytest.fixture
def doctor(installation: Installation, configs: dict[str, Path]) -> Doctor:
    return Doctor(installation, configs["runc"])


def _broken(
    installation: Installation, workspace: Path, name: str, *options: str
) -> tuple[Doctor, Driver]:
    driver = simulate(installation, workspace / f"doctor-{name}", "--gpus=2", *options)
    config = write_config(workspace / f"doctor-{name}-config", driver.root, ["runc"])
    return Doctor(installation, config), driver


def test_a_healthy_driver_passes_all_checks(doctor: Doctor, driver: Driver) -> None:
    found = {each["check"]: each for each in doctor.findings()}
    checks = ("driver-loaded", "driver-versions", "device-nodes", "nvml", "ld-cache", "launchers")
    for check in (*checks, "driver-files", "low-level-runtime", "runtime-starts", "cgroups"):
        assert found[check]["status"] == "ok", found[check]
    assert driver.version in found["driver-loaded"]["message"]
    assert f"{len(driver.gpus)} GPUs" in found["nvml"]["message"]
    assert not [each for each in found.values() if "itself failed" in each["message"]]


def test_text_and_json_findings_agree(doctor: Doctor) -> None:
    done = run(doctor.argv)
    found = doctor.findings()
    assert done.stdout.count("\n         -> ") == sum(bool(each["remedy"]) for each in found)
    assert done.stdout.splitlines()[-1].endswith(" 0 failures")


def test_a_slow_driver_start_is_a_warning(installation: Installation, workspace: Path) -> None:
    doctor, _ = _broken(installation, workspace, "slow", "--init-seconds=1.2")
    [found] = [each for each in doctor.findings() if each["check"] == "nvml"]
    assert found["status"] == "warning"
    assert "persistence mode" in found["remedy"]


def test_a_missing_or_wrong_node_is_a_failure(installation: Installation, workspace: Path) -> None:
    doctor, driver = _broken(installation, workspace, "nodes")
    assert doctor.status("device-nodes") == "ok"
    node = driver.root / "dev/nvidia1"
    node.unlink()
    assert doctor.status("device-nodes") == "failure"
    os.mknod(node, 0o20666, os.makedev(195, 7))
    [found] = [each for each in doctor.findings() if each["check"] == "device-nodes"]
    assert found["message"] == "/dev/nvidia1 is 195:7 and should be 195:1"
    node.unlink()
    os.mknod(node, 0o20600, os.makedev(195, 1))
    node.chmod(0o600)
    assert doctor.status("device-modes") == "warning"


@pytest.fixture
def unconfigured(workspace: Path, host: Namespace, archive: Path) -> Iterator[Docker]:
    """A dockerd whose daemon.json doesn't mention gpuhook."""
    with dockerd(workspace / "doctor-docker", host, {}, archive, {}) as engine:
        yield engine


def test_dockerd_findings_change_as_it_is_configured_and_reloaded(
    doctor: Doctor, unconfigured: Docker, installation: Installation
) -> None:
    found = doctor.docker(unconfigured)
    assert "docker-unused" in found
    assert not {"docker-registered", "docker-loaded"} & set(found)
    settings = {"runtimes": {"gpu-py": {"path": str(installation.runtime)}}}
    (unconfigured.folder / "daemon.json").write_text(json.dumps(settings))
    found = doctor.docker(unconfigured)
    assert (found["docker-registered"], found["docker-loaded"]) == ("ok", "failure")
    assert unconfigured.pid is not None
    os.kill(unconfigured.pid, signal.SIGHUP)
    wait_until(
        lambda: doctor.docker(unconfigured).get("docker-loaded") == "ok",
        "the doctor sees that dockerd has loaded the runtime",
    )


def test_the_report_holds_no_environment_values(
    installation: Installation, workspace: Path, driver: Driver
) -> None:
    folder = workspace / "doctor-report"
    config = write_config(folder, driver.root, ["runc"])
    text = config.read_text().replace(
        "load-kmods", f'environment = ["TOKEN={PRIVATE}",\n "X={PRIVATE}"]\nload-kmods'
    )
    config.write_text(text)
    report = folder / "report.tar.gz"
    found = Doctor(installation, config).findings("--report", report)
    assert report.stat().st_mode & 0o777 == 0o600
    with tarfile.open(report) as archive:
        files = {}
        for member in archive.getmembers():
            opened = archive.extractfile(member)
            assert opened is not None
            files[member.name.removeprefix("gpuhook-report/")] = opened.read().decode()
    assert PRIVATE not in "".join(files.values())
    assert json.loads(files["findings.json"]) == found
    assert json.loads(files["inventory.json"])[0]["driver_version"] == driver.version
    assert driver.version in files["proc/driver/nvidia/version"]
    assert "/dev/nvidiactl 20666 0:0 195:255" in files["nodes.txt"]
    assert "environment = [] # values left out" in files["config.toml"]
    assert 'state-dir = "' in files["config.toml"]


def test_a_report_that_cannot_be_written_is_an_error(doctor: Doctor) -> None:
    done = run([*doctor.argv, "--report", "/proc/report.tar.gz"])
    assert done.status == 1
    assert "The report /proc/report.tar.gz can't be written" in done.stderr
