"""gpuhook repair, which restores exactly the devices that a running container has lost."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.bundles import Bundle
from harness.commands import Result, run, wait_until
from harness.docker import Docker
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace, host_cgroups
from harness.prefork import ONE

# The effect of systemctl daemon-reload and docker update: the device rules are written again.
LOSE = {
    "v1": """
echo a >"/sys/fs/cgroup/devices$1/devices.deny"
""",
    "v2": f"""
exec {sys.executable} -c '
import os, sys
from gpuhook.base.cgroup import bpf, device_program as code
cgroup = os.open("/sys/fs/cgroup" + sys.argv[1], os.O_RDONLY)
denied = code.instruction(code.SET_32, 0, imm=0) + code.instruction(code.EXIT)
new = bpf.load_program(denied, False, "test")
for number in bpf.attached_programs(cgroup, "test")[1]:
    bpf.attach_program(cgroup, new, 2, bpf.open_program(number, "test"), "test")
' "$1"
""",
}


# The same for a cgroup with child cgroups: the kernel changes their lists as well, and doesn't
# accept "a" (all devices).
LOSE_RULES = """
cd "/sys/fs/cgroup/devices$1"
for minor in 0 1 2 3 4 5 6 7 255; do echo "c 195:$minor rw" >devices.deny; done
"""

SLEEP = ("sleep", "1000")


class Running:
    """A running container, and the command line that repairs it."""

    def __init__(self, bundle: Bundle, runtime: str, command: Path, config: str) -> None:
        self.bundle = bundle
        self._runtime = runtime
        self._command = command
        self._config = config

    def opens(self, node: str) -> str:
        """Return the result of open() inside the container.

        ENXIO stands for an allowed device without a driver.
        """
        done = self.bundle.call(self._runtime, "exec", self.bundle.name, "devopen", node).ok()
        return done.stdout.split()[1]

    @property
    def cgroup(self) -> str:
        """Return the folder of the container's cgroup."""
        v2 = self.bundle.namespace.cgroups == "v2"
        path = self.bundle.spec()["linux"]["cgroupsPath"]
        return f"/sys/fs/cgroup{'' if v2 else '/devices'}{path}"

    def move_into(self, name: str) -> None:
        """Move the container's processes into a cgroup below its own."""
        script = 'mkdir "$1/$2"; for pid in $(cat "$1/cgroup.procs"); do echo $pid; done'
        words = ("sh", "-ec", script, "sh", self.cgroup, name)
        for pid in self.bundle.call(*words).ok().stdout.split():
            self.bundle.call("sh", "-ec", f"echo {pid} >{self.cgroup}/{name}/cgroup.procs").ok()

    def allows(self, node: Path, below: str = "") -> str:
        """Return the result of open() on a node of the host, in the container's cgroup or below."""
        program = self.bundle.root / "usr/local/bin/devopen"
        script = f"echo $$ >{self.cgroup}{below}/cgroup.procs && exec {program} {node}"
        return self.bundle.call("sh", "-c", script).ok().stdout.split()[1]

    def make_node(self, minor: int) -> str:
        """Make a node in the container for a GPU that isn't allocated to it."""
        node = f"/dev/made-{minor}"
        words = ("busybox", "mknod", node, "c", "195", str(minor))
        self.bundle.call(self._runtime, "exec", self.bundle.name, *words).ok()
        return node

    def lose(self, script: str = "", below: str = "") -> None:
        """Remove the access to the container's devices; with cgroup v1, by ``script`` if given."""
        layout = "v2" if self.bundle.namespace.cgroups == "v2" else "v1"
        cgroup = self.bundle.spec()["linux"]["cgroupsPath"]
        chosen = script if script and layout == "v1" else LOSE[layout]
        self.bundle.call("sh", "-ec", chosen, "sh", cgroup + below).ok()

    def explained(self) -> list[str]:
        """Return the nodes that gpuhook explain reports as lost by the container."""
        words = ("explain", "--config", self._config, "--format=json", self.bundle.name)
        found = json.loads(self.bundle.call(self._command, *words).ok().stdout)
        missing: list[str] = found["container"]["missing_nodes"]
        return missing

    def repair(self, *words: str) -> Result:
        """Run gpuhook repair."""
        return self.bundle.call(self._command, "repair", "--config", self._config, *words)


@pytest.fixture
def started(bundle: Bundle, installation: Installation) -> Iterator[Callable[..., Running]]:
    """A function that starts the bundle's container with a configuration and leaves it running."""
    runtime = bundle.runtime

    def start(config: Path, *command: str) -> Running:
        bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
        bundle.command(*(command or SLEEP))
        create = f"exec {installation.runtime} create --bundle {bundle.path} {bundle.name}"
        env = {"GPUHOOK_CONFIG": str(config)}
        assert bundle.call("sh", "-c", f"{create} >log 2>&1", env=env).status == 0
        bundle.call(runtime, "start", bundle.name).ok()
        return Running(bundle, runtime, installation.command, str(config))

    yield start
    bundle.call(runtime, "kill", bundle.name, "KILL")
    wait_until(
        lambda: _status(bundle, runtime) == "stopped", f"the container {bundle.name} stopped"
    )


