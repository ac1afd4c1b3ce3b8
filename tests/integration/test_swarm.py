"""Docker Swarm: a real dockerd as a node with simulated GPUs, and services that request them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import vendors
from harness.commands import Result, run
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.swarm import Swarm, swarm
from harness.vendors import Devices

ONE = ("--generic-resource", "NVIDIA-GPU=1")
TWO = ("--generic-resource", "NVIDIA-GPU=2")
NUMBERS = range(1, 9)
EXCLUSIVE = 'exclusive = ["nvidia.com/gpu"]\n'


@pytest.fixture(scope="module")
def amd(installation: Installation, workspace: Path) -> Iterator[Devices]:
    """Two AMD GPUs in the same machine."""
    with vendors.devices(installation, workspace / "swarm-amd", "amd", 2) as found:
        yield found


@pytest.fixture(scope="module")
def config(workspace: Path, driver: Driver, amd: Devices) -> Path:
    return amd.configured(
        write_config(workspace / "swarm-config", driver.root, ["runc"]), EXCLUSIVE
    )


class Installer:
    """``gpuhook install --swarm`` for a daemon.json that belongs to a test."""

    def __init__(self, installation: Installation, config: Path, folder: Path) -> None:
        self.daemon = folder / "daemon.json"
        self._installation = installation
        self._config = config
        self._state = folder / "state"

    def call(self, *words: str) -> Result:
        options = ["--engine=docker", f"--config={self.daemon}", f"--state-dir={self._state}"]
        env = {"GPUHOOK_CONFIG": str(self._config)}
        return run([self._installation.command, *words, *options], env=env)

    def document(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.daemon.read_text())
        return found


@pytest.fixture
def installer(installation: Installation, config: Path, tmp_path: Path) -> Installer:
    return Installer(installation, config, tmp_path)


@pytest.fixture(scope="module")
def node(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    config: Path,
    amd: Devices,
) -> Iterator[Swarm]:
    """A swarm that is made by the commands in docs/schedulers/swarm.md.

    The administrator has already listed AMD's GPUs as a generic resource.
    """
    folder = workspace / "swarm-install"
    folder.mkdir()
    made = Installer(installation, config, folder)
    ids = re.findall(r"0x[0-9a-f]{6,}", json.dumps(listed(amd, config)))
    entries = [f"AMD_GPU={name}" for name in dict.fromkeys(ids)]
    made.daemon.write_text(json.dumps({"node-generic-resources": entries}))
    said = made.call("install", "--swarm").ok().stdout
    [setting] = re.findall(r"gpuhook (config set swarm-resource=\S+)", said)
    run([installation.command, *setting.split(), "--config", config]).ok()
    env = {"GPUHOOK_CONFIG": str(config)}
    with swarm(workspace / "swarm", host, made.document(), archive, env) as found:
        yield found


def listed(amd: Devices, config: Path) -> list[dict[str, object]]:
    """Return the AMD devices that ``gpuhook list`` reports."""
    found = amd.ask(config, "list")["devices"]
    return [each for each in found if each["vendor"] == "amd"]


@pytest.fixture(autouse=True)
def no_services(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "node" in request.fixturenames:
        made: Swarm = request.getfixturevalue("node")
        made.remove(*made.services())


def gpus_of(node: Swarm, driver: Driver, *names: str) -> dict[str, set[int]]:
    """Return each service's GPU indices, which nodes, access and nvidia-smi agree on."""
    found = {}
    for name in names:
        inside = node.look(name, *driver.minors)
        opened = {minor for minor, what in inside.by_hand.items() if what == "ENXIO"}
        chosen = [gpu for gpu in driver.gpus if gpu.minor in inside.gpu_minors]
        assert opened == inside.gpu_minors
        assert {what for what in inside.by_hand.values() if what != "ENXIO"} <= {"EPERM"}
        lines = node.execute(name, "nvidia-smi", "-L").ok().stdout.splitlines()
        assert lines == lines_of_nvidia_smi(chosen)
        found[name] = {gpu.index for gpu in chosen}
    return found


