"""Devices that gpuhook attach adds to a running container, and gpuhook detach removes."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import bundles
from harness.bundles import Bundle
from harness.commands import Result, run, wait_until
from harness.containerd import Containerd
from harness.docker import Docker
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import MOUNT_FUSE, Namespace
from harness.podman import Podman
from harness.prefork import ONE, RUNTIMES

SLEEP = ("sleep", "1000")
CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
EXCLUSIVE = 'exclusive = ["nvidia.com/gpu"]\n'
# Nodes of fuse and of a clock, which can be opened here.
TABLE = """
[[gpuhook.vendors]]
name = "acme"
kind = "acme.com/npu"
variable = "ACME_VISIBLE_DEVICES"
nodes = ["/dev/acme{n}"]
"""
OPENABLE = (10, 229)


@dataclass
class Running:
    """A running container and the commands about it; ``inside`` runs a command in it."""

    name: str
    config: Path
    inside: Callable[..., Result]
    outside: Callable[..., Result]  # runs a command in the namespace of its engine
    command: Path

    def opens(self, node: str) -> str:
        """Return the result of open() in it: ENXIO is an allowed device without a driver."""
        return self.inside("devopen", node).ok().stdout.split()[1]

    def gpuhook(self, verb: str, *words: str) -> Result:
        """Run a gpuhook command."""
        return self.outside(self.command, verb, "--config", self.config, *words)

    def json(self, verb: str, *words: str) -> Any:
        """Return the JSON that a gpuhook command prints."""
        return json.loads(self.gpuhook(verb, "--format=json", *words).ok().stdout)

    def attach(self, *words: str) -> Any:
        return self.json("attach", self.name, *words)

    def detach(self, *words: str) -> Any:
        return self.json("detach", self.name, *words)

    def refused(self, verb: str, *words: str) -> str:
        """Return the error of a refused command."""
        return self.gpuhook(verb, self.name, *words).failed().stderr

    def mounts(self) -> set[str]:
        """Return the container's mount points."""
        lines = self.inside("busybox", "cat", "/proc/self/mountinfo").ok().stdout.splitlines()
        return {line.split()[4] for line in lines}


@pytest.fixture
def config(low_level: tuple[str, Namespace], driver: Driver, tmp_path: Path) -> Path:
    """A configuration with a separate state folder."""
    return write_config(tmp_path / "etc", driver.root, low_level[:1])


@pytest.fixture
def start(
    workspace: Path,
    roots: dict[str, Path],
    low_level: tuple[str, Namespace],
    installation: Installation,
    config: Path,
) -> Iterator[Callable[..., Running]]:
    """Start a container in a separate bundle, with or without gpu-py, and leave it running."""
    runtime, namespace = low_level
    started: list[Bundle] = []

    def begin(
        *settings: str,
        plain: bool = False,
        command: Sequence[str] = SLEEP,
        change: Callable[[Any], None] = lambda spec: None,
    ) -> Running:
        place = workspace / f"attach-{os.getpid()}-{len(started)}"
        made = within.enter_context(bundles.bundle(place, roots["debian"], namespace, runtime))
        made.environ(*settings)
        made.command(*command)
        made.change(change)
        made.detach(runtime if plain else installation.runtime, config)
        started.append(made)

        def inside(*argv: str) -> Result:
            return made.call(runtime, "exec", made.name, *argv)

        return Running(
            made.name, config, inside, made.call,
            installation.command,
        )  # fmt: skip

    with ExitStack() as within:
        yield begin
        for made in started:
            made.call(runtime, "kill", made.name, "KILL")
            wait_until(partial(_is_gone, made), f"{made.name} is gone")


def _is_gone(made: Bundle) -> bool:
    return made.call(made.runtime, "delete", "--force", made.name).status == 0


def node(driver: Driver, index: int) -> str:
    return f"/dev/nvidia{driver.gpus[index].minor}"