@pytest.fixture
def running(
    started: Callable[..., Running], low_level: tuple[str, Namespace], configs: dict[str, Path]
) -> Running:
    return started(configs[low_level[0]])


def _status(bundle: Bundle, runtime: str) -> str:
    state: dict[str, str] = json.loads(bundle.call(runtime, "state", bundle.name).ok().stdout)
    return state["status"]


def test_repair_restores_exactly_the_lost_devices(running: Running, driver: Driver) -> None:
    given = [f"/dev/nvidia{gpu.minor}" for gpu in driver.chosen(0, 2)] + ["/dev/nvidiactl"]
    foreign = running.make_node(driver.gpus[5].minor)
    assert {running.opens(node) for node in given} == {"ENXIO"}
    name = running.bundle.name
    for word in (name, name[:-2], "--all"):
        running.lose()
        assert {running.opens(node) for node in given} == {"EPERM"}
        if word == name:
            assert {*given} <= {*running.explained()}
        done = running.repair(word)
        # Other containers of this machine may not be gpuhook's to repair, so --all may fail there.
        assert done.status == 0 or word == "--all", done
        [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{name}: ")]
        assert line.startswith(f"{name}: access to /dev/nvidia")
        assert line.endswith("was missing and is given back")
        assert {node for node in given if node in line} == {*given}
        assert {running.opens(node) for node in given} == {"ENXIO"}
        assert running.opens(foreign) == "EPERM", "a node that the container made counted"
    assert running.repair(name).ok().stdout == f"{name}: nothing was missing\n"
    assert running.explained() == []
    running.lose()
    for lost in ({*given}, set()):
        [one] = json.loads(running.repair("--format=json", name).ok().stdout)["containers"]
        assert (one["id"], one["error"], lost - {*one["restored_nodes"]}) == (name, None, set())
        assert bool(one["restored_nodes"]) is bool(lost)


def test_access_is_restored_in_a_cgroup_below_the_containers(
    running: Running, driver: Driver
) -> None:
    """With cgroup v1, a cgroup below the container's has its own list of allowed devices."""
    node = driver.root / f"dev/nvidia{driver.gpus[0].minor}"
    running.move_into("below")
    running.lose(LOSE_RULES)
    assert running.allows(node, "/below") == "EPERM"
    line = running.repair(running.bundle.name).ok().stdout
    assert f"/dev/nvidia{driver.gpus[0].minor}" in line
    assert line.endswith("was missing and is given back\n")
    assert running.allows(node, "/below") == "ENXIO"
    again = running.repair(running.bundle.name).ok().stdout
    assert again == f"{running.bundle.name}: nothing was missing\n"
    if running.bundle.namespace.cgroups != "v2":
        running.lose(LOSE_RULES, "/below")
        assert running.allows(node, "/below") == "EPERM"
        assert "is given back" in running.repair(running.bundle.name).ok().stdout
        assert running.allows(node, "/below") == "ENXIO"


def test_without_a_loss_repair_reports_nothing_missing(running: Running) -> None:
    """The low-level runtime already allows the devices, by the rules that gpu-py wrote."""
    name = running.bundle.name
    assert running.repair(name).ok().stdout == f"{name}: nothing was missing\n"


@pytest.mark.protects(
    "repair-record",
    "repair allows only devices that the container's record names",
    instead="return sorted(present)",
    only="itself and runc-host",
)
def test_a_node_mounted_by_the_container_itself_is_not_given(
    started: Callable[..., Running],
    low_level: tuple[str, Namespace],
    configs: dict[str, Path],
    driver: Driver,
) -> None:
    """In its own user namespace, the first process mounts a node of another tenant's GPU."""
    theirs = driver.gpus[5].minor
    make = f"busybox mknod /dev/made c 195 {theirs}"
    steal = f"{make} && exec ownmount /dev/made /dev/full /mark"
    victim = started(configs[low_level[0]], "sh", "-c", steal)
    mark = f"grep mounted {victim.bundle.root}/mark"
    wait_until(lambda: victim.bundle.call("sh", "-c", mark).status == 0, "the node is mounted")
    mine = f"/dev/nvidia{driver.gpus[0].minor}"
    victim.lose()
    victim.repair("--all")
    victim.repair(victim.bundle.name).ok()
    assert victim.allows(driver.path(mine)) == "ENXIO"
    assert victim.allows(driver.path(f"/dev/nvidia{theirs}")) == "EPERM"


@pytest.mark.protects(
    "spec-allows",
    "a container without a record is repaired only with devices that its config.json allows",
    instead="return sorted(devices if access.allowed or rules else ())",
    only="mode_spec and runc-host",
)
def test_mode_spec_is_repaired_from_config_json(
    started: Callable[..., Running],
    low_level: tuple[str, Namespace],
    driver: Driver,
    tmp_path: Path,
) -> None:
    """No hook runs in mode spec, so no record exists."""
    config = write_config(tmp_path / "etc", driver.root, low_level[:1], 'mode = "spec"\n')
    one = started(config)
    mine, theirs = (f"/dev/nvidia{driver.gpus[index].minor}" for index in (0, 5))
    made = one.make_node(driver.gpus[5].minor)
    one.lose()
    assert {one.opens(mine), one.opens(made)} == {"EPERM"}
    one.repair(one.bundle.name).ok()
    assert one.opens(mine) == "ENXIO"
    assert one.opens(made) == "EPERM"
    assert theirs not in one.bundle.call("cat", one.bundle.config).ok().stdout


def test_without_a_record_repair_is_refused(
    started: Callable[..., Running],
    low_level: tuple[str, Namespace],
    driver: Driver,
    tmp_path: Path,
) -> None:
    """This container is like one whose GPUs come from another hook: its config.json allows none."""
    config = write_config(tmp_path / "etc", driver.root, low_level[:1])
    one = started(config)
    [record] = (tmp_path / "etc/state/containers").iterdir()
    record.unlink()
    rules = one.bundle.spec()["linux"]["resources"]["devices"][:1]
    one.bundle.change(lambda spec: spec["linux"]["resources"].update(devices=rules))
    one.lose()
    failed = one.repair(one.bundle.name).failed()
    assert "no record" in failed.stderr
    failed = one.repair("--format=json", one.bundle.name).failed()
    [found] = json.loads(failed.stdout)["containers"]
    assert "no record" in found["error"]
    assert found["restored_nodes"] == []
    assert one.opens(f"/dev/nvidia{driver.gpus[0].minor}") == "EPERM"


def test_repair_warns_that_daemon_reload_removes_hook_only_access(
    started: Callable[..., Running], configs: dict[str, Path], bundle: Bundle, driver: Driver
) -> None:
    """The cgroup is a scope of systemd, which has its device rules from config.json."""
    path = bundle.spec()["linux"]["cgroupsPath"]
    bundle.change(lambda spec: spec["linux"].update(cgroupsPath=f"{path}.scope"))
    one = started(configs[bundle.runtime])
    name, lost = one.bundle.name, "the next systemctl daemon-reload removes the access"
    assert lost not in one.repair(name).ok().stdout
    rules = one.bundle.spec()["linux"]["resources"]["devices"][:1]
    one.bundle.change(lambda spec: spec["linux"]["resources"].update(devices=rules))
    assert f"{name}: nothing was missing, but {lost}" in one.repair(name).ok().stdout
    one.lose()
    said = one.repair(name).ok().stdout
    said_how = "because only a hook added it: start the container with gpu-py"
    assert f"given back; {lost}, {said_how}" in said
    assert "/dev/char" not in said
    assert one.opens(f"/dev/nvidia{driver.gpus[0].minor}") == "ENXIO"


@pytest.fixture(params=["docker", "docker_v2"])
def a_docker(request: pytest.FixtureRequest) -> Docker:
    found: Docker = request.getfixturevalue(request.param)
    return found


def test_a_docker_container_is_repaired_by_its_docker_name(
    a_docker: Docker, installation: Installation, configs: dict[str, Path], driver: Driver
) -> None:
    """The container has lost its device, as after docker update, and is named as in Docker."""
    node = f"/dev/nvidia{driver.gpus[3].minor}"
    options = ["--detach", "--runtime=gpu-py", "--name=web", "-e", "NVIDIA_VISIBLE_DEVICES=3"]
    a_docker.call("run", *options, image("busybox"), "sleep", "1000").ok()

    def opens() -> str:
        return a_docker.call("exec", "web", "devopen", node).ok().stdout.split()[1]

    pid = a_docker.call("inspect", "--format={{.State.Pid}}", "web").ok().stdout.strip()
    enter = ["nsenter", "-t", str(a_docker.pid), "-m", "--wdns=/"]
    layout = "v1" if host_cgroups() != "v2" and "docker-v2" not in str(a_docker.folder) else "v2"
    kind = {"v1": ":devices:", "v2": "^0::"}[layout]
    line = run(["sh", "-c", f"grep -E '{kind}' /proc/{pid}/cgroup"]).ok().stdout
    cgroup = line.strip().split(":", 2)[2]
    try:
        assert opens() == "ENXIO"
        run([*enter, "sh", "-ec", LOSE[layout], "sh", cgroup]).ok()
        assert opens() == "EPERM"
        words = ("repair", "--config", configs["runc"], "web")
        done = run((*enter, installation.command, *words)).ok()
        assert done.stdout.startswith("docker:web: access to ")
        assert node in done.stdout
        assert opens() == "ENXIO"
    finally:
        a_docker.call("rm", "--force", "web").ok()


@ONE
def test_an_unknown_container_is_refused(running: Running) -> None:
    failed = running.repair("no-such-container").failed()
    assert "isn't a running container" in failed.stderr
    assert running.repair().status == 2
