"""gpuhook list with running containers of every engine that have a GPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from harness.bundles import CGROUP_PARENT, GpuBundle
from harness.commands import path_of, run, wait_until
from harness.docker import Docker
from harness.driver import Driver, simulate
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import MOUNT_FUSE
from harness.podman import Podman
from harness.prefork import ONE
from yardstick import of_children, yardstick

from gpuhook.base.oci.spec import ContainerState
from gpuhook.core.records import records

SLEEP = ("sleep", "1000")


def listed(installation: Installation, config: Path) -> dict[str, Any]:
    argv: list[str | Path] = [installation.command, "list", "--config", config, "--format", "json"]
    answer: dict[str, Any] = json.loads(run(argv).ok().stdout)
    return answer


# A process whose root is an overlay on a FUSE file system, which answers until a file "frozen"
# exists.
OVERLAY_ON_FUSE = """
import ctypes, os, select, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, place, kind, options):
    done = libc.mount(source, place.encode(), kind, 0, options.encode())
    assert done == 0, os.strerror(ctypes.get_errno())
fuse = os.open("/dev/fuse", os.O_RDWR)
mount(b"none", "lower", b"fuse", f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other")
server_of = os.getpid()
if os.fork() == 0:
    answers = {  # linux/fuse.h: INIT, GETATTR of a folder, STATFS, OPENDIR
        26: struct.pack("<4I2H2I2HI24x", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1, 16, 0, 0),
        3: struct.pack("<QII6Q10I", *[0] * 3, 1, *[0] * 8, 0o40755, 2, 0, 0, 0, 4096, 0),
        17: struct.pack("<5Q4I24x", 1, 1, 1, 1, 1, 4096, 255, 4096, 0),
        27: struct.pack("<QII", 1, 0, 0),
    }
    while os.getppid() == server_of:
        if os.path.exists("frozen") or not select.select([fuse], [], [], 0.05)[0]:
            time.sleep(0.05)
            continue
        what, number = struct.unpack_from("<4xIQ", os.read(fuse, 1 << 17))
        if what not in (2, 42):  # FORGET, BATCH_FORGET
            data = answers.get(what, b"")
            error = 0 if what in answers else 2 if what == 1 else 38  # LOOKUP: ENOENT, else ENOSYS
            os.write(fuse, struct.pack("<IiQ", 16 + len(data), -error, number) + data)
    os._exit(0)
os.close(fuse)
mount(b"overlay", "root", b"overlay", "lowerdir=lower,upperdir=upper,workdir=work")
os.chroot("root")
os.chdir("/")
print("ready", flush=True)
sys.stdin.read()
"""


# 500 processes in one group, which end with the shell. The shell prints their pids.
IDLE = """
trap 'kill $(jobs -p)' TERM
for _ in $(seq 500); do sleep 1000 >/dev/null & echo $!; done
wait
"""


def given(numbers: list[int]) -> dict[str, Any]:
    """Return the content of a record about the node with these numbers."""
    names = {"vendor": "nvidia", "kind": "nvidia.com/gpu", "selected": [], "nodes": {}}
    return {**names, "request": {"source": "none", "devices": []}, "devices": [numbers]}


def start(bundle: GpuBundle, *command: str, config: Path | None = None) -> None:
    """Start the bundle's container and leave it running."""
    bundle.command(*(command or SLEEP))
    bundle.detach(bundle.gpu_py, config or bundle.settings)


def users(answer: dict[str, Any]) -> dict[int, list[str]]:
    """Return the names of the containers that have each GPU, without GPUs that none has."""
    return {gpu["index"]: gpu["containers"] for gpu in answer["gpus"] if gpu["containers"]}


def test_a_container_of_a_low_level_runtime_is_listed(
    bundle: GpuBundle, installation: Installation, driver: Driver
) -> None:
    config = bundle.settings
    before = users(listed(installation, config))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,7")
    start(bundle)
    answer = listed(installation, config)
    assert len(answer["gpus"]) == len(driver.gpus)
    mine = {index: names for index, names in users(answer).items() if bundle.name in names}
    assert set(mine) == {0, 7}
    [container] = [each for each in answer["containers"] if each["name"] == bundle.name]
    assert container["command"] == "sleep"
    assert container["known_from"] == "record"
    assert Path(f"/proc/{container['pid']}/root").exists()
    assert all(bundle.name not in names for names in before.values())


@ONE
def test_a_container_without_gpus_is_not_listed(
    bundle: GpuBundle, installation: Installation
) -> None:
    start(bundle)
    answer = listed(installation, bundle.settings)
    assert bundle.name not in [each["name"] for each in answer["containers"]]


@ONE
def test_a_node_made_by_the_container_is_not_counted(
    bundle: GpuBundle, installation: Installation
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1")
    start(bundle)
    make = ("busybox", "mknod", "/tmp/nvidia5", "c", "195", "4")
    runc = "runc" if str(bundle.settings).find("/runc/") >= 0 else "crun"
    bundle.call(runc, "exec", bundle.name, *make).ok()
    answer = listed(installation, bundle.settings)
    mine = {index for index, names in users(answer).items() if bundle.name in names}
    assert mine == {1}


@ONE
def test_a_node_mounted_by_the_container_is_not_counted(
    bundle: GpuBundle, installation: Installation, driver: Driver
) -> None:
    theirs = driver.gpus[5].minor
    make = f"busybox mknod /dev/made c 195 {theirs}"
    steal = f"{make} && exec ownmount /dev/made /dev/full /mark"
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1")
    start(bundle, "sh", "-c", steal)
    mark = f"grep mounted {bundle.root}/mark"
    wait_until(lambda: bundle.call("sh", "-c", mark).status == 0, "the node is mounted")
    answer = listed(installation, bundle.settings)
    assert {index for index, names in users(answer).items() if bundle.name in names} == {1}


@pytest.mark.protects(
    "local-filesystem",
    "filesystems that other users may serve, such as FUSE, are never accessed",
    instead="return mount is not None and mount.kind not in ()",
    only="does_not_answer and runc-host and nodes",
)
@pytest.mark.parametrize("known", ["record", "nodes"])
@pytest.mark.parametrize("command", ["list", "repair"])
@ONE
def test_filesystem_that_does_not_answer_delays_no_command(
    bundle: GpuBundle,
    installation: Installation,
    driver: Driver,
    tmp_path: Path,
    known: str,
    command: str,
) -> None:
    """A container may mount a FUSE filesystem and serve it itself, or not serve it at all."""
    config = write_config(tmp_path / "etc", driver.root, [bundle.runtime])
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1")
    start(bundle, config=config)
    [record] = (tmp_path / "etc/state/containers").iterdir()
    pid = int(record.name.partition("-")[0])
    if known == "nodes":
        record.unlink()
    for place in ("/dev", "/tmp"):
        run([sys.executable, "-c", MOUNT_FUSE, str(pid), place]).ok()
    argv = {"list": ["list"], "repair": ["repair", "--all"]}[command]
    done = run([installation.command, *argv, "--config", config], timeout=300)
    assert bundle.name[:12] in done.stdout + done.stderr


@pytest.mark.protects(
    "cached-dev", "an overlay on a hung filesystem doesn't block gpuhook list", instead="pass"
)
def test_an_overlay_on_a_hung_filesystem_does_not_block_list(
    installation: Installation, driver: Driver, tmp_path: Path
) -> None:
    """The mount table shows the root of such a process as the kernel's own filesystem."""
    config = write_config(tmp_path / "etc", driver.root, ["runc"])
    for name in ("lower", "upper", "work", "root"):
        (tmp_path / name).mkdir()
    argv = ["unshare", "--mount", sys.executable, "-c", OVERLAY_ON_FUSE]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, stdin=pipe, stdout=pipe) as box:
        assert box.stdout is not None
        try:
            assert box.stdout.readline() == b"ready\n"
            (tmp_path / "frozen").touch()
            time.sleep(0.2)  # so that the FUSE server sees the file
            run([installation.command, "list", "--config", config], timeout=300).ok()
        finally:
            box.kill()


@pytest.mark.protects(
    "own-root",
    "a process with the host's root doesn't hide a container in its mount namespace",
    instead="return True",
)
def test_a_waiting_process_with_the_host_root_hides_no_container(
    installation: Installation, driver: Driver, tmp_path: Path
) -> None:
    """A shell is such a process: it has made a root folder's mounts, and waits for chroot."""
    config = write_config(tmp_path / "etc", driver.root, ["runc"])
    node = driver.path(f"/dev/nvidia{driver.gpus[4].minor}")
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    (root / "dev/gpu").touch()
    shutil.copy(path_of("busybox"), root)
    script = 'mount --bind "$0" root/dev/gpu && chroot root /busybox sleep 1000 & echo $!; wait'
    argv = ["unshare", "--mount", "sh", "-c", script, str(node)]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as box:
        assert box.stdout is not None
        pid = int(box.stdout.readline())
        try:
            command = Path(f"/proc/{pid}/comm")
            wait_until(lambda: command.read_text() == "busybox\n", "its program runs")
            assert pid in [each["pid"] for each in listed(installation, config)["containers"]]
        finally:
            os.kill(pid, signal.SIGKILL)


def test_many_containers_and_mig_devices_are_listed_quickly(
    installation: Installation, tmp_path: Path
) -> None:
    migs = [f"--mig={gpu}:{','.join(['1g.10gb'] * 7)}" for gpu in range(16)]
    made = simulate(installation, tmp_path / "driver", "--gpus=16", "--model=H100", *migs)
    config = write_config(tmp_path / "etc", made.root, ["runc"])
    before = listed(installation, config)
    node = made.path(f"/dev/nvidia{before['gpus'][0]['minor']}").stat().st_rdev
    state = tmp_path / "etc/state"
    with subprocess.Popen(["sh", "-c", IDLE], stdout=subprocess.PIPE, text=True) as idle:
        try:
            assert idle.stdout is not None
            for _ in range(500):
                pid = int(idle.stdout.readline())
                process = os.open(f"/proc/{pid}", os.O_PATH)
                numbers = [os.major(node), os.minor(node)]
                found = records.describe(ContainerState(f"idle-{pid}", pid, "", None), None, [])
                record = {**found, "given": [given(numbers)]}
                with records.RecordWriter(str(state), process, record):
                    os.close(process)
            argv: list[str | Path] = [installation.command, "list", "--config", config]
            answer = run(argv).ok().stdout
            assert answer.count("idle-") == 500
            # A container of another test may still be ending.
            table = answer.partition("\n\nWithout a record")[0]
            assert len(table.splitlines()) == 1 + 16 + 112
            took = min(of_children(lambda: run(argv, start=True).ok()) for _ in range(5))
            # Usually it is 13 yardsticks, but 34 if each container looks for each device's nodes.
            assert took < 25 * yardstick()
        finally:
            idle.terminate()


@pytest.fixture(scope="module")
def mig_driver(installation: Installation, workspace: Path) -> Driver:
    options = ("--gpus=2", "--model=H100", "--mig=0:1g.10gb,2g.20gb")
    return simulate(installation, workspace / "list-mig", *options)


@pytest.mark.parametrize(
    ("asked", "whole", "parts"), [("0:1", [], [1]), ("0:0,1", [1], [0]), ("0", [0], [])]
)
@ONE
def test_mig_devices_are_listed_with_their_containers(
    bundle: GpuBundle,
    mig_driver: Driver,
    workspace: Path,
    installation: Installation,
    asked: str,
    whole: list[int],
    parts: list[int],
) -> None:
    config = write_config(
        workspace / "list-mig-config" / bundle.name, mig_driver.root, [bundle.runtime]
    )
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES={asked}")
    start(bundle, config=config)
    answer = listed(installation, config)
    assert [index for index, names in users(answer).items() if bundle.name in names] == whole
    migs = answer["gpus"][0]["mig"]
    assert [mig["index"] for mig in migs if bundle.name in mig["containers"]] == parts


def test_a_container_of_docker_is_listed_until_it_ends(
    docker: Docker, installation: Installation, configs: dict[str, Path], driver: Driver
) -> None:
    called = f"list-{uuid.uuid4().hex[:8]}"
    words = ["run", "--detach", "--runtime=gpu-py", "-e", "NVIDIA_VISIBLE_DEVICES=3"]
    words += ["--name", called]
    name = docker.call(*words, image("debian"), *SLEEP).ok().stdout.strip()
    try:
        answer = listed(installation, configs["runc"])
        assert name in users(answer)[3]
        [container] = [each for each in answer["containers"] if each["name"] == name]
        assert (container["engine"], container["known_from"]) == ("docker", "record")
        assert container["engine_name"] == called
        argv: list[str | Path] = [installation.command, "list", "--config", configs["runc"]]

        def row() -> str:
            text = run(argv).ok().stdout.splitlines()
            return next(line for line in text if driver.gpus[3].uuid in line)

        assert f"docker:{called}" in row()
        assert docker.pid is not None
        os.kill(docker.pid, signal.SIGSTOP)
        try:
            assert f"docker:{name[:12]}" in row(), "who doesn't answer is not waited for"
        finally:
            os.kill(docker.pid, signal.SIGCONT)
    finally:
        docker.call("rm", "--force", name).ok()
    wait_until(
        lambda: name not in users(listed(installation, configs["runc"])).get(3, []),
        "the container is gone from the list",
    )


@pytest.mark.parametrize("which", ["podman_runtime", "podman_hook_crun"])
def test_a_container_of_podman_is_listed(
    which: str, request: pytest.FixtureRequest, installation: Installation, configs: dict[str, Path]
) -> None:
    podman: Podman = request.getfixturevalue(which)
    options = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    words = ["--detach", "--pids-limit=-1", f"--cgroup-parent={CGROUP_PARENT}", *options]
    called = f"list-{uuid.uuid4().hex[:8]}"
    asks = ["-e", "NVIDIA_VISIBLE_DEVICES=3", "--name", called]
    name = podman.call("run", *words, *asks, image("debian"), *SLEEP).ok().stdout.strip()
    try:
        answer = listed(installation, configs["runc"])
        assert name in users(answer)[3]
        [container] = [each for each in answer["containers"] if each["name"] == name]
        assert (container["engine"], container["known_from"]) == ("podman", "record")
        assert container["engine_name"] == called
        # Without a record, as for a device that podman itself added, conmon's arguments name
        # the bundle.
        records = configs["runc"].parent / "state/containers"
        [record] = [each for each in records.glob("[0-9]*") if name in each.read_text()]
        record.unlink()
        [container] = [
            each
            for each in listed(installation, configs["runc"])["containers"]
            if each["name"] == name
        ]
        assert (container["engine_name"], container["known_from"]) == (called, "nodes")
    finally:
        podman.call("rm", "--force", "--time=0", name).ok()


def test_files_are_listed_on_request(
    installation: Installation, configs: dict[str, Path], driver: Driver
) -> None:
    argv: list[str | Path] = [installation.command, "list", "--files", "--config", configs["runc"]]
    text = run(argv).ok().stdout
    assert f"libcuda.so.{driver.version}" in text
    assert "libcuda" not in run([word for word in argv if word != "--files"]).ok().stdout


@pytest.mark.parametrize("words", [["list"], ["list", "--format=json"], ["repair", "--all"]])
def test_a_user_without_root_is_warned_of_unlisted_containers(
    reachable: Path, configs: dict[str, Path], words: list[str]
) -> None:
    """The user is nobody, without capabilities, and has no containers on the host."""
    command: list[str | Path] = [reachable / "gpuhook"]
    argv = [*command, *words, "--config", configs["runc"]]
    plain = (
        "Without root, only your own containers are listed, and those of a Docker that you can "
        "access; run this as root for all.\n"
    )
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = run([*nobody, *argv]).ok()
    assert done.stderr == plain
    assert ("No running container with a GPU was found." in done.stdout) == ("repair" in words)
    if "repair" not in words:
        assert run(argv).ok().stderr == ""


def test_without_a_driver_list_is_refused(installation: Installation, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config", tmp_path, ["runc"])
    done = subprocess.run(
        [installation.command, "list", "--config", config], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"gpuhook: There is no NVIDIA driver")
