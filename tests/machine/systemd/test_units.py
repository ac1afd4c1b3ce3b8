"""The package's units under their own hardening: each does its work, and none restricts devices."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from booted import ALLOWED, BUSYBOX, GIVEN, REFUSED, REQUEST, call, set_config
from harness.commands import run, wait_until
from harness.cri import Cri, CriError
from harness.images import REPOSITORY
from harness.prefork import NAMES, steps
from pod_resources import PodResources

UNITS = sorted(path.name for path in (REPOSITORY / "packaging/systemd").glob("*.service"))
CONTAINERD = Path("/etc/containerd/config.toml")
NRI = """
version = 2
[plugins."io.containerd.nri.v1.nri"]
disable = false
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/hold:test"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "/usr/local/sbin/runc-unlimited"
"""
# The machine's cgroups have no controllers, so runc can't set the limits that a CRI always has.
RUNC = """#!/usr/bin/python3
import json, os, sys
if "--bundle" in sys.argv:
    path = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    spec = json.load(open(path))
    resources = spec["linux"]["resources"]
    spec["linux"]["resources"] = {"devices": resources.get("devices", [])}
    json.dump(spec, open(path, "w"))
os.execvp("runc", ["runc", *sys.argv[1:]])
"""
SOCKET = Path("/run/containerd/containerd.sock")
POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")  # the kubelet's usual path


@contextmanager
def started(unit: str) -> Iterator[None]:
    call("systemctl", "start", unit)
    try:
        yield
    finally:
        call("systemctl", "stop", unit)
        run(["systemctl", "reset-failed", unit])


def journal(unit: str) -> str:
    """Return the messages of a unit's last run."""
    number = call("systemctl", "show", "--property=InvocationID", "--value", unit).strip()
    call("journalctl", "--sync")
    return call("journalctl", "--quiet", "--output=cat", f"_SYSTEMD_INVOCATION_ID={number}")


def property_of(unit: str, name: str) -> str:
    return call("systemctl", "show", f"--property={name}", "--value", unit).strip()


@pytest.mark.parametrize("unit", UNITS)
def test_no_unit_restricts_devices(unit: str, installed: None) -> None:
    """Some hardening settings restrict devices as a side effect, also devices added later."""
    assert property_of(unit, "DevicePolicy") == "auto"
    assert property_of(unit, "DeviceAllow") == ""


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_every_setting_of_the_units(unit: str, installed: None) -> None:
    done = run(["systemd-analyze", "verify", f"/usr/lib/systemd/system/{unit}"])
    assert [line for line in done.stderr.splitlines() if unit in line] == []


