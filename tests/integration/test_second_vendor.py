"""The vendor of tests/vendors in an installed gpuhook: its NPUs in real containers."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import second_vendor
from harness import vendors
from harness.bundles import Bundle, Spec
from harness.commands import run, wait_until
from harness.driver import Driver
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.snapshot import nothing_left
from harness.standing import ONE, Site
from harness.vendors import MODES, USER, Devices, Seen, as_user, in_mode, nodes_seen

GROUP = second_vendor.GROUP
KNOW = """

from gpuhook.vendors.acme import names as acme

KNOWN[acme.NAME] = acme
"""
LOOK = vendors.look("/dev/acme*")


@pytest.fixture(scope="module")
def acme(installation: Installation, workspace: Path) -> Iterator[Installation]:
    """A copy of the installation that knows ACME: its files, an import and an entry more."""
    old, copy = installation.bin.parent, workspace / "acme-installed"
    shutil.copytree(old, copy, symlinks=True)
    [package] = copy.glob("lib/python3*/site-packages/gpuhook")
    folder, tools = package / "vendors", package / "tools/vendors"
    unneeded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(second_vendor.FOLDER / "acme", folder / "acme", ignore=unneeded)
    shutil.copytree(second_vendor.FOLDER / "tools/acme", tools / "acme", ignore=unneeded)
    simulators = package.parent / "gpuhook_simulate/vendors"
    shutil.copy(second_vendor.FOLDER / "simulate/acme.py", simulators)
    with (folder / "registry.py").open("a") as registry:
        registry.write(KNOW)
    run([copy / "bin/python3", "-m", "compileall", "-q", package]).ok()
    yield Installation(copy / "bin")
    shutil.rmtree(copy)


@pytest.fixture(scope="module")
def npus(acme: Installation, workspace: Path) -> Iterator[Devices]:
    """Four NPUs on two boards; 1 is split, 3 is being reset."""
    root = workspace / "acme-driver"
    with vendors.devices(acme, root, "acme", 4, boards=2, split=1, reset=3) as found:
        assert "NPU 2: A-0002 on board B0\n" in found.made
        assert "part 1.1\n" in found.made
        yield found


@pytest.fixture
def config(bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, npus: Devices) -> Path:
    return npus.configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]))


def expected(npus: Devices, *labels: int, opened: str = "ENXIO") -> dict[str, Seen]:
    found = npus.nodes("/dev/acmectl")
    for label in labels:
        found |= npus.nodes(f"/dev/acme{label}", opened=opened)
        found[f"/dev/acme/dma{label}"] = npus.node(f"/dev/acme_dma{label}", opened)
    return found


@MODES
def test_what_a_user_has_in_a_container(
    bundle: Bundle, config: Path, npus: Devices, mode: str
) -> None:
    in_mode(config, mode)
    bundle.change(as_user)
    bundle.environ("ACME_VISIBLE_DEVICES=2,0", "ACME_PLUGIN_PATH=/mine", "ACME_DEVICES=7")
    bundle.command(*LOOK)
    with nothing_left(npus.root, pid=bundle.namespace.pid):
        done = npus.started(bundle, config)
    assert nodes_seen(done) == expected(npus, 0, 2)
    assert vendors.groups_seen(done) == {USER, GROUP}
    assert sorted(vendors.variables_seen(done, "ACME_DEV", "ACME_PL")) == [
        "ACME_DEVICES=2,0",
        "ACME_PLUGIN_PATH=/opt/acme/plugins:/mine",
    ]
    assert ("hooks" in bundle.spec()) == (mode == "hook")


@ONE
@MODES
def test_without_its_group_a_user_may_not_open_it(
    bundle: Bundle, config: Path, npus: Devices, mode: str
) -> None:
    off = "[features]\nno-additional-gids-for-device-nodes = true\n"
    in_mode(config, mode)
    config.write_text(config.read_text() + off)
    bundle.change(as_user)
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    bundle.command(*LOOK)
    done = npus.started(bundle, config)
    assert nodes_seen(done) == expected(npus, 0, opened="EACCES")
    assert vendors.groups_seen(done) == {USER}


@MODES
def test_what_was_not_asked_for_cannot_be_opened(
    bundle: Bundle, config: Path, npus: Devices, mode: str
) -> None:
    in_mode(config, mode)
    paths = [f"/dev/acme{name}" for name in ("0", "1", "2", "1.0", "1.1")]
    bundle.environ("ACME_VISIBLE_DEVICES=1.0")
    bundle.command(*vendors.make_and_open(npus, paths))
    assert vendors.opened(npus.started(bundle, config), paths) == {
        path: "ENXIO" if path == "/dev/acme1.0" else "EPERM" for path in paths
    }


@MODES
def test_both_vendors_in_one_container(
    bundle: Bundle, config: Path, npus: Devices, driver: Driver, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ("ACME_VISIBLE_BOARDS=B0", "NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*vendors.look("/dev/acme*", driver=driver))
    with nothing_left(driver.root, npus.root, pid=bundle.namespace.pid):
        done = npus.started(bundle, config)
    assert nodes_seen(done) == expected(npus, 0, 2)
    assert vendors.gpus_seen(done, driver) == {5}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("9", r"This machine has no NPU or part of one '9': it has 0 \(A-0000\), 1 \(A-0001\), .*"),
        ("3", r"NPU 3 can't be used: it is in reset\. Wait until its reset is over.*"),
        ("0,1", r"NPUs of the boards B0 and B1 can't work in one container\. Ask for .*"),
    ],
)
@ONE
def test_what_cannot_be_had_is_refused_in_a_sentence(
    bundle: Bundle,
    config: Path,
    npus: Devices,
    low_level: tuple[str, Namespace],
    asked: str,
    sentence: str,
) -> None:
    bundle.environ(f"ACME_VISIBLE_DEVICES={asked}")
    with nothing_left(npus.root, bundle.root, pid=bundle.namespace.pid):
        said = npus.refused(bundle, config)
    assert re.fullmatch(f"gpu-py: {sentence}\n", said), said
    bundle.call(low_level[0], "state", bundle.name).failed()


def test_the_hook_alone(
    bundle: Bundle, config: Path, npus: Devices, low_level: tuple[str, Namespace]
) -> None:
    """Nodes and their rules are its work; the process is what only a runtime can change."""
    npus.hook(bundle, config)
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    bundle.command(*LOOK)
    done = bundle.run(low_level[0])
    assert nodes_seen(done) == expected(npus, 0)
    assert vendors.groups_seen(done) == {0}
    assert vendors.variables_seen(done, "ACME_") == ["ACME_VISIBLE_DEVICES=0"]
    assert vendors.logged(config)["undone"] == [
        f"put the process in the host's group {GROUP}",
        "set ACME_DEVICES=0",
        "put /opt/acme/plugins in front of ACME_PLUGIN_PATH",
    ]


def test_with_the_runtime_nothing_is_undone(bundle: Bundle, config: Path, npus: Devices) -> None:
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    npus.started(bundle, config).ok()
    entry = vendors.logged(config)
    assert entry["undone"] == []
    assert entry["devices"] == ["A-0000"]


@ONE
def test_the_commands_name_its_devices(bundle: Bundle, config: Path, npus: Devices) -> None:
    bundle.environ("ACME_VISIBLE_DEVICES=1.0")
    npus.start(bundle, config)
    listed = npus.ask(config, "list")
    holders = {device["label"]: device["containers"] for device in listed["devices"]}
    assert holders == {
        label: [bundle.name] if label == "1.0" else []
        for label in ("0", "1", "1.0", "1.1", "2", "3")
    }
    assert len(listed["gpus"]) == 8
    explained = npus.ask(config, "explain", "-e", "ACME_VISIBLE_DEVICES=0")
    assert explained["selected"] == ["A-0000"]
    assert explained["undone"] == []
    info = run([npus.installation.command, "info", "--config", config]).ok().stdout
    assert re.search(
        r"^3 +ACME NPU 100 +0000:44:00\.0 +A-0003 +it is in reset$", info, re.MULTILINE
    )
    diagnosis = npus.ask(config, "doctor")["findings"]
    findings = [each for each in diagnosis if each["check"] == "acme-devices"]
    assert [each["status"] for each in findings] == ["ok", "warning"]
    assert "NPU 3 (A-0003) can't be used: it is in reset" in findings[1]["message"]


@ONE
def test_the_process_that_stands_ready_serves_it(
    bundle: Bundle,
    driver: Driver,
    npus: Devices,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> None:
    """And notices what becomes of its devices."""
    site = Site(bundle, npus.installation, driver, low_level[0], tmp_path)
    state = npus.root / "sys/class/acme/acme0/state"
    try:
        npus.configured(site.config)
        site.settle()
        bundle.environ("ACME_VISIBLE_DEVICES=0")
        site.plain = bundle.config.read_bytes()
        site.stand()
        site.works()
        assert site.served
        assert "ACME_DEVICES=0" in bundle.spec()["process"]["env"]
        wait_until(site.is_standing, "it stands for the next")
        state.unlink()
        state.write_text("in reset\n")
        assert "NPU 0 can't be used" in site.run().failed().stdout
    finally:
        state.unlink(missing_ok=True)
        state.write_text("ready\n")
        site.clear()


@ONE
def test_an_absent_vendor_that_is_ignored_stops_no_other(
    bundle: Bundle, config: Path, npus: Devices, driver: Driver
) -> None:
    absent(config, "ignore")
    bundle.environ("ACME_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*vendors.look("/dev/acme*", driver=driver))
    done = npus.started(bundle, config)
    assert vendors.gpus_seen(done, driver) == {5}
    assert nodes_seen(done) == {}
    assert "ACME's driver root /nonexistent can't be read" in vendors.logged(config)["warnings"][0]


@ONE
@pytest.mark.parametrize("setting", ["ignore", "fail"])
def test_a_container_that_asks_for_whatever_there_is(
    bundle: Bundle, config: Path, npus: Devices, low_level: tuple[str, Namespace], setting: str
) -> None:
    """By the runtime, and by the hook that podman adds."""
    absent(config, setting)
    bundle.environ("ACME_VISIBLE_DEVICES=all")
    bundle.command(*LOOK)
    by_runtime = npus.started(bundle, config)
    npus.hook(bundle, config)
    by_hook = bundle.run(low_level[0])
    if setting == "fail":
        for done in (by_runtime, by_hook):
            assert "ACME's driver root /nonexistent can't be read" in done.failed().stderr
        return
    assert nodes_seen(by_runtime) == nodes_seen(by_hook) == {}
    entries = map(json.loads, vendors.debug_log(config).read_text().splitlines())
    words = ["ACME's driver root /nonexistent can't be read: No such file or directory"]
    assert [entry["warnings"] for entry in entries] == [words, words]


def absent(config: Path, setting: str) -> None:
    """Have ACME's driver root be missing, and the configuration say what that means."""
    text = re.sub(r"acme=[^\"]*", "acme=/nonexistent", config.read_text())
    config.write_text(text.replace("[gpuhook]\n", f'[gpuhook]\nmissing-driver = "{setting}"\n'))


