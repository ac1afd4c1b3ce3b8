"""systemd-nspawn machines and services, with devices from the files that gpuhook writes."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import DRIVER, GIVEN, REFUSED, REQUEST, call
from harness.commands import run, wait_until
from harness.inside import GPU_MAJOR

NAME = "box-1"
ROOT = Path("/var/lib/machines", NAME)
NSPAWN = Path(f"/etc/systemd/nspawn/{NAME}.nspawn")
DROP_IN = Path(f"/etc/systemd/system/systemd-nspawn@{NAME}.service.d/50-gpuhook.conf")
STATE = Path("/var/lib/gpuhook/nspawn.json")
THEIRS = "[Exec]\nBoot=no\nParameters=/sbin/wait\n\n[Network]\nPrivate=no\nVirtualEthernet=no"
INSTALL = ("gpuhook", "install", "--engine", "nspawn", "--machine", NAME, "-e", REQUEST)
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
WAIT = "#!/bin/sh\nexec sleep infinity\n"


@pytest.fixture(scope="module")
def root(installed: None) -> Iterator[Path]:
    """A small root filesystem with the host's own programs."""
    ROOT.mkdir(parents=True)
    for place in ("etc", "dev", "proc", "sys", "run", "tmp", "root", "var", "sbin"):
        (ROOT / place).mkdir()
    (ROOT / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    libraries = [path for path in LIBRARIES.glob("*.so*") if path.is_file()]
    run(["cp", "-a", *libraries, ROOT / "usr/lib/x86_64-linux-gnu"]).ok()
    run(["cp", "-a", "/usr/bin", ROOT / "usr"]).ok()
    run(["cp", "-a", "/usr/lib64", ROOT / "usr"]).ok()
    for name in ("bin", "lib", "lib64"):
        (ROOT / name).symlink_to(f"usr/{name}")
    (ROOT / "etc/os-release").write_text("ID=debian\n")
    (ROOT / "etc/debian_version").write_text("13\n")
    (ROOT / "etc/machine-id").write_text("")
    (ROOT / "sbin/wait").write_text(WAIT)
    (ROOT / "sbin/wait").chmod(0o755)
    yield ROOT
    shutil.rmtree(ROOT)


def leader() -> str:
    return call("machinectl", "show", NAME, "--property=Leader", "--value").strip()


def inside(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program inside the running nspawn machine: in its namespaces and its cgroup."""
    enter = ["nsenter", "--target", leader(), "--all", "--", *words]
    group = Path(f"/proc/{leader()}/cgroup").read_text()
    places = [line.split(":", 2)[1:] for line in group.splitlines()]
    tops = {"": "/sys/fs/cgroup"} | {"devices": "/sys/fs/cgroup/devices"}
    procs = [
        f"{tops[name]}{path}/cgroup.procs"
        for name, path in places
        if name in tops and Path(f"{tops[name]}{path}/cgroup.procs").exists()
    ]
    joined = " ".join(procs)
    return subprocess.run(
        ["sh", "-c", f'for file in {joined}; do echo $$ >"$file"; done; exec "$@"', "sh", *enter],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def start() -> None:
    call("systemctl", "daemon-reload")
    run(["systemctl", "reset-failed", f"systemd-nspawn@{NAME}"])  # allows any number of starts
    call("machinectl", "start", NAME)
    wait_until(lambda: run(["machinectl", "show", NAME]).status == 0, "the machine runs")


def stop() -> None:
    run(["machinectl", "terminate", NAME])
    wait_until(lambda: run(["machinectl", "show", NAME]).status != 0, "the machine is gone")


@pytest.fixture
def started(root: Path) -> Iterator[None]:
    NSPAWN.parent.mkdir(parents=True, exist_ok=True)
    NSPAWN.write_text(THEIRS)
    call(*INSTALL)
    start()
    yield
    stop()
    call("gpuhook", "uninstall", "--engine", "nspawn")
    assert NSPAWN.read_text() == THEIRS
    assert not DROP_IN.parent.exists()
    assert not STATE.exists()
    NSPAWN.unlink()


def test_an_nspawn_machine_has_only_the_requested_devices(started: None) -> None:
    done = inside("nvidia-smi", "-L")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(GIVEN)
    nodes = inside("sh", "-c", "ls /dev").stdout.split()
    assert {f"nvidia{minor}" for minor in GIVEN} <= set(nodes)
    assert not {f"nvidia{minor}" for minor in REFUSED} & set(nodes)


def test_the_nspawn_unit_allows_only_the_given_devices(started: None) -> None:
    """Simulated nodes have no driver: opening an allowed node gives ENXIO, and any other EPERM."""
    shown = call("systemctl", "show", f"systemd-nspawn@{NAME}", "--property=DeviceAllow")
    allowed = [
        word for word in shown.replace("DeviceAllow=", " ").split() if word.startswith("/dev/char/")
    ]
    assert {f"/dev/char/{GPU_MAJOR}:{minor}" for minor in GIVEN} <= set(allowed)
    assert not {f"/dev/char/{GPU_MAJOR}:{minor}" for minor in REFUSED} & set(allowed)
    for minor in GIVEN:
        said = inside("sh", "-c", f": </dev/nvidia{minor}").stderr
        assert "No such device or address" in said


def test_without_the_device_rule_a_node_cannot_be_opened(started: None) -> None:
    """Users who bind device nodes by hand get this error."""
    text = DROP_IN.read_text()
    DROP_IN.write_text("[Service]\n")
    stop()
    start()
    said = inside("sh", "-c", f": </dev/nvidia{GIVEN[0]}").stderr
    DROP_IN.write_text(text)
    assert "Operation not permitted" in said


def test_watch_rewrites_the_nspawn_file_after_a_driver_change(started: None) -> None:
    """gpuhook watch rewrites the file at each check."""
    before = NSPAWN.read_text()
    library = next((DRIVER / "usr/lib/x86_64-linux-gnu").glob("libnvidia-ml.so.*.*"))
    assert str(library) in before
    run(["systemctl", "stop", "gpuhook-watch"])
    extra = DRIVER / "dev/nvidia-uvm-tools"
    extra.rename(f"{extra}.away")
    try:
        watch = subprocess.Popen(["gpuhook", "watch", "--interval=1"], stdout=subprocess.DEVNULL)
        wait_until(lambda: "nvidia-uvm-tools" not in NSPAWN.read_text(), "the file is written")
    finally:
        watch.terminate()
        watch.wait()
        Path(f"{extra}.away").rename(extra)
        call("systemctl", "start", "gpuhook-watch")
    assert THEIRS in NSPAWN.read_text()


def test_an_nspawn_machine_runs_in_a_user_namespace(started: None) -> None:
    """machinectl starts all machines so: root inside is another user of the host."""
    assert Path(f"/proc/{leader()}/uid_map").read_text().split()[1] != "0"


def test_an_nspawn_request_for_a_missing_device_is_refused(installed: None) -> None:
    words = ["gpuhook", "install", "--engine", "nspawn", "--machine", "other"]
    assert "No device is asked for" in run(words).failed().stderr
    assert "nvidia.com/gpu=99" not in run([*words, "--device=nvidia.com/gpu=99"]).failed().stdout
    assert not Path("/etc/systemd/nspawn/other.nspawn").exists()
    assert not STATE.exists()


def test_an_nspawn_machine_started_by_hand_has_the_requested_gpus(root: Path) -> None:
    words = call("gpuhook", "nspawn-arguments", "--rootfs", root, "-e", REQUEST).splitlines()
    done = run(["systemd-nspawn", "--quiet", "--directory", root, *words, "nvidia-smi", "-L"]).ok()
    assert len(done.stdout.splitlines()) == len(GIVEN)


def test_a_service_with_its_own_root_has_the_requested_gpus(root: Path) -> None:
    lines = call("gpuhook", "unit-lines", "--rootfs", root, "-e", REQUEST).splitlines()
    assert lines[0] == "[Service]"
    settings = [word for line in lines[1:] for word in ("--property", line)]
    done = run(
        ["systemd-run", "--quiet", "--pipe", "--wait", "--property", f"RootDirectory={root}",
         "--property", "MountAPIVFS=yes", "--property", "DevicePolicy=closed", *settings,
         "nvidia-smi", "-L"]
    ).ok()  # fmt: skip
    assert len(done.stdout.splitlines()) == len(GIVEN)


def test_a_service_on_the_host_can_open_only_requested_devices(installed: None) -> None:
    lines = call("gpuhook", "unit-lines", "-e", REQUEST).splitlines()
    assert not [line for line in lines if line.startswith("Bind")]
    settings = [word for line in lines[1:] for word in ("--property", line)]
    for minor, says in ((GIVEN[0], "No such device"), (REFUSED[0], "not permitted")):
        done = run(
            ["systemd-run", "--quiet", "--pipe", "--wait", "--property", "DevicePolicy=closed",
             *settings, "sh", "-c", f": <{DRIVER}/dev/nvidia{minor}"]
        ).failed()  # fmt: skip
        assert says in done.stderr