@pytest.mark.protects("attach-root", "attach uses the host's /proc, not the container's")
def test_a_further_gpu_is_attached_and_detached(
    start: Callable[..., Running], driver: Driver
) -> None:
    one = start("NVIDIA_VISIBLE_DEVICES=0,2")
    had, new, other = (node(driver, index) for index in (2, 4, 5))
    before = one.mounts()
    assert one.opens(new) == "ENOENT"
    done = one.attach("nvidia.com/gpu=4")
    uuid = driver.gpus[4].uuid
    assert done["devices"] == [{"vendor": "nvidia", "id": uuid, "label": "4"}]
    assert (done["id"], done["nodes"], done["warnings"]) == (one.name, [new], [])
    assert {one.opens(each) for each in (had, new, *CONTROL)} == {"ENXIO"}
    assert one.opens(other) == "ENOENT"
    assert one.mounts() - before == {new}
    explained = one.json("explain", one.name)["container"]
    assert (explained["attached"], explained["missing_nodes"]) == ([uuid], [])
    assert (
        f"Attached:        4 ({uuid}) of nvidia.com/gpu" in one.gpuhook("explain", one.name).stdout
    )
    listed = {each["id"]: each for each in one.json("list")["devices"]}
    assert listed[uuid]["containers"] == [one.name]
    assert "has 4 already" in one.refused("attach", "nvidia.com/gpu=4")
    assert one.detach("4")["nodes"] == [new]
    assert one.opens(new) == "ENOENT"
    assert one.mounts() == before
    one.inside("busybox", "mknod", "/dev/made", "c", "195", new.removeprefix("/dev/nvidia")).ok()
    assert one.opens("/dev/made") == "EPERM"
    assert {one.opens(each) for each in (had, *CONTROL)} == {"ENXIO"}
    assert one.json("explain", one.name)["container"]["attached"] == []
    assert "wasn't attached" in one.refused("detach", "4")
    assert "wasn't attached" in one.refused("detach", "0"), "it has that from its start"
    assert one.attach("4")["nodes"] == [new]
    assert one.opens(new) == "ENXIO"


def test_a_container_without_a_driver_gets_its_files_by_attach(
    start: Callable[..., Running], driver: Driver
) -> None:
    one = start(plain=True)
    first, second = node(driver, 4), node(driver, 5)
    before = one.mounts()
    done = one.attach("nvidia.com/gpu=4")
    assert {*done["nodes"]} == {first, *CONTROL}
    assert one.inside("nvidia-smi", "-L").ok().stdout.count("UUID") == 1
    assert one.attach("nvidia.com/gpu=5")["nodes"] == [second]
    assert one.inside("nvidia-smi", "-L").ok().stdout.count("UUID") == 2
    assert one.detach("4")["nodes"] == [first]
    assert {one.opens(each) for each in (second, *CONTROL)} == {"ENXIO"}
    assert {*one.detach("5")["nodes"]} == {second, *CONTROL}
    assert {one.opens(each) for each in (first, second, *CONTROL)} == {"ENOENT"}
    assert not {each for each in one.mounts() - before if each.startswith("/dev/")}
    listed = one.json("list")
    assert one.name not in [each["id"] for each in listed["containers"]]


def test_repair_restores_lost_access_to_an_attached_device(
    start: Callable[..., Running], driver: Driver
) -> None:
    """systemctl daemon-reload and docker update remove the access."""
    from test_repair import LOSE, LOSE_RULES  # noqa: PLC0415

    one = start(plain=True)
    new = node(driver, 4)
    one.inside("busybox", "mknod", "/made", "c", "195", new.removeprefix("/dev/nvidia")).ok()
    one.attach("4")
    pid = one.json("explain", one.name)["container"]["pid"]
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    groups = dict(line.split(":", 2)[1:] for line in lines)
    v1 = [path for names, path in groups.items() if "devices" in names.split(",")]
    script, group = (LOSE_RULES, v1[0]) if v1 and _has_v1(one) else (LOSE["v2"], groups[""])
    one.outside("sh", "-ec", script, "sh", group).ok()
    assert one.opens(new) == "EPERM"
    assert new in one.gpuhook("repair", one.name).ok().stdout
    assert one.opens(new) == "ENXIO"
    one.detach("4")
    assert one.gpuhook("repair", "--all").status in (0, 1)
    assert one.opens("/made") == "EPERM"


def _has_v1(one: Running) -> bool:
    return one.outside("test", "-d", "/sys/fs/cgroup/devices").status == 0


@pytest.mark.protects("attach-lease", "an exclusive device is not attached to a second container")
def test_attaching_an_exclusive_device_in_use_is_refused(
    start: Callable[..., Running], config: Path
) -> None:
    config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{EXCLUSIVE}"))
    holder, one = start("NVIDIA_VISIBLE_DEVICES=0"), start(plain=True)
    assert f"in use by the container {holder.name}" in one.refused("attach", "0", "1")
    one.attach("1")
    assert f"in use by the container {one.name}" in holder.refused("attach", "1")
    one.detach("1")
    holder.attach("1")