@ONE
def test_one_root_for_all_vendors(bundle: Bundle, config: Path, npus: Devices) -> None:
    """NVIDIA's setting is every vendor's, and ours comes before it."""
    text = re.sub(r"driver-roots = .*\n", "", config.read_text())
    own = f'root = "{npus.root}"\n'
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    bundle.command(*LOOK)
    for wanted in (
        re.sub(r'root = ".*"\n', own, text),
        text.replace("[gpuhook]\n", f"[gpuhook]\n{own}"),
    ):
        config.write_text(wanted)
        assert nodes_seen(npus.started(bundle, config)) == expected(npus, 0)
    explained = npus.ask(config, "explain", "-e", "ACME_VISIBLE_DEVICES=0")
    assert explained["inventory"]["driver_root"] == str(npus.root)


@ONE
@MODES
def test_a_node_that_config_json_has_already(
    bundle: Bundle, config: Path, npus: Devices, mode: str
) -> None:
    """As by ``--device`` beside the variable: it is there once, and allowed once."""
    in_mode(config, mode)
    major, minor = (int(word, 16) for word in npus.numbers("/dev/acme0").split(":"))
    node = {"path": "/dev/acme0", "type": "c", "major": major, "minor": minor, "fileMode": 0o600}
    rule = {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"}

    def give(spec: Spec) -> None:
        spec["linux"]["devices"] = [node]
        spec["linux"]["resources"]["devices"].append(rule)

    bundle.change(give)
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    bundle.command(*LOOK)
    for _ in range(2):
        assert nodes_seen(npus.started(bundle, config)) == expected(npus, 0)
    spec = bundle.spec()
    paths = [each["path"] for each in spec["linux"]["devices"]]
    assert paths.count("/dev/acme0") == 1
    numbers = [
        (each["major"], each["minor"])
        for each in spec["linux"]["resources"]["devices"]
        if "major" in each
    ]
    assert len(numbers) == len(set(numbers))
    assert (major, minor) in numbers
