"""The vendor of tests/vendors in an installed gpuhook: its NPUs in real containers."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import second_vendor
from harness.bundles import Bundle, Spec
from harness.commands import Result, run, wait_until
from harness.driver import Driver
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.snapshot import nothing_left
from harness.standing import ONE, Site

GROUP = second_vendor.GROUP
USER = 1000
IMPORT = "from gpuhook.vendors.nvidia import names as nvidia\n"
KNOWN = "{nvidia.NAME: nvidia}"
MODES = pytest.mark.parametrize("mode", ["hook", "spec"])
# What a container sees: its nodes, its groups and its variables.
SEE = """
for node in $(busybox find /dev -type c -path '/dev/acme*'); do
    echo "node $(devopen $node) $(busybox stat -c '%t:%T %a %u:%g' $node)"
done
echo "groups $(busybox id -G)"
busybox env | busybox grep '^ACME_'
"""


@pytest.fixture(scope="module")
def acme(installation: Installation, workspace: Path) -> Iterator[Installation]:
    """A copy of the installation that knows ACME: its folder, an import and an entry more."""
    old, copy = installation.bin.parent, workspace / "acme-installed"
    shutil.copytree(old, copy, symlinks=True)
    script = copy / "bin/gpuhook"
    script.write_text(script.read_text().replace(str(old), str(copy)))
    [vendors] = copy.glob("lib/python3*/site-packages/gpuhook/vendors")
    unneeded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(second_vendor.FOLDER / "acme", vendors / "acme", ignore=unneeded)
    text = (vendors / "seam.py").read_text()
    assert IMPORT in text
    assert KNOWN in text
    text = text.replace(IMPORT, f"{IMPORT}from gpuhook.vendors.acme import names as acme\n")
    text = text.replace(KNOWN, f"{KNOWN[:-1]}, acme.NAME: acme}}")
    (vendors / "seam.py").write_text(text)
    run([copy / "bin/python3", "-m", "compileall", "-q", vendors]).ok()
    yield Installation(copy / "bin")
    shutil.rmtree(copy)


@pytest.fixture(scope="module")
def npus(acme: Installation, workspace: Path) -> Iterator[Path]:
    """A driver root with four NPUs on two boards; 1 is split, 3 is being reset."""
    root = workspace / "acme-driver"
    words = ["--vendor=acme", "--gpus=4", "--set=boards=2", "--set=split=1", "--set=reset=3"]
    made = run([acme.command, "simulate", root, *words]).ok().stdout
    assert "NPU 2: A-0002 on board B0\n" in made
    assert "part 1.1\n" in made
    yield root
    run([acme.command, "simulate", "--remove", root]).ok()


def configured(config: Path, npus: Path, *, more: str = "", tail: str = "") -> Path:
    """Have a configuration name ACME's driver root and a debug log."""
    text = config.read_text()
    text = text.replace("[gpuhook]\n", f'[gpuhook]\ndriver-roots = ["acme={npus}"]\n{more}')
    debug = config.parent / "debug.log"
    cli = "[nvidia-container-cli]\n"
    config.write_text(text.replace(cli, f'{cli}debug = "{debug}"\n') + tail)
    return config


@pytest.fixture
def config(bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, npus: Path) -> Path:
    return configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]), npus)


def started(bundle: Bundle, acme: Installation, config: Path) -> Result:
    return bundle.run(acme.runtime, {"GPUHOOK_CONFIG": str(config)})


def as_user(spec: Spec) -> None:
    """Have the container's process be somebody without privileges."""
    spec["process"]["user"] = {"uid": USER, "gid": USER}


def numbers(npus: Path, path: str) -> str:
    """Return a node's numbers as busybox stat prints them."""
    device = (npus / path.lstrip("/")).stat().st_rdev
    return f"{device >> 8:x}:{device & 0xFF:x}"


def nodes_seen(result: Result) -> dict[str, tuple[str, ...]]:
    """Return what a container saw of its nodes: what open gave, numbers, mode, owner; by path."""
    lines = [line.split() for line in result.ok().stdout.splitlines()]
    return {words[1]: tuple(words[2:]) for words in lines if words[0] == "node"}


