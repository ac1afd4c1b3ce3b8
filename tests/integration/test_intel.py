"""Intel's GPUs and NPUs, simulated, in real containers."""

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
from harness.vendors import MODES, USER, Devices, Seen, as_user, in_mode, nodes_seen

ASK, ASK_NPU = "INTEL_VISIBLE_DEVICES", "INTEL_VISIBLE_NPUS"
KIND, NPU_KIND = "intel.com/gpu", "intel.com/npu"
VIDEO, RENDER = 44, 106
LOOK = vendors.look("/dev/dri/*", "/dev/accel/*")


@pytest.fixture(scope="module")
def gpus(installation: Installation, workspace: Path) -> Iterator[Devices]:
    """Eleven GPUs from card1 on, one virtual function, and a GPU of a virtual machine."""
    root = workspace / "intel-gpu-driver"
    settings = {"cards": 1, "vfs": 1, "vm": 1, "driver": "xe"}
    with vendors.devices(installation, root, "intel_gpu", 11, **settings) as found:
        assert "GPU 10: card11 at 0000:0d:00.0\n" in found.made
        assert "GPU 10.0: card12 at 0000:0d:00.1\n" in found.made
        yield found


@pytest.fixture(scope="module")
def npus(installation: Installation, workspace: Path) -> Iterator[Devices]:
    """Two NPUs beside another maker's /dev/accel/accel0."""
    root = workspace / "intel-npu-driver"
    settings = {"first": 1, "decoy": "yes"}
    with vendors.devices(installation, root, "intel_npu", 2, **settings) as found:
        assert found.made.startswith("NPU 1 at 0000:01:0b.0\n")
        yield found


@pytest.fixture
def config(bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, gpus: Devices) -> Path:
    return gpus.configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]))


@pytest.fixture
def npu_config(
    bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, npus: Devices
) -> Path:
    return npus.configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]))


def expected(gpus: Devices, *cards: int, opened: str = "ENXIO") -> dict[str, Seen]:
    paths = [f"/dev/dri/{name}" for n in cards for name in (f"card{n}", f"renderD{128 + n}")]
    return gpus.nodes(*paths, opened=opened)


@MODES
def test_exactly_what_was_asked_for(bundle: Bundle, config: Path, gpus: Devices, mode: str) -> None:
    in_mode(config, mode)
    bundle.change(as_user)
    bundle.environ(f"{ASK}=9, 0 - 1")
    bundle.command(*LOOK)
    with nothing_left(gpus.root, pid=bundle.namespace.pid):
        done = gpus.started(bundle, config)
    assert nodes_seen(done) == expected(gpus, 1, 2, 10)
    assert vendors.groups_seen(done) == {USER, VIDEO, RENDER}
    assert vendors.variables_seen(done, "INTEL_") == [f"{ASK}=9, 0 - 1"]
    links = vendors.links_seen(done)
    if mode == "spec":
        assert links == {}
        return
    by_path = "/dev/dri/by-path/pci-0000:0c:00.0"
    assert links[f"{by_path}-card"] == "../card10"
    assert links[f"{by_path}-render"] == "../renderD138"
    assert len(links) == 6


@ONE
@MODES
def test_without_its_groups_a_user_may_not_open_it(
    bundle: Bundle, config: Path, gpus: Devices, mode: str
) -> None:
    in_mode(config, mode)
    off = "[features]\nno-additional-gids-for-device-nodes = true\n"
    config.write_text(config.read_text() + off)
    bundle.change(as_user)
    bundle.environ(f"{ASK}=0")
    bundle.command(*LOOK)
    assert nodes_seen(gpus.started(bundle, config)) == expected(gpus, 1, opened="EACCES")


@MODES
def test_what_was_not_asked_for_cannot_be_opened(
    bundle: Bundle, config: Path, gpus: Devices, mode: str
) -> None:
    in_mode(config, mode)
    paths = [f"/dev/dri/{name}" for name in ("card1", "card2", "card11", "card12", "renderD140")]
    bundle.environ(f"{ASK}=card2,10.0")
    bundle.command(*vendors.make_and_open(gpus, paths))
    assert vendors.opened(gpus.started(bundle, config), paths) == dict(
        zip(paths, ["EPERM", "ENXIO", "EPERM", "ENXIO", "ENXIO"], strict=True)
    )


