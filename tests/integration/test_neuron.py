"""AWS Neuron's devices, simulated, in real containers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import vendors
from harness.bundles import Bundle
from harness.commands import run
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.snapshot import nothing_left
from harness.standing import ONE
from harness.vendor_engines import documents, podman_with_hook, run_with
from harness.vendors import MODES, USER, Devices, as_user, in_mode, nodes_seen

ASK = "AWS_NEURON_VISIBLE_DEVICES"
KIND = "aws.amazon.com/neuron"
LOOK = vendors.look("/dev/neuron*")


@pytest.fixture(scope="module")
def neuron(installation: Installation, workspace: Path) -> Iterator[Devices]:
    """Twelve devices, the last one half made, and a node of none."""
    root = workspace / "neuron-driver"
    settings = {"half_made": 11, "stray": 40}
    with vendors.devices(installation, root, "neuron", 12, **settings) as found:
        assert "Neuron device 10: 00a1b2c3d4e5000a, 2 cores\n" in found.made
        yield found


@pytest.fixture
def config(
    bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, neuron: Devices
) -> Path:
    return neuron.configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]))


def nodes(*numbers: int) -> list[str]:
    return [f"/dev/neuron{number}" for number in numbers]


@MODES
def test_exactly_what_was_asked_for(
    bundle: Bundle, config: Path, neuron: Devices, mode: str
) -> None:
    in_mode(config, mode)
    bundle.change(as_user)
    bundle.environ(f"{ASK}=10, 8-9", "NEURON_RT_VISIBLE_CORES=16-21")
    bundle.command(*LOOK)
    with nothing_left(neuron.root, pid=bundle.namespace.pid):
        done = neuron.started(bundle, config)
    assert nodes_seen(done) == neuron.nodes(*nodes(8, 9, 10))
    assert vendors.groups_seen(done) == {USER}
    assert vendors.variables_seen(done, "NEURON_", "AWS_") == [
        f"{ASK}=10, 8-9",
        "NEURON_RT_VISIBLE_CORES=16-21",
    ]


@MODES
def test_what_was_not_asked_for_cannot_be_opened(
    bundle: Bundle, config: Path, neuron: Devices, mode: str
) -> None:
    in_mode(config, mode)
    paths = nodes(0, 1, 2, 3, 11, 40)
    bundle.environ(f"{ASK}=1-2")
    bundle.command(*vendors.make_and_open(neuron, paths))
    assert vendors.opened(neuron.started(bundle, config), paths) == {
        path: "ENXIO" if path in nodes(1, 2) else "EPERM" for path in paths
    }


@MODES
def test_beside_nvidia(
    bundle: Bundle, config: Path, neuron: Devices, driver: Driver, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ(f"{ASK}=ALL", "NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*vendors.look("/dev/neuron*", driver=driver))
    with nothing_left(driver.root, neuron.root, pid=bundle.namespace.pid):
        done = neuron.started(bundle, config)
    assert nodes_seen(done) == neuron.nodes(*nodes(*range(11)))
    assert vendors.gpus_seen(done, driver) == {5}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("12", r"This machine has no Neuron device '12': it has 0 \(00a1b2c3d4e50000\), .*"),
        ("0-11", r"Neuron device 11 can't be used: the driver isn't done with it .*"),
        ("4,6", r"The Neuron devices 4, 6 aren't neighbours: .* without 5\. Ask for 4-6, .*"),
    ],
)
@ONE
def test_what_cannot_be_had_is_refused_in_a_sentence(
    bundle: Bundle,
    config: Path,
    neuron: Devices,
    low_level: tuple[str, Namespace],
    asked: str,
    sentence: str,
) -> None:
    bundle.environ(f"{ASK}={asked}")
    with nothing_left(neuron.root, bundle.root, pid=bundle.namespace.pid):
        said = neuron.refused(bundle, config)
    assert re.fullmatch(f"gpu-py: {sentence}\n", said), said
    bundle.call(low_level[0], "state", bundle.name).failed()


@ONE
def test_a_node_that_is_another_device(bundle: Bundle, config: Path, neuron: Devices) -> None:
    """It is believed by its numbers, which the driver says."""
    node, shown = neuron.root / "dev/neuron3", neuron.root / "sys/class/neuron_device/neuron3/dev"
    before = shown.read_text()
    bundle.environ(f"{ASK}=3")
    try:
        shown.unlink()
        shown.write_text("1:3\n")
        said = neuron.refused(bundle, config)
        assert "/dev/neuron3 is another device (the driver's is 1:3)" in said
    finally:
        shown.unlink(missing_ok=True)
        shown.write_text(before)
    bundle.command(*LOOK)
    assert node.exists()
    assert nodes_seen(neuron.started(bundle, config)) == neuron.nodes(*nodes(3))


def test_the_hook_alone(
    bundle: Bundle, config: Path, neuron: Devices, low_level: tuple[str, Namespace]
) -> None:
    neuron.hook(bundle, config)
    bundle.environ(f"{ASK}=0,1")
    bundle.command(*LOOK)
    assert nodes_seen(bundle.run(low_level[0])) == neuron.nodes(*nodes(0, 1))
    assert vendors.logged(config)["undone"] == []


@ONE
def test_cores_of_other_devices_are_said(bundle: Bundle, config: Path, neuron: Devices) -> None:
    bundle.environ(f"{ASK}=4", "NEURON_RT_VISIBLE_CORES=0-1")
    neuron.started(bundle, config).ok()
    [text] = vendors.logged(config)["warnings"]
    assert text.endswith("these have 8-9")


@ONE
def test_the_commands_name_its_devices(bundle: Bundle, config: Path, neuron: Devices) -> None:
    bundle.environ(f"{ASK}=7")
    neuron.start(bundle, config)
    listed = neuron.ask(config, "list")
    holders = {device["label"]: device["containers"] for device in listed["devices"]}
    assert holders == {str(n): [bundle.name] if n == 7 else [] for n in range(12)}
    explained = neuron.ask(config, "explain", "-e", f"{ASK}=0")
    assert explained["selected"] == ["00a1b2c3d4e50000"]
    assert explained["undone"] == []
    info = run([neuron.installation.command, "info", "--config", config]).ok().stdout
    assert re.search(r"^10 +Trainium1 +2 +00a1b2c3d4e5000a +-$", info, re.MULTILINE)
    findings = neuron.ask(config, "doctor")["findings"]
    found = [each for each in findings if each["check"] == "neuron-devices"]
    assert [each["status"] for each in found] == ["ok", "warning", "warning"]
    assert "Neuron device 11 (neuron11) can't be used" in found[1]["message"]
    assert "/dev/neuron40" in found[2]["message"]


# podman --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(workspace: Path, driver: Driver, neuron: Devices) -> Path:
    return neuron.configured(write_config(workspace / "neuron-etc", driver.root, ["runc"]))


def test_podman_by_hook_and_by_document(
    neuron: Devices, own: Path, host: Namespace, workspace: Path, archive: Path
) -> None:
    with (
        podman_with_hook(neuron, own, workspace / "neuron-podman", host, archive) as engine,
        documents(neuron, own, workspace / "neuron-cdi", KIND),
    ):
        done = engine.run(image("debian"), *LOOK, env=(f"{ASK}=4-5",))
        assert nodes_seen(done) == neuron.nodes(*nodes(4, 5))
        done = run_with(engine, LOOK, f"{KIND}=10", f"{KIND}=9")
        assert nodes_seen(done) == neuron.nodes(*nodes(9, 10))
        assert vendors.variables_seen(done, ASK) == [f"{ASK}=void"]
        done = run_with(engine, LOOK, f"{KIND}=all")
        assert nodes_seen(done) == neuron.nodes(*nodes(*range(11)))