def test_a_container_start_is_served_by_the_watch_unit(docker: tuple[str]) -> None:
    """The prefork server of the unit, under its hardening, prepares a container."""
    call("systemctl", "restart", "gpuhook-watch")  # else it may notice the driver a minute later
    words = [*docker, "run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    words += [BUSYBOX, "devopen", *(f"/dev/nvidia{minor}" for minor in GIVEN)]

    def is_served() -> bool:
        before = servers()
        assert call(*words).split()[1::2] == [ALLOWED] * len(GIVEN)
        return any(count > before.get(pid, count) for pid, count in servers().items())

    wait_until(is_served, "a container is served")


def servers() -> dict[int, int]:
    """Return the progress of each prefork server that the unit started."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_server = (entry / "comm").read_bytes() in NAMES
            if is_server and "gpuhook-watch.service" in (entry / "cgroup").read_text():
                found[int(entry.name)] = steps(int(entry.name))
    return found


def test_a_reload_of_the_metrics_unit_releases_the_driver(installed: None) -> None:
    with started("gpuhook-metrics.service"):
        script = "import urllib.request as r; r.urlopen('http://127.0.0.1:9836/metrics').read()"
        wait_until(lambda: run(["python3", "-c", script]).status == 0, "metrics are served")
        first = int(property_of("gpuhook-metrics.service", "MainPID"))
        folder = Path(f"/proc/{first}/task/{first}/children")

        def children() -> set[str]:
            pids = folder.read_text().split()
            return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}

        wait_until(lambda: children() == {"gpuhook-http", "gpuhook-nvml"}, "both are there")
        call("systemctl", "reload", "gpuhook-metrics.service")
        wait_until(lambda: children() == {"gpuhook-http"}, "the driver is let go")
        assert int(property_of("gpuhook-metrics.service", "MainPID")) == first


def test_the_mps_unit_shares_and_releases_the_gpu(installed: None) -> None:
    set_config("gpuhook.mps.devices=0")
    try:
        with started("gpuhook-mps.service"):
            assert property_of("gpuhook-mps.service", "ActiveState") == "active"
            call("gpuhook", "mps", "status")
            assert os.path.ismount("/run/gpuhook/mps/shm") or "3" in journal("gpuhook-mps.service")
        assert not Path("/run/gpuhook/mps.json").exists()
        assert not os.path.ismount("/run/gpuhook/mps/shm")
    finally:
        set_config("gpuhook.mps.devices=")


@pytest.fixture
def nri(docker: tuple[str]) -> Iterator[None]:
    """Debian's containerd with NRI enabled."""
    before = CONTAINERD.read_text() if CONTAINERD.exists() else None
    CONTAINERD.parent.mkdir(exist_ok=True)
    CONTAINERD.write_text(NRI)
    call("systemctl", "reset-failed", "containerd")
    call("systemctl", "restart", "containerd")
    yield
    if before is None:
        CONTAINERD.unlink()
    else:
        CONTAINERD.write_text(before)
    call("systemctl", "reset-failed", "containerd")
    call("systemctl", "restart", "containerd")


def test_the_nri_unit_serves_containerd(nri: None) -> None:
    if not Path("/var/run/nri/nri.sock").exists():
        pytest.skip("Debian 12's containerd has no plugins")
    with started("gpuhook-nri.service"):
        wait_until(lambda: "Serves containerd" in journal("gpuhook-nri.service"), "it serves")


def load_images(folder: Path) -> None:
    """Import the tests' images, and one for pod sandboxes, into containerd's CRI."""
    call("docker", "create", "--name=hold", BUSYBOX)
    call("docker", "commit", '--change=CMD ["sleep", "infinity"]', "hold", "localhost/hold:test")
    call("docker", "rm", "hold")
    call("docker", "save", "--output", folder / "images.tar", "localhost/hold:test", BUSYBOX)
    call("ctr", "--namespace=k8s.io", "images", "import", folder / "images.tar")


def test_the_nri_unit_gives_only_devices_the_kubelet_allocated(nri: None, tmp_path: Path) -> None:
    """The children that parse messages and ask the kubelet work under the unit's hardening."""
    if not Path("/var/run/nri/nri.sock").exists():
        pytest.skip("Debian 12's containerd has no plugins")
    runc = Path("/usr/local/sbin/runc-unlimited")
    runc.write_text(RUNC)
    runc.chmod(0o755)
    load_images(tmp_path)
    gpus = json.loads(call("gpuhook", "info", "--format=json"))["gpus"]
    uuids = tuple(gpu["uuid"] for gpu in gpus if gpu["minor"] in GIVEN)
    given = ("default", "pod", "main", "nvidia.com/gpu", uuids)
    POD_RESOURCES.parent.mkdir(parents=True, exist_ok=True)
    opened = ("devopen", *(f"/dev/nvidia{minor}" for minor in GIVEN))
    unit = "gpuhook-nri.service"
    cri = Cri(SOCKET)
    try:
        with PodResources(POD_RESOURCES, given), started(unit):
            wait_until(lambda: "Serves containerd" in journal(unit), "it serves")
            with cri.pod("") as pod:
                own = pod.start(BUSYBOX, "sleep", "1000", env=[REQUEST])
                assert own.exec(*opened).ok().stdout.split()[1::2] == [ALLOWED] * len(GIVEN)
            others = ",".join(map(str, REFUSED))
            words = "the kubelet hasn't allocated"
            with cri.pod("") as pod, pytest.raises(CriError, match=words):
                pod.start(BUSYBOX, "sleep", "1000", env=[f"NVIDIA_VISIBLE_DEVICES={others}"])
            main = int(property_of(unit, "MainPID"))
            pids = Path(f"/proc/{main}/task/{main}/children").read_text().split()
            names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
            assert names >= {"gpuhook-kubelet", "gpuhook-parser"}
            assert os.readlink(f"/proc/{main}/ns/net") != os.readlink("/proc/self/ns/net")
    finally:
        cri.close()