def expected(npus: Path, *labels: int, opened: str = "ENXIO") -> dict[str, tuple[str, ...]]:
    owner = f"0:{GROUP}"
    found: dict[str, tuple[str, ...]] = {}
    found["/dev/acmectl"] = ("ENXIO", numbers(npus, "/dev/acmectl"), "666", "0:0")
    for label in labels:
        node, dma = f"/dev/acme{label}", f"/dev/acme_dma{label}"
        found[node] = (opened, numbers(npus, node), "660", owner)
        found[f"/dev/acme/dma{label}"] = (opened, numbers(npus, dma), "660", owner)
    return found


@MODES
def test_what_a_user_has_in_a_container(
    bundle: Bundle, acme: Installation, config: Path, npus: Path, mode: str
) -> None:
    config.write_text(f'{config.read_text()}mode = "{mode}"\n')
    bundle.change(as_user)
    bundle.environ("ACME_VISIBLE_DEVICES=2,0", "ACME_PLUGIN_PATH=/mine", "ACME_DEVICES=7")
    bundle.command("sh", "-c", SEE)
    with nothing_left(npus, pid=bundle.namespace.pid):
        done = started(bundle, acme, config)
    assert nodes_seen(done) == expected(npus, 0, 2)
    lines = done.stdout.splitlines()
    assert f"groups {USER} {GROUP}" in lines
    assert {line for line in lines if line.startswith(("ACME_DEV", "ACME_PL"))} == {
        "ACME_DEVICES=2,0",
        "ACME_PLUGIN_PATH=/opt/acme/plugins:/mine",
    }
    assert ("hooks" in bundle.spec()) == (mode == "hook")


@ONE
@MODES
def test_without_its_group_a_user_may_not_open_it(
    bundle: Bundle, acme: Installation, config: Path, npus: Path, mode: str
) -> None:
    off = "[features]\nno-additional-gids-for-device-nodes = true\n"
    config.write_text(f'{config.read_text()}mode = "{mode}"\n{off}')
    bundle.change(as_user)
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    bundle.command("sh", "-c", SEE)
    done = started(bundle, acme, config)
    assert nodes_seen(done) == expected(npus, 0, opened="EACCES")
    assert f"groups {USER}" in done.stdout.splitlines()


@MODES
def test_what_was_not_asked_for_cannot_be_opened(
    bundle: Bundle, acme: Installation, config: Path, npus: Path, mode: str
) -> None:
    config.write_text(f'{config.read_text()}mode = "{mode}"\n')
    script = ""
    paths = [f"/dev/acme{name}" for name in ("0", "1", "2", "1.0", "1.1")]
    for number, path in enumerate(paths):
        device = (npus / path.lstrip("/")).stat().st_rdev
        made = f"/by-hand-{number}"
        script += f"busybox mknod {made} c {device >> 8} {device & 0xFF} && devopen {made}\n"
    bundle.environ("ACME_VISIBLE_DEVICES=1.0")
    bundle.command("sh", "-c", script)
    opened = [line.split()[1] for line in started(bundle, acme, config).ok().stdout.splitlines()]
    assert dict(zip(paths, opened, strict=True)) == {
        path: "ENXIO" if path == "/dev/acme1.0" else "EPERM" for path in paths
    }