@ONE
@pytest.mark.protects("attach-pod", "no device is attached to a pod's container")
def test_attaching_to_a_container_of_a_pod_is_refused(start: Callable[..., Running]) -> None:
    annotations = {"io.container.manager": "cri-o"}
    one = start(plain=True, change=lambda spec: spec.update(annotations=annotations))
    for verb in ("attach", "detach"):
        assert "is in a pod, whose devices the kubelet allocates" in one.refused(verb, "0")


@pytest.fixture
def openable(config: Path, workspace: Path, tmp_path: Path) -> Iterator[Path]:
    """A node of a declared vendor that can be opened without a driver."""
    root = workspace / f"openable-{tmp_path.name}"
    (root / "dev").mkdir(parents=True)
    os.mknod(root / "dev/acme0", 0o020666, os.makedev(*OPENABLE))
    (root / "dev/acme0").chmod(0o666)
    roots = f'driver-roots = ["acme={root}"]\n'
    text = config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{roots}")
    config.write_text(text + TABLE)
    yield root
    run(["rm", "-rf", root]).ok()


@pytest.mark.protects("detach-in-use", "a device that is open isn't detached")
def test_detaching_an_open_device_is_refused_unless_forced(
    start: Callable[..., Running], openable: Path, config: Path
) -> None:
    hold = (
        'until [ -e /hold ]; do sleep 0.1; done; exec 3<"/dev/acme0"; echo >/held; exec sleep 999'
    )
    one = start(plain=True, command=("busybox", "sh", "-c", hold))
    one.attach("acme.com/npu=0")
    one.inside("busybox", "touch", "/hold").ok()
    wait_until(lambda: one.inside("test", "-e", "/held").status == 0, "the node is open")
    said = one.refused("detach", "acme.com/npu=0")
    assert "in use by process" in said
    assert "--force" in said
    assert one.opens("/dev/acme0") == "OK"
    exclusive = 'exclusive = ["acme.com/npu"]\n'
    text = config.read_text()
    config.write_text(text.replace("[gpuhook]\n", f"[gpuhook]\n{exclusive}"))
    assert "in use by process" in one.refused("detach", "--force", "acme.com/npu=0")
    config.write_text(text)
    done = one.detach("--force", "acme.com/npu=0")
    assert [each.endswith("keeps /dev/acme0 open") for each in done["warnings"]] == [True]
    assert one.opens("/dev/acme0") == "ENOENT"


# Ends gpuhook as soon as one of its functions has returned.
KILLED = """
import os, signal, sys
from gpuhook.monitor.containers import live
from gpuhook.monitor.containers.target import AttachTarget
from gpuhook.tools.cli import cli

place, name = {"live": live, "target": AttachTarget}[sys.argv[1]], sys.argv[2]
function = getattr(place, name)

def killed(*args):
    function(*args)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(place, name, killed)
cli(sys.argv[3:])
"""


@RUNTIMES
@pytest.mark.protects(
    "attach-killed", "detach removes the device nodes of an attach that was killed",
    instead="places: list[str] = []", only="attach-live-mount and runc",
)  # fmt: skip
@pytest.mark.parametrize(
    ("verb", "where", "step"),
    [
        ("attach", "target", "change"),
        ("attach", "target", "allow"),
        ("attach", "live", "mount"),
        ("detach", "target", "deny"),
        ("detach", "live", "unmount"),
    ],
)
def test_a_killed_attach_or_detach_can_be_repaired_and_undone(
    start: Callable[..., Running], driver: Driver, verb: str, where: str, step: str
) -> None:
    """repair restores the recorded devices, detach removes them all, and new changes work."""
    one = start(plain=True)
    new = node(driver, 4)
    if verb == "detach":
        one.attach("4")
    words = (where, step, verb, "--config", one.config, one.name, "4")
    assert one.outside(sys.executable, "-c", KILLED, *words).status != 0
    assert one.json("explain", one.name)["container"]["attached"] == [driver.gpus[4].uuid]
    one.gpuhook("repair", one.name).ok()
    one.inside("busybox", "mknod", "/made", "c", "195", new.removeprefix("/dev/nvidia")).ok()
    assert one.opens("/made") == "ENXIO"
    one.detach("4")
    assert one.opens("/made") == "EPERM"
    assert not {new, *CONTROL} & one.mounts()
    assert one.name not in [each["id"] for each in one.json("list")["containers"]]
    assert {*one.attach("4")["nodes"]} == {new, *CONTROL}
    assert one.opens(new) == "ENXIO"