@MODES
def test_beside_nvidia(
    bundle: Bundle, config: Path, gpus: Devices, driver: Driver, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ(f"{ASK}=10", "NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*vendors.look("/dev/dri/*", driver=driver))
    with nothing_left(driver.root, gpus.root, pid=bundle.namespace.pid):
        done = gpus.started(bundle, config)
    assert nodes_seen(done) == expected(gpus, 11)
    assert vendors.gpus_seen(done, driver) == {5}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("11", r"This machine has no GPU or virtual function '11': it has 0 \(card1\), .*"),
        ("card0", r"This machine has no GPU or virtual function 'card0': .*"),
        ("0000:0e:00.0", r"This machine has no GPU or virtual function '0000:0e:00\.0': .*"),
    ],
)
@ONE
def test_what_cannot_be_had_is_refused_in_a_sentence(
    bundle: Bundle,
    config: Path,
    gpus: Devices,
    low_level: tuple[str, Namespace],
    asked: str,
    sentence: str,
) -> None:
    bundle.environ(f"{ASK}={asked}")
    with nothing_left(gpus.root, bundle.root, pid=bundle.namespace.pid):
        said = gpus.refused(bundle, config)
    assert re.fullmatch(f"gpu-py: {sentence}\n", said), said
    bundle.call(low_level[0], "state", bundle.name).failed()


def test_the_hook_alone(
    bundle: Bundle, config: Path, gpus: Devices, low_level: tuple[str, Namespace]
) -> None:
    gpus.hook(bundle, config)
    bundle.environ(f"{ASK}=0")
    bundle.command(*LOOK)
    done = bundle.run(low_level[0])
    assert nodes_seen(done) == expected(gpus, 1)
    assert len(vendors.links_seen(done)) == 2
    assert sorted(vendors.logged(config)["undone"]) == [
        f"put the process in the host's group {group}" for group in (RENDER, VIDEO)
    ]


@ONE
def test_the_commands_name_its_devices(bundle: Bundle, config: Path, gpus: Devices) -> None:
    bundle.environ(f"{ASK}=10.0")
    gpus.start(bundle, config)
    listed = gpus.ask(config, "list")
    holders = {device["label"]: device["containers"] for device in listed["devices"]}
    assert {label: users for label, users in holders.items() if users} == {"10.0": [bundle.name]}
    explained = gpus.ask(config, "explain", "-e", f"{ASK}=0")
    assert explained["selected"] == ["card1"]
    assert explained["undone"] == []
    info = run([gpus.installation.command, "info", "--config", config]).ok().stdout
    line = r"^10 +Intel Data Center GPU Flex 170 +0000:0d:00\.0 +card11 +-$"
    assert re.search(line, info, re.MULTILINE)
    findings = gpus.ask(config, "doctor")["findings"]
    found = [each for each in findings if each["check"] == "intel-gpus"]
    assert [each["status"] for each in found] == ["ok"]
    assert "xe has 12 GPUs" in found[0]["message"]


# NPUs ----------------------------------------------------------------------------------------


@MODES
def test_exactly_the_npus_that_were_asked_for(
    bundle: Bundle, npu_config: Path, npus: Devices, mode: str
) -> None:
    in_mode(npu_config, mode)
    bundle.change(as_user)
    bundle.environ(f"{ASK_NPU}=2")
    bundle.command(*LOOK)
    with nothing_left(npus.root, pid=bundle.namespace.pid):
        done = npus.started(bundle, npu_config)
    assert nodes_seen(done) == npus.nodes("/dev/accel/accel2")
    assert vendors.groups_seen(done) == {USER, RENDER}


@MODES
def test_npus_that_were_not_asked_for_cannot_be_opened(
    bundle: Bundle, npu_config: Path, npus: Devices, mode: str
) -> None:
    in_mode(npu_config, mode)
    paths = [f"/dev/accel/accel{number}" for number in range(3)]
    bundle.environ(f"{ASK_NPU}=1")
    bundle.command(*vendors.make_and_open(npus, paths))
    assert vendors.opened(npus.started(bundle, npu_config), paths) == dict(
        zip(paths, ["EPERM", "ENXIO", "EPERM"], strict=True)
    )


@ONE
def test_another_makers_node_is_no_npu(bundle: Bundle, npu_config: Path, npus: Devices) -> None:
    bundle.environ(f"{ASK_NPU}=0")
    assert "This machine has no NPU '0': it has 1 (accel1)" in npus.refused(bundle, npu_config)
    listed = npus.ask(npu_config, "list")["devices"]
    assert [device["id"] for device in listed] == ["accel1", "accel2"]


# podman --------------------------------------------------------------------------------------


def test_podman_by_hook_and_by_document(
    gpus: Devices, npus: Devices, driver: Driver, host: Namespace, workspace: Path, archive: Path
) -> None:
    """Of both kinds at once. Debian 12's podman knows no groups in documents."""
    off = "[features]\nno-additional-gids-for-device-nodes = true\n"
    own = write_config(workspace / "intel-etc", driver.root, ["runc"])
    gpus.configured(own, tail=off)
    roots = f'driver-roots = ["intel_gpu={gpus.root}", "intel_npu={npus.root}"]'
    own.write_text(re.sub(r"driver-roots = .*", roots, own.read_text()))
    with (
        podman_with_hook(gpus, own, workspace / "intel-podman", host, archive) as engine,
        documents(gpus, own, workspace / "intel-cdi", KIND),
        documents(npus, own, workspace / "intel-npu-cdi", NPU_KIND),
    ):
        done = engine.run(image("debian"), *LOOK, env=(f"{ASK}=3", f"{ASK_NPU}=1"))
        npu = npus.nodes("/dev/accel/accel1")
        assert nodes_seen(done) == expected(gpus, 4) | npu
        done = run_with(engine, LOOK, f"{KIND}=card2", f"{NPU_KIND}=1")
        assert nodes_seen(done) == expected(gpus, 2) | npu
        assert vendors.links_seen(done)["/dev/dri/by-path/pci-0000:04:00.0-card"] == "../card2"
        assert vendors.variables_seen(done, "INTEL_") == [f"{ASK}=void", f"{ASK_NPU}=void"]
        done = run_with(engine, LOOK, f"{KIND}=0", f"{NPU_KIND}=all")
        accel = npus.nodes("/dev/accel/accel1", "/dev/accel/accel2")
        assert nodes_seen(done) == expected(gpus, 1) | accel
