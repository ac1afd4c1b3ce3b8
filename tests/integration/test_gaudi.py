"""Intel Gaudi's devices, simulated, in real containers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import vendors
from harness.bundles import Bundle
from harness.commands import run, wait_until
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.snapshot import nothing_left
from harness.standing import ONE, Site
from harness.vendor_engines import documents, podman_with_hook, run_with
from harness.vendors import MODES, USER, Devices, as_user, in_mode, nodes_seen

DEVICES, MODULES = "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"
KIND = "habana.ai/gaudi"
LOOK = vendors.look("/dev/accel/*", "/dev/infiniband/*")


@pytest.fixture(scope="module")
def gaudi(installation: Installation, workspace: Path) -> Iterator[Devices]:
    """Eleven devices without 3, and 12 of another driver; 1 is in reset, 2 has network ports."""
    root = workspace / "gaudi-driver"
    settings = {"gap": 3, "reset": 1, "net": 2, "uverbs": "0,2,10"}
    with vendors.devices(installation, root, "gaudi", 12, **settings) as found:
        assert "Gaudi 2: 0000:1b:00.0, module 1\n" in found.made
        yield found


@pytest.fixture
def config(
    bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, gaudi: Devices
) -> Path:
    return gaudi.configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]))


def nodes(*numbers: int) -> list[str]:
    found = []
    for number in numbers:
        found += [f"/dev/accel/accel{number}", f"/dev/accel/accel_controlD{number}"]
        found += [f"/dev/infiniband/uverbs{number}"] if number in (0, 2, 10) else []
    return found


@MODES
def test_exactly_what_was_asked_for(
    bundle: Bundle, config: Path, gaudi: Devices, mode: str
) -> None:
    in_mode(config, mode)
    bundle.change(as_user)
    bundle.environ(f"{DEVICES}=10, 0", f"{MODULES}=5", f"{MODULES}=6")
    bundle.command(*LOOK)
    with nothing_left(gaudi.root, pid=bundle.namespace.pid):
        done = gaudi.started(bundle, config)
    assert nodes_seen(done) == gaudi.nodes(*nodes(0, 10))
    assert vendors.groups_seen(done) == {USER}
    assert set(vendors.variables_seen(done, "HABANA_")) == {f"{DEVICES}=10, 0", f"{MODULES}=3,9"}


@MODES
def test_all_that_are_operational(bundle: Bundle, config: Path, gaudi: Devices, mode: str) -> None:
    in_mode(config, mode)
    bundle.environ(f"{DEVICES}=all")
    bundle.command(*LOOK)
    done = gaudi.started(bundle, config)
    numbers = [number for number in range(12) if number not in (1, 3)]
    assert nodes_seen(done) == gaudi.nodes(*nodes(*numbers))
    [seats] = vendors.variables_seen(done, MODULES)
    assert seats == f"{MODULES}=1,3,4,5,6,7,8,9,10,11"


@MODES
def test_images_say_all_and_users_name_seats(
    bundle: Bundle, config: Path, gaudi: Devices, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ(f"{DEVICES}=all", f"{MODULES}=4-5")
    bundle.command(*LOOK)
    done = gaudi.started(bundle, config)
    assert nodes_seen(done) == gaudi.nodes(*nodes(6, 7))
    assert vendors.variables_seen(done, MODULES) == [f"{MODULES}=4,5"]


@MODES
def test_what_was_not_asked_for_cannot_be_opened(
    bundle: Bundle, config: Path, gaudi: Devices, mode: str
) -> None:
    in_mode(config, mode)
    paths = [*nodes(0, 1, 2, 10), "/dev/accel/accel12"]
    bundle.environ(f"{MODULES}=1")
    bundle.command(*vendors.make_and_open(gaudi, paths))
    assert vendors.opened(gaudi.started(bundle, config), paths) == {
        path: "ENXIO" if path in nodes(2) else "EPERM" for path in paths
    }


@MODES
def test_beside_nvidia(
    bundle: Bundle, config: Path, gaudi: Devices, driver: Driver, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ("HABANA_VISIBLE_PCI_BUS_IDS=0000:1b:00.0", "NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*vendors.look("/dev/accel/*", "/dev/infiniband/*", driver=driver))
    with nothing_left(driver.root, gaudi.root, pid=bundle.namespace.pid):
        done = gaudi.started(bundle, config)
    assert nodes_seen(done) == gaudi.nodes(*nodes(2))
    assert vendors.gpus_seen(done, driver) == {5}
    assert vendors.variables_seen(done, MODULES) == [f"{MODULES}=1"]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (f"{DEVICES}=12", r"This machine has no Gaudi '12': it has 0 \(0000:19:00\.0\), .*"),
        (f"{DEVICES}=1", r"Gaudi 1 can't be used: its status is In reset\. Wait until .*"),
        (f"{MODULES}=0", r"This machine has no Gaudi '0': it has 1, 2, 3, .*"),
    ],
)
@ONE
def test_what_cannot_be_had_is_refused_in_a_sentence(
    bundle: Bundle,
    config: Path,
    gaudi: Devices,
    low_level: tuple[str, Namespace],
    asked: str,
    sentence: str,
) -> None:
    bundle.environ(asked)
    with nothing_left(gaudi.root, bundle.root, pid=bundle.namespace.pid):
        said = gaudi.refused(bundle, config)
    assert re.fullmatch(f"gpu-py: {sentence}\n", said), said
    bundle.call(low_level[0], "state", bundle.name).failed()


@ONE
def test_a_node_that_is_another_device(bundle: Bundle, config: Path, gaudi: Devices) -> None:
    """It is believed by its numbers, which the driver says."""
    shown = gaudi.root / "sys/bus/pci/drivers/habanalabs/0000:1d:00.0/accel/accel4/dev"
    before = shown.read_text()
    bundle.environ(f"{DEVICES}=4")
    try:
        shown.unlink()
        shown.write_text("1:3\n")
        # Nothing on a real machine changes so: a node's numbers are looked at, at every start.
        run([gaudi.installation.command, "refresh", "--config", config])
        said = gaudi.refused(bundle, config)
        assert "/dev/accel/accel4 is another device (the driver's is 1:3)" in said
    finally:
        shown.unlink(missing_ok=True)
        shown.write_text(before)


def test_the_hook_alone(
    bundle: Bundle, config: Path, gaudi: Devices, low_level: tuple[str, Namespace]
) -> None:
    gaudi.hook(bundle, config)
    bundle.environ(f"{DEVICES}=2")
    bundle.command(*LOOK)
    done = bundle.run(low_level[0])
    assert nodes_seen(done) == gaudi.nodes(*nodes(2))
    assert vendors.variables_seen(done, MODULES) == []
    entry = vendors.logged(config)
    assert entry["undone"] == [f"set {MODULES}=1"]
    [text] = entry["warnings"]
    assert text.startswith("The network ports of Gaudi 2 aren't moved into the container")


@ONE
def test_the_commands_name_its_devices(bundle: Bundle, config: Path, gaudi: Devices) -> None:
    bundle.environ(f"{DEVICES}=7")
    gaudi.start(bundle, config)
    listed = gaudi.ask(config, "list")
    holders = {device["label"]: device["containers"] for device in listed["devices"]}
    assert holders == {str(n): [bundle.name] if n == 7 else [] for n in range(12) if n != 3}
    explained = gaudi.ask(config, "explain", "-e", f"{MODULES}=3")
    assert explained["selected"] == ["0000:19:00.0"]
    info = run([gaudi.installation.command, "info", "--config", config]).ok().stdout
    assert re.search(r"^10 +9 +Gaudi2 +0000:23:00\.0 +-$", info, re.MULTILINE)
    findings = gaudi.ask(config, "doctor")["findings"]
    found = [each for each in findings if each["check"] == "gaudi-devices"]
    assert [each["status"] for each in found] == ["ok", "warning", "ok"]
    assert "Gaudi 1 (0000:1a:00.0) can't be used: its status is In reset" in found[1]["message"]
    assert "The network ports of Gaudi 2 are moved into no container" in found[2]["message"]


@ONE
def test_the_process_that_stands_ready_notices_a_reset(
    bundle: Bundle, driver: Driver, gaudi: Devices, low_level: tuple[str, Namespace], tmp_path: Path
) -> None:
    site = Site(bundle, gaudi.installation, driver, low_level[0], tmp_path)
    status = gaudi.root / "sys/bus/pci/drivers/habanalabs/0000:19:00.0/status"
    try:
        gaudi.configured(site.config)
        site.settle()
        bundle.environ(f"{DEVICES}=0")
        site.plain = bundle.config.read_bytes()
        site.stand()
        site.works()
        assert site.served
        assert f"{MODULES}=3" in bundle.spec()["process"]["env"]
        wait_until(site.is_standing, "it stands for the next")
        status.unlink()
        status.write_text("Needs reset\n")
        assert "Gaudi 0 can't be used: its status is Needs reset" in site.run().failed().stdout
    finally:
        status.unlink(missing_ok=True)
        status.write_text("Operational\n")
        site.clear()


# podman --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(workspace: Path, driver: Driver, gaudi: Devices) -> Path:
    return gaudi.configured(write_config(workspace / "gaudi-etc", driver.root, ["runc"]))


def test_podman_by_hook_and_by_document(
    gaudi: Devices, own: Path, host: Namespace, workspace: Path, archive: Path
) -> None:
    with (
        podman_with_hook(gaudi, own, workspace / "gaudi-podman", host, archive) as engine,
        documents(gaudi, own, workspace / "gaudi-cdi", KIND),
    ):
        done = engine.run(image("debian"), *LOOK, env=(f"{MODULES}=0-1",))
        assert "no Gaudi '0-1': 0 doesn't exist" in done.failed().stderr
        done = engine.run(image("debian"), *LOOK, env=(f"{DEVICES}=4,10",))
        assert nodes_seen(done) == gaudi.nodes(*nodes(4, 10))
        done = run_with(engine, LOOK, f"{KIND}=10", f"{KIND}=2")
        assert nodes_seen(done) == gaudi.nodes(*nodes(2, 10))
        assert vendors.variables_seen(done, "HABANA_") == [f"{DEVICES}=void"]