@ONE
def test_concurrent_changes_keep_control_nodes_while_a_device_remains(
    start: Callable[..., Running], driver: Driver
) -> None:
    """Control nodes stay as long as any of the devices."""
    one, other = start(plain=True), start("NVIDIA_VISIBLE_DEVICES=0")

    def change(words: tuple[str, str, str]) -> None:
        verb, name, device = words
        one.gpuhook(verb, name, device).ok()

    def at_once(*changes: tuple[str, str, str]) -> None:
        with ThreadPoolExecutor(len(changes)) as pool:
            list(pool.map(change, changes))

    at_once(*(("attach", one.name, f"{n}") for n in (3, 4, 5)), ("attach", other.name, "3"))
    at_once(
        *(("detach", one.name, f"{n}") for n in (3, 4, 5)),
        *(("attach", one.name, f"{n}") for n in (6, 7)),
        ("detach", other.name, "3"),
    )
    given = {node(driver, 6), node(driver, 7), *CONTROL}
    assert {each: one.opens(each) for each in given} == dict.fromkeys(given, "ENXIO")
    assert {one.opens(node(driver, n)) for n in (3, 4, 5)} == {"ENOENT"}
    assert {other.opens(each) for each in (node(driver, 0), *CONTROL)} == {"ENXIO"}
    at_once(("detach", one.name, "6"), ("detach", one.name, "7"))
    assert not given & one.mounts()


@ONE
def test_devices_are_attached_in_a_user_namespace(
    start: Callable[..., Running], driver: Driver
) -> None:
    from test_user_namespaces import into_user_namespace  # noqa: PLC0415

    one = start(plain=True, change=into_user_namespace)
    new = node(driver, 4)
    assert {*one.attach("4")["nodes"]} == {new, *CONTROL}
    assert {one.opens(each) for each in (new, *CONTROL)} == {"ENXIO"}
    assert one.inside("nvidia-smi", "-L").ok().stdout.count("UUID") == 1
    assert {*one.detach("4")["nodes"]} == {new, *CONTROL}
    assert one.opens(new) == "ENOENT"


@ONE
@pytest.mark.parametrize("leads", ["/", "../../../../../../../../"])
def test_a_folder_link_out_of_the_container_is_not_followed(
    start: Callable[..., Running], workspace: Path, tmp_path: Path, leads: str
) -> None:
    """The driver's programs are mounted at the link's target below the container's root."""
    victim = workspace / f"victim-{tmp_path.name}"
    victim.mkdir()
    one = start(plain=True)
    away = "/busybox mv /usr/bin /usr/away && /busybox ln -s"
    script = f"busybox cp /bin/busybox / && {away} {leads}{str(victim)[1:]} /usr/bin"
    one.inside("busybox", "sh", "-c", script).ok()
    one.attach("4")
    assert [*victim.iterdir()] == []
    assert str(victim) not in Path("/proc/self/mountinfo").read_text()
    mounts = one.inside("/busybox", "cat", "/proc/self/mountinfo").ok().stdout
    assert f" {victim}/nvidia-smi " in mounts
    one.detach("4")
    victim.rmdir()


@ONE
def test_a_link_at_a_device_node_is_not_followed_out_of_the_container(
    start: Callable[..., Running], driver: Driver, workspace: Path
) -> None:
    victim = workspace / "victim"
    victim.write_text("")
    one = start(plain=True)
    one.inside("busybox", "ln", "-s", str(victim), node(driver, 4)).ok()
    failed = one.gpuhook("attach", one.name, "4")
    assert victim.read_bytes() == b""
    assert str(victim) not in Path("/proc/self/mountinfo").read_text()
    if failed.status == 0:  # gpuhook mounts it where the link leads inside the container
        assert one.opens(node(driver, 4)) == "ENXIO"


@ONE
@pytest.mark.protects(
    "attach-all-or-nothing", "a failed attach leaves the container no device access"
)
@pytest.mark.protects(
    "attach-in-time",
    "a filesystem that never responds delays attach only by seconds",
    instead="os.waitpid(child, 0)",
    also=("attach-ends", "pass"),
)
def test_a_hung_filesystem_is_refused_after_a_timeout(
    start: Callable[..., Running], driver: Driver
) -> None:
    one = start("NVIDIA_VISIBLE_DEVICES=0")
    pid = one.json("explain", one.name)["container"]["pid"]
    one.outside(sys.executable, "-c", MOUNT_FUSE, str(pid), "/etc/OpenCL").ok()
    assert "didn't respond within 30 seconds" in one.refused("attach", "4")
    assert one.json("explain", one.name)["container"]["attached"] == []
    one.inside("busybox", "mknod", "/made", "c", "195", str(driver.gpus[4].minor)).ok()
    assert one.opens("/made") == "EPERM"