@MODES
def test_both_vendors_in_one_container(
    bundle: Bundle, acme: Installation, config: Path, npus: Path, driver: Driver, mode: str
) -> None:
    config.write_text(f'{config.read_text()}mode = "{mode}"\n')
    bundle.environ("ACME_VISIBLE_BOARDS=B0", "NVIDIA_VISIBLE_DEVICES=5")
    _, _, script = look(driver.minors)
    bundle.command("sh", "-c", f"nvidia-smi -L\n{script}\n{SEE}")
    with nothing_left(driver.root, npus, pid=bundle.namespace.pid):
        done = started(bundle, acme, config)
    assert [gpu.uuid in done.stdout for gpu in driver.gpus].count(True) == 1
    nodes = nodes_seen(done)
    gpu = driver.gpus[5]
    assert {path: what for path, what in nodes.items() if "acme" in path} == expected(npus, 0, 2)
    assert nodes[f"/dev/nvidia{gpu.minor}"][0] == "ENXIO"
    by_hand = [line for line in done.stdout.splitlines() if line.startswith("by-hand")]
    opened = {int(line.split()[1]) for line in by_hand if line.endswith("ENXIO")}
    assert opened == {gpu.minor}


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
    acme: Installation,
    config: Path,
    npus: Path,
    low_level: tuple[str, Namespace],
    asked: str,
    sentence: str,
) -> None:
    bundle.environ(f"ACME_VISIBLE_DEVICES={asked}")
    before = bundle.config.read_bytes()
    env = {"GPUHOOK_CONFIG": str(config)}
    with nothing_left(npus, bundle.root, pid=bundle.namespace.pid):
        words = ("create", "--bundle", bundle.path, bundle.name)
        done = bundle.call(acme.runtime, *words, env=env).failed()
    assert re.fullmatch(f"gpu-py: {sentence}\n", done.stderr), done.stderr
    assert bundle.config.read_bytes() == before
    bundle.call(low_level[0], "state", bundle.name).failed()


def test_the_hook_alone(
    bundle: Bundle,
    acme: Installation,
    config: Path,
    npus: Path,
    low_level: tuple[str, Namespace],
) -> None:
    """Nodes and their rules are its work; the process is what only a runtime can change."""
    args = [acme.hook.name, "--config", str(config), "prestart"]
    hook = {"path": str(acme.hook), "args": args, "env": ["PATH=/usr/bin:/bin"]}
    bundle.change(lambda spec: spec.update(hooks={"prestart": [hook]}))
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    bundle.command("sh", "-c", SEE)
    done = bundle.run(low_level[0])
    assert nodes_seen(done) == expected(npus, 0)
    lines = done.stdout.splitlines()
    assert "groups 0" in lines
    assert [line for line in lines if line.startswith("ACME_")] == ["ACME_VISIBLE_DEVICES=0"]
    [entry] = (config.parent / "debug.log").read_text().splitlines()
    assert json.loads(entry)["undone"] == [
        f"put the process in the host's group {GROUP}",
        "set ACME_DEVICES=0",
        "put /opt/acme/plugins in front of ACME_PLUGIN_PATH",
    ]


def test_with_the_runtime_nothing_is_undone(
    bundle: Bundle, acme: Installation, config: Path
) -> None:
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    started(bundle, acme, config).ok()
    [entry] = (config.parent / "debug.log").read_text().splitlines()
    assert json.loads(entry)["undone"] == []
    assert json.loads(entry)["devices"] == ["A-0000"]


def start(bundle: Bundle, acme: Installation, config: Path) -> None:
    """Start the bundle's container and let it run."""
    bundle.command("sleep", "1000")
    quiet = ["sh", "-c", 'exec "$@" </dev/null >/dev/null 2>&1', "sh"]
    words: list[str | Path] = ["run", "--detach", "--bundle", bundle.path, bundle.name]
    bundle.call(*quiet, acme.runtime, *words, env={"GPUHOOK_CONFIG": str(config)}).ok()


def asked(acme: Installation, config: Path, *words: str) -> Any:
    """Return what a command says as JSON."""
    done = run([acme.command, *words, "--config", config, "--format", "json"])
    return json.loads(done.stdout)


