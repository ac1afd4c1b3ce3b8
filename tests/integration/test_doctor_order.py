"""Order, length and end of the doctor's output, on hosts with problems.

The command runs in a separate PID namespace, so that it sees only the test's daemons.
"""

import json
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness.commands import Result, run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.strangers import AS_STRANGER, UID

APART = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# The session has an /etc of its own, so a test may write anything in these folders.
PLACES = ("/etc/docker", "/etc/containerd", "/etc/containers/containers.conf.d")
PODMAN = "/etc/containers/containers.conf.d/gpu.conf"
# Act as a containerd of root that was started before its file was written.
CONTAINERD = """
cp /bin/sh "$0/containerd" && mkfifo "$0/never" && exec 3<>"$0/never"
"$0/containerd" -c 'echo started; read -r _' --config /etc/containerd/config.toml <&3 >"$0/said" &
until [ -s "$0/said" ]; do sleep 0.02; done
touch -d '+1 hour' /etc/containerd/config.toml
"$@"
"""
# NVIDIA's own file as its toolkit 1.18 writes it, but with the line of the driver's root enabled.
NVIDIAS = """
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
#debug = "/var/log/nvidia-container-toolkit.log"
environment = []
#ldcache = "/etc/ld.so.cache"
ldconfig = "@/sbin/ldconfig"
load-kmods = true
#no-cgroups = false
path = "/usr/bin/nvidia-container-cli"
root = "{root}"
#user = "root:video"

[nvidia-container-runtime]
#debug = "/var/log/nvidia-container-runtime.log"
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"
"""


@dataclass(frozen=True)
class Said:
    """The doctor's result: exit status, findings that aren't ok, and all findings by name."""

    status: int
    wrong: list[str]
    found: dict[str, dict[str, str]]
    skipped: list[str]

    @property
    def verdict(self) -> tuple[int, list[str]]:
        """The exit status, and the names of the findings that aren't ok."""
        return self.status, self.wrong


