"""Hundreds of other users' processes, with thousands of mounts or with names like containers."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from harness.bundles import CGROUP_PARENT, Bundle, GpuBundle
from harness.commands import run
from harness.driver import Driver
from harness.installation import Installation, write_config
from harness.metrics import GIB, exporter, of_container, scrape, using
from harness.prefork import ONE
from harness.strangers import UID, process

from gpuhook.metrics.processes import sees_all_processes
from gpuhook.tools.driver_folder import place

# Makes namespaces with a mount table of 7 MB each, and processes of nobody in each. Arguments: the
# number of namespaces, the number of processes, a folder for the mounts, and a root.
SLEEPERS = f"""
import ctypes, os, signal, sys
namespaces, processes, folder, root = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
libc = ctypes.CDLL(None, use_errno=True)
long = folder + ("/" + chr(92) * 250) * 4
os.makedirs(long, exist_ok=True)
def mount(source, target, flags):
    assert libc.mount(source.encode(), target.encode(), None, flags, None) == 0, ctypes.get_errno()
def sleep():
    os.chroot(root)
    os.setresuid({UID}, {UID}, {UID})
    signal.pause()
assert libc.unshare(0x20000) == 0
mount("none", "/", 1 << 18 | 1 << 14)
for _ in range(900):
    mount(long, long, 1 << 12)
for _ in range(namespaces):
    assert libc.unshare(0x20000) == 0
    for _ in range(processes):
        if os.fork() == 0:
            libc.prctl(1, 9)
            sleep()
print("ready", flush=True)
sys.stdin.read()
os.killpg(0, 9)
"""


@contextlib.contextmanager
def sleepers(namespaces: int, processes: int, folder: Path, root: Path) -> Iterator[None]:
    argv = (sys.executable, "-c", SLEEPERS, str(namespaces), str(processes), folder, root)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == b"ready\n"
            yield
        finally:
            assert running.stdin is not None
            running.stdin.close()
            running.wait(60)


def seconds_of(argv: Sequence[str | Path]) -> tuple[float, str, str]:
    """Run a program; return its processor time and its output.

    Elapsed time would depend on how busy the host is.
    """
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(argv, timeout=120, start=True).ok()
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    return took, done.stdout, done.stderr


@pytest.fixture
def unrecorded(bundle: GpuBundle, driver: Driver, tmp_path: Path) -> Path:
    """The configuration of a container that has a GPU but no record."""
    config = write_config(tmp_path / "etc", driver.root, [bundle.runtime])
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1")
    bundle.command("sleep", "1000")
    bundle.detach(bundle.gpu_py, config)
    [record] = (tmp_path / "etc/state/containers").iterdir()
    record.unlink()
    return config


@pytest.mark.parametrize(("namespaces", "processes"), [(1, 300), (450, 1)], ids=["one", "many"])
@ONE
def test_thousands_of_mounts_do_not_delay_commands(
    bundle: Bundle,
    installation: Installation,
    unrecorded: Path,
    tmp_path: Path,
    driver: Driver,
    namespaces: int,
    processes: int,
) -> None:
    """gpuhook reports skipped containers.

    It looks at one process of each container before the hundredth process of any container.
    """
    listing = (installation.command, "list", "--config", unrecorded, "--format", "json")
    before, _, said = seconds_of(listing)
    assert said == ""
    many = namespaces > 1
    folder, root = tmp_path / "mounts", Path("/usr" if many else "/")
    with sleepers(namespaces, processes, folder, root):
        took, text, said = seconds_of(listing)
        assert took < before + 4.0
        answer = json.loads(text)
        assert bundle.name in [each["name"] for each in answer["containers"]]
        assert answer["complete"] is not many
        assert ("Containers without a record may be missing" in said) == many
        repairing = (installation.command, "repair", "--config", unrecorded, bundle.name)
        took, _, said = seconds_of(repairing)
        assert took < before + 4.0
        assert ("may be missing" in said) == many
        with exporter(unrecorded) as port:
            samples = scrape(port)
            [complete] = [each for name, _, each in samples if name == "gpuhook_metrics_complete"]
            # In a PID namespace of the tests' own, gpuhook can't see every process, so something is
            # always missing.
            assert complete == (not many and sees_all_processes())
            assert of_container(samples, bundle.name)["assigned", driver.gpus[1].uuid] == 1
        if not many:
            assert not place._is_mounted("0123456789abcdef")


# Mounts a node in its own namespace and root. It runs as nobody, in a cgroup below one that was
# delegated to nobody, and that cgroup has a name like a pod's container.
POSE = f"""
import ctypes, os, sys
root, node, cgroup, name = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
with open(cgroup + "/cgroup.procs", "w") as file:
    file.write("0")
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None) == 0
assert libc.mount(b"none", root.encode(), b"tmpfs", 0, None) == 0
os.mkdir(root + "/dev")
target = root + "/dev/node"
open(target, "w").close()
assert libc.mount(node.encode(), target.encode(), None, 1 << 12, None) == 0, ctypes.get_errno()
groups = os.open(cgroup, os.O_RDONLY)
os.chroot(root)
os.chdir("/")
os.setresuid({UID}, {UID}, {UID})
os.fchdir(groups)
os.makedirs(name)
with open(name + "/cgroup.procs", "w") as file:
    file.write("0")
os.chdir("/")
print("ready", flush=True)
sys.stdin.read()
"""


def remove(cgroup: Path) -> None:
    for path in (*sorted(cgroup.rglob("*"), reverse=True), cgroup):
        if path.is_dir():
            path.rmdir()


def test_processes_named_like_containers_are_not_counted_as_containers(
    installation: Installation, configs: dict[str, Path], driver: Driver, tmp_path: Path
) -> None:
    """These processes are one container, with the name of the cgroup that the user controls."""
    trees = [Path("/sys/fs/cgroup/devices"), Path("/sys/fs/cgroup")]
    tree = next(each for each in trees if (each / "cgroup.procs").exists())
    called = f"user@{uuid.uuid4().hex[:8]}.service"
    cgroup = Path(f"{tree}{CGROUP_PARENT}/{called}")
    cgroup.mkdir(parents=True)
    for path in (cgroup, cgroup / "cgroup.procs"):
        os.chown(path, UID, UID)
    node = driver.path(f"/dev/nvidia{driver.gpus[4].minor}")
    ids = [uuid.uuid4().hex * 2 for _ in range(3)]
    with contextlib.ExitStack() as held:
        held.callback(remove, cgroup)
        running = []
        for each in ids:
            (tmp_path / each).mkdir()
            name = f"kubepods/besteffort/pod{uuid.uuid4()}/{each}"
            argv = (sys.executable, "-c", POSE, tmp_path / each, node, cgroup, name)
            running.append(held.enter_context(process(argv)))
        config = configs["runc"]
        words = (installation.command, "list", "--config", config, "--format", "json")
        found = json.loads(run(words).ok().stdout)["containers"]
        of_his = [each for each in found if each["name"] == called]
        assert [each["engine"] for each in of_his] == [""], found
        assert not {each["name"] for each in found} & set(ids)
        with (
            exporter(config) as port,
            using(driver, driver.gpus[4].uuid, running[0].pid, 2 * GIB, 40),
            using(driver, driver.gpus[4].uuid, running[1].pid, GIB, 40),
        ):
            samples = scrape(port)
            his = of_container(samples, called)
            assert his["memory_used_bytes", driver.gpus[4].uuid] == 3 * GIB
            assert not any(of_container(samples, each) for each in ids)