@ONE
def test_the_commands_name_its_devices(
    bundle: Bundle, acme: Installation, config: Path, npus: Path
) -> None:
    bundle.environ("ACME_VISIBLE_DEVICES=1.0")
    start(bundle, acme, config)
    listed = asked(acme, config, "list")
    holders = {device["label"]: device["containers"] for device in listed["devices"]}
    assert holders == {
        label: [bundle.name] if label == "1.0" else []
        for label in ("0", "1", "1.0", "1.1", "2", "3")
    }
    assert len(listed["gpus"]) == 8
    explained = asked(acme, config, "explain", "-e", "ACME_VISIBLE_DEVICES=0")
    assert explained["selected"] == ["A-0000"]
    assert explained["undone"] == []
    info = run([acme.command, "info", "--config", config]).ok().stdout
    assert re.search(
        r"^3 +ACME NPU 100 +0000:44:00\.0 +A-0003 +it is in reset$", info, re.MULTILINE
    )
    diagnosis = asked(acme, config, "doctor")["findings"]
    findings = [each for each in diagnosis if each["check"] == "acme-devices"]
    assert [each["status"] for each in findings] == ["ok", "warning"]
    assert "NPU 3 (A-0003) can't be used: it is in reset" in findings[1]["message"]


@ONE
def test_the_process_that_stands_ready_serves_it(
    bundle: Bundle,
    acme: Installation,
    driver: Driver,
    npus: Path,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> None:
    """And notices what becomes of its devices."""
    site = Site(bundle, acme, driver, low_level[0], tmp_path)
    state = npus / "sys/class/acme/acme0/state"
    try:
        configured(site.config, npus)
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
    bundle: Bundle, acme: Installation, config: Path, driver: Driver
) -> None:
    text = re.sub(r"acme=[^\"]*", "acme=/nonexistent", config.read_text())
    config.write_text(text.replace("[gpuhook]\n", '[gpuhook]\nmissing-driver = "ignore"\n'))
    bundle.environ("ACME_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look(driver.minors))
    assert seen(started(bundle, acme, config)).gpu_minors == {driver.gpus[5].minor}
    [entry] = (config.parent / "debug.log").read_text().splitlines()
    assert "ACME's driver root /nonexistent can't be read" in json.loads(entry)["warnings"][0]


@ONE
@pytest.mark.parametrize("setting", ["ignore", "fail"])
def test_a_container_that_asks_for_whatever_there_is(
    bundle: Bundle, acme: Installation, config: Path, low_level: tuple[str, Namespace], setting: str
) -> None:
    """By the runtime, and by the hook that podman adds."""
    text = re.sub(r"acme=[^\"]*", "acme=/nonexistent", config.read_text())
    config.write_text(text.replace("[gpuhook]\n", f'[gpuhook]\nmissing-driver = "{setting}"\n'))
    bundle.environ("ACME_VISIBLE_DEVICES=all")
    bundle.command("sh", "-c", SEE)
    args = [acme.hook.name, "--config", str(config), "prestart"]
    hook = {"path": str(acme.hook), "args": args, "env": ["PATH=/usr/bin:/bin"]}
    by_runtime = started(bundle, acme, config)
    bundle.change(lambda spec: spec.update(hooks={"prestart": [hook]}))
    by_hook = bundle.run(low_level[0])
    entries = [json.loads(line) for line in (config.parent / "debug.log").read_text().splitlines()]
    if setting == "fail":
        for done in (by_runtime, by_hook):
            assert "ACME's driver root /nonexistent can't be read" in done.failed().stderr
        return
    assert nodes_seen(by_runtime) == nodes_seen(by_hook) == {}
    words = ["ACME's driver root /nonexistent can't be read: No such file or directory"]
    assert [entry["warnings"] for entry in entries] == [words, words]


@ONE
def test_one_root_for_all_vendors(
    bundle: Bundle, acme: Installation, config: Path, npus: Path
) -> None:
    """NVIDIA's setting is every vendor's, and ours comes before it."""
    text = re.sub(r"driver-roots = .*\n", "", config.read_text())
    own = f'root = "{npus}"\n'
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    bundle.command("sh", "-c", SEE)
    for wanted in (
        re.sub(r'root = ".*"\n', own, text),
        text.replace("[gpuhook]\n", f"[gpuhook]\n{own}"),
    ):
        config.write_text(wanted)
        assert nodes_seen(started(bundle, acme, config)) == expected(npus, 0)
    explained = asked(acme, config, "explain", "-e", "ACME_VISIBLE_DEVICES=0")
    assert explained["inventory"]["driver_root"] == str(npus)