@dataclass
class Machine:
    """A host with gpuhook, a configuration, and engine files that a test writes."""

    bin: Path
    folder: Path
    config: Path
    before: list[str] = field(default_factory=list)

    def words(self, *options: str) -> list[str]:
        command = [self.bin / "gpuhook"]
        argv = [*command, "doctor", "--config", self.config, *options]
        return [*APART, *self.before, *map(str, argv)]

    def text(self, *options: str, home: Path | None = None) -> Result:
        return run(self.words(*options), env={"HOME": str(home or self.folder)})

    def doctor(self, *options: str, home: Path | None = None) -> Said:
        done = self.text(*options, "--format=json", home=home)
        answer: dict[str, Any] = json.loads(done.stdout)
        findings = answer["findings"]
        wrong = [each["check"] for each in findings if each["status"] not in ("ok", "note")]
        return Said(
            done.status, wrong, {each["check"]: each for each in findings}, answer["skipped"]
        )

    def register_podman(self, path: str | Path = PODMAN) -> None:
        """Add gpu-py to podman's configuration."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(f'[engine.runtimes]\ngpu-py = ["{self.bin}/gpu-py"]\n')

    def register_containerd(self) -> None:
        runtime = 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu-py'
        text = f'version = 2\n[{runtime}]\nruntime_type = "io.containerd.runc.v2"\n'
        text += f'[{runtime}.options]\nBinaryName = "{self.bin}/gpu-py"\n'
        Path("/etc/containerd/config.toml").write_text(text)


@pytest.fixture(scope="module")
def bin_folder(workspace: Path, installation: Installation) -> Iterator[Path]:
    """The installation at a path that every user can reach, whatever folder it is in."""
    place = workspace / "doctor-order-programs"
    place.mkdir()
    run(["mount", "--bind", installation.bin.parent, place]).ok()
    yield place / "bin"
    run(["umount", place]).ok()
    place.rmdir()


@pytest.fixture
def folder(workspace: Path) -> Iterator[Path]:
    """A folder that every user may enter; at first no engine is configured for gpuhook."""
    made = workspace / "doctor-order"
    made.mkdir()
    for place in map(Path, PLACES):
        place.mkdir(parents=True, exist_ok=True)
    yield made
    for place in map(Path, PLACES):
        shutil.rmtree(place)
    shutil.rmtree(made)


@pytest.fixture
def machine(folder: Path, bin_folder: Path, driver: Driver) -> Machine:
    """A host whose only problem is that no engine knows gpu-py."""
    return Machine(bin_folder, folder, write_config(folder / "config", driver.root, ["runc"]))


def _with_driver(machine: Machine, installation: Installation, *options: str) -> Driver:
    """Give the host a separate simulated driver."""
    driver = simulate(installation, machine.folder / "driver", "--gpus=2", *options)
    machine.config = write_config(machine.folder / "own-config", driver.root, ["runc"])
    machine.register_podman()
    return driver


def test_a_healthy_machine_has_no_findings(machine: Machine) -> None:
    machine.register_podman()
    assert machine.doctor().verdict == (0, [])
    assert machine.text("--quiet").ok().stdout == ""


def test_a_broken_configuration_is_the_only_failure_and_comes_first(machine: Machine) -> None:
    machine.register_podman()
    machine.config.write_text("x = [\n")
    said = machine.doctor()
    assert said.verdict == (2, ["configuration"])
    assert next(iter(said.found)) == "configuration"
    assert {"driver-loaded", "nvml-answers", "low-level-runtime"} <= set(said.skipped)
    text = machine.text().stdout
    wrong, _, end = text.rpartition("\n\n")
    assert "failure" not in wrong.partition("\nfailure  configuration: ")[0]
    assert wrong.splitlines()[-2].startswith("failure  configuration: ")
    assert re.search(
        r"^\d+ checks skipped because .*\n\d+ ok, \d+ notes?, 0 warnings, 1 failure\n$", end
    )


def test_a_missing_driver_is_the_only_failure(machine: Machine) -> None:
    machine.register_podman()
    version = machine.folder / "none/proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("")  # gpuhook reads this one, even if the host has a driver
    machine.config = write_config(machine.folder / "none-config", machine.folder / "none", ["runc"])
    assert machine.doctor().verdict == (2, ["driver-loaded"])


def test_a_missing_driver_root_is_the_only_failure(machine: Machine) -> None:
    machine.register_podman()
    machine.config = write_config(machine.folder / "gone", machine.folder / "x", ["runc"])
    assert machine.doctor().verdict == (2, ["driver-root"])


def test_a_module_and_libraries_of_two_versions_are_a_failure(
    machine: Machine, installation: Installation
) -> None:
    _with_driver(machine, installation, "--fail=version-mismatch")
    said = machine.doctor()
    assert said.verdict == (2, ["driver-versions"])
    remedy = said.found["driver-versions"]["remedy"]
    assert remedy.startswith("Reboot, or stop all users of the GPUs and reload the module")
    assert "libcuda1" not in remedy


def test_a_lost_gpu_is_a_failure(machine: Machine, installation: Installation) -> None:
    _with_driver(machine, installation, "--lost=1")
    said = machine.doctor()
    assert said.verdict == (2, ["nvml-lost"])
    assert "GPU 1 has fallen off the bus" in said.found["nvml-lost"]["message"]


def test_missing_device_nodes_are_reported(machine: Machine, installation: Installation) -> None:
    driver = _with_driver(machine, installation)
    (driver.root / "dev/nvidia-uvm").unlink()
    assert machine.doctor().verdict == (2, ["device-uvm"])
    (driver.root / "dev/nvidia0").unlink()
    said = machine.doctor()
    assert said.verdict == (2, ["device-nodes"])
    assert "/dev/nvidia-uvm is missing; /dev/nvidia0 is missing" in str(said.found)


def test_an_engine_not_restarted_is_a_failure(machine: Machine) -> None:
    machine.register_containerd()
    assert machine.doctor().verdict == (0, [])
    machine.before = ["sh", "-c", CONTAINERD, str(machine.folder)]
    said = machine.doctor()
    assert said.verdict == (2, ["containerd-loaded"])
    assert said.found["containerd-loaded"]["remedy"] == "Run systemctl restart containerd"


def test_unused_keys_of_nvidias_configuration_are_a_note_and_typos_warn(
    machine: Machine, driver: Driver
) -> None:
    machine.register_podman()
    machine.config.write_text(NVIDIAS.format(root=driver.root))
    said = machine.doctor()
    assert said.verdict == (0, [])
    assert "nvidia-ctk.path" in said.found["configuration-unused-keys"]["message"]
    machine.config.write_text(machine.config.read_text() + 'paht = "nvidia-ctk"\n')
    said = machine.doctor()
    assert said.verdict == (1, ["configuration-keys"])
    assert "nvidia-ctk.paht" in said.found["configuration-keys"]["message"]
    assert machine.text().stdout.splitlines()[-1].endswith(", 1 warning, 0 failures")


def test_one_registered_engine_of_two_suffices(machine: Machine) -> None:
    assert machine.doctor().verdict == (1, ["engines-registered"])
    machine.register_podman()
    said = machine.doctor()
    assert said.verdict == (0, [])
    assert {"docker-unused", "containerd-unused"} <= set(said.found)


def test_doctor_checks_only_the_given_engine(machine: Machine) -> None:
    machine.register_podman()
    said = machine.doctor("--engine=docker")
    assert said.verdict == (1, ["engines-registered"])
    assert said.found["engines-registered"]["remedy"] == "Run gpuhook install --engine docker"
    assert not [name for name in said.found if name.startswith(("podman", "containerd", "crio"))]
    said = machine.doctor("--engine=podman")
    assert said.verdict == (0, [])
    assert not [name for name in said.found if name.startswith(("docker", "containerd", "crio"))]
    assert "nvml" in said.found


def test_a_configured_rootless_engine_has_no_findings(machine: Machine) -> None:
    machine.before = [*AS_STRANGER]
    home = machine.folder / "home"
    machine.register_podman(home / ".config/containers/containers.conf")
    said = machine.doctor(home=home)
    assert said.verdict == (0, [])
    assert str(home) in said.found["podman-runtime"]["message"]
    daemon_json = home / ".config/docker/daemon.json"
    daemon_json.parent.mkdir()
    runtimes = {"gpu-py": {"path": f"{machine.bin}/gpu-py"}}
    daemon_json.write_text(json.dumps({"runtimes": runtimes}))
    said = machine.doctor("--engine=docker", home=home)
    assert said.verdict == (0, [])
    assert str(daemon_json) in said.found["docker-registered"]["message"]


def test_unreadable_files_of_an_engine_are_reported_to_an_ordinary_user(machine: Machine) -> None:
    machine.before = [*AS_STRANGER]
    daemon_json = Path("/etc/docker/daemon.json")
    daemon_json.write_text("{")
    daemon_json.chmod(0o600)
    said = machine.doctor()
    assert said.verdict == (1, ["engines-registered"])
    assert said.found["engines-registered"]["message"] == (
        "Whether an engine here knows gpu-py isn't known: you may not read /etc/docker/daemon.json"
    )
    machine.register_podman()
    said = machine.doctor()
    assert said.verdict == (0, []), "who uses podman needs no Docker"
    assert str(daemon_json) in said.found["docker-unseen"]["message"]
    machine.config.chmod(0o600)
    os.chown(machine.config, 0, UID)
    assert machine.doctor().verdict == (2, ["configuration"])


def _on_terminal(machine: Machine, **environment: str) -> str:
    """Return the doctor's output on a terminal of 60 columns."""
    ours, theirs = pty.openpty()
    variables = {"PATH": os.environ["PATH"], "TERM": "xterm", "COLUMNS": "60", **environment}
    try:
        with subprocess.Popen(machine.words(), stdout=theirs, env=variables):
            os.close(theirs)
            written = b""
            try:
                while piece := os.read(ours, 1 << 16):
                    written += piece
            except OSError:
                pass  # the other end of the terminal is closed
        return written.decode()
    finally:
        os.close(ours)


def test_terminal_output_is_wrapped_and_coloured(machine: Machine) -> None:
    machine.register_podman()
    machine.config.write_text("x = [\n")
    drawn = _on_terminal(machine)
    assert "\x1b[31mfailure" in drawn
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    for line in plain.splitlines():
        assert len(line) <= 60 or len(line.split()) == 1, "a path that has no space is not broken"
    head, _, rest = plain.partition("\nfailure")[2].partition("-> ")
    assert re.fullmatch(r"  configuration:.*(\r\n {9}\S.*)+\r\n {9}", head)
    assert re.match(r"Correct it; .*\r\n {12}\S", rest)
    for forbidden in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert not re.search(r"\x1b\[3[0-9]m", _on_terminal(machine, **forbidden))