@ONE
def test_a_read_only_container_gets_nodes_only_if_it_has_the_driver(
    start: Callable[..., Running], driver: Driver
) -> None:
    def read_only(spec: Any) -> None:
        spec["root"]["readonly"] = True

    one = start("NVIDIA_VISIBLE_DEVICES=none", change=read_only)
    assert one.attach("4")["nodes"] == [node(driver, 4)]
    assert one.opens(node(driver, 4)) == "ENXIO"
    assert one.inside("busybox", "touch", "/made").status != 0
    one.detach("4")
    assert one.opens(node(driver, 4)) == "ENOENT"
    bare = start(plain=True, change=read_only)
    assert "Read-only file system" in bare.refused("attach", "4")
    assert bare.opens(node(driver, 4)) == "ENOENT"


@ONE
def test_invalid_attach_requests_are_refused(start: Callable[..., Running]) -> None:
    one = start(plain=True)
    assert "has no GPU or MIG device '99'" in one.refused("attach", "99")
    assert "It is unclear which device 'foo.com/bar=1' is" in one.refused("attach", "foo.com/bar=1")
    assert "It is unclear which device" in one.refused("attach", "nvidia.com/gpu=")
    assert one.gpuhook("attach", one.name).status == 2
    failed = one.gpuhook("attach", "no-such-container", "0").failed()
    assert "isn't a running container" in failed.stderr


Engine = Docker | Containerd | Podman


@pytest.fixture(
    params=["docker", "docker_v2", "containerd_runc", "containerd_crun", "podman_runtime"]
)
def plain(
    request: pytest.FixtureRequest, installation: Installation, configs: dict[str, Path]
) -> Iterator[Running]:
    """A container of each engine, started without a request for devices."""
    engine: Engine = request.getfixturevalue(request.param)
    name, words = f"plain-{os.getpid()}", ["run", "--detach"]
    inside: tuple[str, ...] = ("exec",)
    remove: tuple[tuple[str, ...], ...] = (("rm", "--force", name),)
    outside: Callable[..., Result]
    if isinstance(engine, Containerd):
        words += [f"--runc-binary={engine.binary}", "--log-uri=file:///dev/null"]
        engine.call(*words, image("debian"), name, *SLEEP).ok()
        inside, outside = ("tasks", "exec", "--exec-id=look"), engine.space.run
        remove = (
            ("tasks", "kill", "--signal=KILL", name),
            ("tasks", "rm", "-f", name),
            ("container", "rm", name),
        )
    else:
        if isinstance(engine, Podman):
            words += ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
            words += ["--pids-limit=0", f"--cgroup-parent={bundles.CGROUP_PARENT}"]
        engine.call(*words, f"--name={name}", image("debian"), *SLEEP).ok()
        outside = engine.namespace.run
    if isinstance(engine, Docker):
        enter = ("nsenter", "-t", str(engine.pid), "-m", "--wdns=/")
        outside = lambda *words: run([*enter, *words])  # noqa: E731
    config = configs["crun" if request.param == "containerd_crun" else "runc"]

    def printed(*argv: str) -> Result:
        """Run a command that prints something; repeat it, because ctr may exit before it prints."""
        done = engine.call(*inside, name, *argv)
        for _ in range(9):
            if done.stdout or done.status != 0:
                break
            done = engine.call(*inside, name, *argv)
        return done

    yield Running(name, config, printed, outside, installation.command)
    for each in remove:
        engine.call(*each)


def test_devices_are_attached_and_detached_with_every_engine(
    plain: Running, driver: Driver
) -> None:
    new = node(driver, 4)
    done = plain.attach("nvidia.com/gpu=4")
    assert {*done["nodes"]} == {new, *CONTROL}
    assert plain.inside("nvidia-smi", "-L").ok().stdout.count("UUID") == 1
    assert {plain.opens(each) for each in (new, *CONTROL)} == {"ENXIO"}
    holders = {each["id"]: each["containers"] for each in plain.json("list")["devices"]}
    assert done["id"] in holders[driver.gpus[4].uuid]
    assert {*plain.detach("4")["nodes"]} == {new, *CONTROL}
    assert plain.opens(new) == "ENOENT"