def test_two_services_never_share_a_gpu(node: Swarm, driver: Driver) -> None:
    names = [f"one-{number}" for number in NUMBERS]
    for name in names:
        node.service(name, *ONE)
    found = gpus_of(node, driver, *names)
    assert sorted(index for each in found.values() for index in each) == list(range(8))

    node.service("ninth", *ONE)
    node.wait("ninth", lambda: "insufficient resources" in node.state("ninth")[1])
    assert node.state("ninth")[0] == "Pending"
    assert not node.containers("ninth")
    free = found.pop("one-3")
    node.remove("one-3")
    assert gpus_of(node, driver, "ninth") == {"ninth": free}

    # When the node comes back, the tasks that replace the old ones get GPUs in the same way.
    before = {name: node.running(name) for name in (*found, "ninth")}
    node.stop()
    node.start()
    for name, container in before.items():
        node.replaced(name, container)
    again = gpus_of(node, driver, *before)
    assert sorted(index for each in again.values() for index in each) == list(range(8))


def test_services_that_ask_for_two_gpus_get_two_each(node: Swarm, driver: Driver) -> None:
    names = [f"two-{number}" for number in range(4)]
    for name in names:
        node.service(name, *TWO)
    node.service("without")
    found = gpus_of(node, driver, *names)
    assert [len(each) for each in found.values()] == [2] * 4
    assert set().union(*found.values()) == set(range(8))
    assert node.look("without").nodes == {}


def test_nvidia_visible_devices_does_not_override_the_swarm_resource(
    node: Swarm, driver: Driver
) -> None:
    """CUDA's images set NVIDIA_VISIBLE_DEVICES=all themselves."""
    node.service("asks", *ONE, "--env", "NVIDIA_VISIBLE_DEVICES=all")
    assert len(gpus_of(node, driver, "asks")["asks"]) == 1


def test_nvidia_and_amd_gpus_are_counted_separately(
    node: Swarm, driver: Driver, amd: Devices
) -> None:
    names = ["both-1", "both-2"]
    for name in names:
        node.service(name, *ONE, "--generic-resource", "AMD_GPU=1")
    found = gpus_of(node, driver, *names)
    assert not found["both-1"] & found["both-2"]
    look = vendors.look("/dev/kfd", "/dev/dri/renderD*")
    nodes = [set(vendors.nodes_seen(node.execute(name, *look))) for name in names]
    assert nodes[0] & nodes[1] == {"/dev/kfd"}
    assert [len(each) for each in nodes] == [2, 2]
    node.service("both-3", "--generic-resource", "AMD_GPU=1")
    node.wait("both-3", lambda: "insufficient resources" in node.state("both-3")[1])


def test_a_service_waits_for_a_gpu_leased_outside_the_swarm(node: Swarm, driver: Driver) -> None:
    """A container that the swarm doesn't know has all GPUs. Afterwards the service runs."""
    words = ("run", "--detach", "--env", "NVIDIA_VISIBLE_DEVICES=all", image("debian"))
    other = node.docker.call(*words, "sleep", "100000").ok().stdout.strip()
    try:
        node.service("waits", *ONE)
        node.wait("waits", lambda: "is exclusive here" in node.history("waits"))
        assert not node.containers("waits")
    finally:
        node.docker.call("rm", "--force", other).ok()
    assert len(gpus_of(node, driver, "waits")["waits"]) == 1


def test_install_adds_swarm_resources_and_uninstall_removes_them(
    installer: Installer, driver: Driver, amd: Devices, config: Path
) -> None:
    before = '{"node-generic-resources": ["SSD=fast"], "default-runtime": "runc"}'
    installer.daemon.write_text(before)
    assert "Restart Docker, which reads node-generic-resources" in (
        installer.call("install", "--swarm", "--reload").ok().stdout
    )
    document = installer.document()
    assert document["default-runtime"] == "gpu-py"
    assert document["node-generic-resources"] == [
        "SSD=fast",
        *(f"NVIDIA-GPU={gpu.uuid}" for gpu in driver.gpus),
        *(f"AMD-GPU={each['id']}" for each in listed(amd, config)),
    ]
    for words in (["--swarm"], []):
        assert "docker: unchanged" in installer.call("install", *words).ok().stdout
        assert installer.document() == document
    installer.call("install", "--no-swarm").ok()
    assert installer.document()["node-generic-resources"] == ["SSD=fast"]
    installer.call("uninstall").ok()
    assert installer.daemon.read_text() == before
