"""AMD's GPUs and partitions in real containers, on a simulated machine."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import bundles, vendors
from harness.bundles import Bundle
from harness.commands import run, wait_until
from harness.docker import Docker, dockerd
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.podman import Podman, podman
from harness.snapshot import nothing_left
from harness.standing import ONE, Site
from harness.vendors import MODES, USER, Devices, Seen, as_user, in_mode, nodes_seen

VIDEO, RENDER = 44, 105
LOOK = vendors.look("/dev/kfd", "/dev/dri/*")
CDI = Path("/etc/cdi")  # the session has an /etc of its own
# GPU 0, four partitions of GPU 1, GPU 2: what these have in /dev/dri.
NODES = [
    ("card1", "renderD128"),
    *((f"card{9 + number}", f"renderD{136 + number}") for number in range(4)),
    ("card17", "renderD144"),
]


@pytest.fixture(scope="module")
def gpus(installation: Installation, workspace: Path) -> Iterator[Devices]:
    """Three GPUs behind a management controller's card; the second is in four partitions."""
    settings = {"split": 1, "partitions": 4, "ids": "shared", "bmc": "yes"}
    with vendors.devices(installation, workspace / "amd", "amd", 3, **settings) as found:
        assert "GPU 2 at 0000:0b:00.0: card17, renderD144\n" in found.made
        yield found


@pytest.fixture
def config(bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, gpus: Devices) -> Path:
    return gpus.configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]))


def expected(gpus: Devices, *numbers: int, opened: str = "ENXIO") -> dict[str, Seen]:
    """Return what a container sees that has these devices."""
    names = [f"/dev/dri/{name}" for number in numbers for name in NODES[number]]
    return gpus.nodes("/dev/kfd", *names, opened=opened)


@MODES
def test_what_a_user_has_in_a_container(
    bundle: Bundle, config: Path, gpus: Devices, mode: str
) -> None:
    in_mode(config, mode)
    bundle.change(as_user)
    bundle.environ("AMD_VISIBLE_DEVICES=5, 2-3,5")
    bundle.command(*LOOK)
    with nothing_left(gpus.root, pid=bundle.namespace.pid):
        done = gpus.started(bundle, config)
    seen = nodes_seen(done)
    assert seen == expected(gpus, 5, 2, 3)
    owners = {path: owner for path, (_, _, mode, owner) in seen.items() if mode == "660"}
    assert owners["/dev/kfd"] == owners["/dev/dri/renderD144"] == f"0:{RENDER}"
    assert owners["/dev/dri/card17"] == f"0:{VIDEO}"
    assert vendors.groups_seen(done) == {USER, VIDEO, RENDER}
    added = vendors.variables_seen(done, "AMD_", "ROCR_", "HIP_", "LD_")
    assert added == ["AMD_VISIBLE_DEVICES=5, 2-3,5"]
    assert ("hooks" in bundle.spec()) == (mode == "hook")


@ONE
@MODES
def test_without_their_groups_a_user_may_open_none(
    bundle: Bundle, config: Path, gpus: Devices, mode: str
) -> None:
    in_mode(config, mode)
    off = "[features]\nno-additional-gids-for-device-nodes = true\n"
    config.write_text(config.read_text() + off)
    bundle.change(as_user)
    bundle.environ("AMD_VISIBLE_DEVICES=0")
    bundle.command(*LOOK)
    done = gpus.started(bundle, config)
    assert nodes_seen(done) == expected(gpus, 0, opened="EACCES")
    assert vendors.groups_seen(done) == {USER}


@MODES
@pytest.mark.parametrize("word", ["2", "0x84cafeae17e7610:1"])
def test_other_devices_cannot_be_opened(
    bundle: Bundle, config: Path, gpus: Devices, mode: str, word: str
) -> None:
    """Not the other partitions of its GPU either, nor those that nobody uses."""
    in_mode(config, mode)
    paths = ["/dev/kfd", "/dev/dri/card0", "/dev/dri/renderD143"]
    paths += [f"/dev/dri/{name}" for names in NODES for name in names]
    bundle.environ(f"AMD_VISIBLE_DEVICES={word}")
    bundle.command(*vendors.make_and_open(gpus, paths))
    own = {"/dev/kfd", "/dev/dri/card10", "/dev/dri/renderD137"}
    opened = vendors.opened(gpus.started(bundle, config), paths)
    assert opened == {path: "ENXIO" if path in own else "EPERM" for path in paths}


@ONE
@pytest.mark.parametrize(
    ("word", "numbers"),
    [
        ("all", range(6)),
        ("ALL", range(6)),
        ("0x084CAFEAE17E7610", range(1, 5)),
        ("08:00.0,0", range(5)),
        ("amd.com/gpu=5", [5]),
        ("none", []),
        ("None", []),
    ],
)
def test_names(
    bundle: Bundle, config: Path, gpus: Devices, word: str, numbers: range | list[int]
) -> None:
    bundle.environ(f"AMD_VISIBLE_DEVICES={word}")
    bundle.command(*LOOK)
    assert nodes_seen(gpus.started(bundle, config)) == expected(gpus, *numbers)


@ONE
@pytest.mark.parametrize("word", ["", "void", "0,Void"])
def test_a_container_that_asks_for_nothing(
    bundle: Bundle, config: Path, gpus: Devices, word: str
) -> None:
    bundle.environ(f"AMD_VISIBLE_DEVICES={word}")
    bundle.command(*LOOK)
    before = bundle.config.read_bytes()
    assert nodes_seen(gpus.started(bundle, config)) == {}
    assert bundle.config.read_bytes() == before


@MODES
def test_both_vendors_in_one_container(
    bundle: Bundle, config: Path, gpus: Devices, driver: Driver, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ("AMD_VISIBLE_DEVICES=0,5", "NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*vendors.look("/dev/kfd", "/dev/dri/*", driver=driver))
    with nothing_left(driver.root, gpus.root, pid=bundle.namespace.pid):
        done = gpus.started(bundle, config)
    assert nodes_seen(done) == expected(gpus, 0, 5)
    assert vendors.gpus_seen(done, driver) == {5}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("6", r"This machine has no AMD GPU '6': it has 0 \(0x84cafeae17e7600\), 1 \(0x.*"),
        ("4-6", r"This machine has no AMD GPU '4-6': 6 doesn't exist; it has 0 .*"),
        ("0xdeadbeef", r"This machine has no AMD GPU '0xdeadbeef': it has 0 .*"),
    ],
)
@ONE
def test_what_does_not_exist_is_refused_in_a_sentence(
    bundle: Bundle,
    config: Path,
    gpus: Devices,
    low_level: tuple[str, Namespace],
    word: str,
    sentence: str,
) -> None:
    bundle.environ(f"AMD_VISIBLE_DEVICES={word}")
    with nothing_left(gpus.root, bundle.root, pid=bundle.namespace.pid):
        said = gpus.refused(bundle, config)
    assert re.fullmatch(f"gpu-py: {sentence}\n", said), said
    bundle.call(low_level[0], "state", bundle.name).failed()


@ONE
def test_half_made_nodes(
    bundle: Bundle, installation: Installation, config: Path, workspace: Path
) -> None:
    """One that udev hasn't made, and one that is another device's."""
    with vendors.devices(installation, workspace / "amd-half", "amd", 3, missing=1) as half:
        text = config.read_text()
        config.write_text(re.sub(r"amd=[^\"]*", f"amd={half.root}", text))
        (half.root / "dev/dri/card2").unlink()
        shutil.move(half.root / "dev/dri/card0", half.root / "dev/dri/card2")
        run(["cp", "-a", half.root / "dev/dri/card2", half.root / "dev/dri/card0"]).ok()
        bundle.environ("AMD_VISIBLE_DEVICES=1")
        assert "has no node /dev/dri/card1, /dev/dri/renderD129" in half.refused(bundle, config)
        bundle.environ("AMD_VISIBLE_DEVICES=2")
        said = half.refused(bundle, config)
        assert re.search(r"GPU 2 can't be used: /dev/dri/card2 is another device's node", said)
        bundle.environ("AMD_VISIBLE_DEVICES=0")
        bundle.command(*LOOK)
        done = half.started(bundle, config)
        assert nodes_seen(done) == half.nodes("/dev/kfd", "/dev/dri/card0", "/dev/dri/renderD128")
        found = {each["message"] for each in half.ask(config, "doctor")["findings"]}
        assert any("no node /dev/dri/card1, /dev/dri/renderD129" in each for each in found)
        assert any("AMD GPU 2 (0x84cafeae17e7620) can't be used" in each for each in found)


def test_the_hook_alone(
    bundle: Bundle, config: Path, gpus: Devices, low_level: tuple[str, Namespace]
) -> None:
    gpus.hook(bundle, config)
    bundle.environ("AMD_VISIBLE_DEVICES=3")
    bundle.command(*LOOK)
    done = bundle.run(low_level[0])
    assert nodes_seen(done) == expected(gpus, 3)
    assert vendors.groups_seen(done) == {0}
    assert vendors.logged(config)["undone"] == [
        f"put the process in the host's group {RENDER}",
        f"put the process in the host's group {VIDEO}",
    ]


@ONE
def test_a_swarms_variable(bundle: Bundle, config: Path, gpus: Devices, driver: Driver) -> None:
    """One name for the GPUs of both vendors, told apart by what their ids look like."""
    config.write_text(f'swarm-resource = "DOCKER_RESOURCE_GPU"\n{config.read_text()}')
    bundle.environ(f"DOCKER_RESOURCE_GPU=0x84cafeae17e7620,{driver.gpus[5].uuid}")
    bundle.command(*vendors.look("/dev/kfd", "/dev/dri/*", driver=driver))
    done = gpus.started(bundle, config)
    assert nodes_seen(done) == expected(gpus, 5)
    assert vendors.gpus_seen(done, driver) == {5}


@ONE
def test_an_absent_driver_that_is_ignored_stops_no_other_vendor(
    bundle: Bundle, config: Path, gpus: Devices, driver: Driver, tmp_path: Path
) -> None:
    text = re.sub(r"amd=[^\"]*", f"amd={tmp_path}", config.read_text())
    config.write_text(text.replace("[gpuhook]\n", '[gpuhook]\nmissing-driver = "ignore"\n'))
    bundle.environ("AMD_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*vendors.look("/dev/kfd", "/dev/dri/*", driver=driver))
    done = gpus.started(bundle, config)
    assert vendors.gpus_seen(done, driver) == {5}
    assert nodes_seen(done) == {}
    assert "AMD's driver amdgpu isn't loaded" in vendors.logged(config)["warnings"][0]


@ONE
def test_an_absent_driver(bundle: Bundle, config: Path, gpus: Devices, tmp_path: Path) -> None:
    text = config.read_text()
    config.write_text(re.sub(r"amd=[^\"]*", f"amd={tmp_path}", text))
    bundle.environ("AMD_VISIBLE_DEVICES=all")
    assert "AMD's driver amdgpu isn't loaded. Run modprobe" in gpus.refused(bundle, config)


@ONE
@pytest.mark.parametrize(("word", "held"), [("2", True), ("0x84cafeae17e7610", True), ("1", False)])
def test_an_exclusive_gpu_is_one_containers(
    bundle: Bundle,
    config: Path,
    gpus: Devices,
    low_level: tuple[str, Namespace],
    workspace: Path,
    roots: dict[str, Path],
    word: str,
    held: bool,
) -> None:
    """One unique id may mean what somebody has; a partition beside that is another's to have."""
    text = config.read_text()
    config.write_text(text.replace("[gpuhook]\n", '[gpuhook]\nexclusive = ["amd.com/gpu"]\n'))
    bundle.environ("AMD_VISIBLE_DEVICES=2")
    gpus.start(bundle, config)
    runtime, entered = low_level
    with bundles.bundle(workspace / "bundles", roots["debian"], entered, runtime) as other:
        other.environ(f"AMD_VISIBLE_DEVICES={word}")
        other.command(*LOOK)
        done = gpus.started(other, config)
    if held:
        said = f"amd.com/gpu=0x84cafeae17e7610:1 is in use by the container {bundle.name}"
        assert said in done.failed().stderr
    else:
        assert nodes_seen(done) == expected(gpus, 1)


@ONE
def test_the_commands_name_its_devices(bundle: Bundle, config: Path, gpus: Devices) -> None:
    bundle.environ("AMD_VISIBLE_DEVICES=1,4")
    gpus.start(bundle, config)
    listed = gpus.ask(config, "list")
    holders = {device["label"]: device["containers"] for device in listed["devices"]}
    assert holders == {
        str(number): [bundle.name] if number in (1, 4) else [] for number in range(6)
    }
    explained = gpus.ask(config, "explain", "-e", "AMD_VISIBLE_DEVICES=0x84cafeae17e7610")
    assert explained["selected"] == [f"0x84cafeae17e7610:{number}" for number in range(4)]
    assert explained["undone"] == []
    info = run([gpus.installation.command, "info", "--config", config]).ok().stdout
    row = r"^2 +1002:74a2 qpx_nps1 +0000:08:00\.0 +0x84cafeae17e7610:1 +-$"
    assert re.search(row, info, re.MULTILINE)
    diagnosis = gpus.ask(config, "doctor")["findings"]
    found = {each["check"]: each for each in diagnosis if each["check"].startswith("amd-")}
    assert {name: each["status"] for name, each in found.items()} == {
        "amd-driver": "ok", "amd-devices": "ok",
    }  # fmt: skip


@ONE
def test_the_process_that_stands_ready_serves_it(
    bundle: Bundle,
    driver: Driver,
    gpus: Devices,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> None:
    """And notices that a GPU is partitioned otherwise."""
    site = Site(bundle, gpus.installation, driver, low_level[0], tmp_path)
    node = gpus.root / "sys/class/kfd/kfd/topology/nodes/6"
    away = gpus.root / "sys/node-6"
    try:
        gpus.configured(site.config)
        site.settle()
        bundle.environ("AMD_VISIBLE_DEVICES=4")
        site.plain = bundle.config.read_bytes()
        site.stand()
        site.works()
        assert site.served
        wait_until(site.is_standing, "it stands for the next")
        shutil.move(node, away)
        site.works()
        bundle.environ("AMD_VISIBLE_DEVICES=5")
        site.plain = bundle.config.read_bytes()
        assert "has no AMD GPU '5'" in site.run().failed().stdout
    finally:
        if away.exists():
            shutil.move(away, node)
        site.clear()


# Engines -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines_config(workspace: Path, driver: Driver, gpus: Devices) -> Path:
    return gpus.configured(write_config(workspace / "amd-engines", driver.root, ["runc"]))


@pytest.fixture(scope="module")
def docker(
    workspace: Path, host: Namespace, gpus: Devices, archive: Path, engines_config: Path
) -> Iterator[Docker]:
    runtimes = {"gpu-py": gpus.installation.runtime}
    env = {"GPUHOOK_CONFIG": str(engines_config)}
    with dockerd(workspace / "docker-amd", host, runtimes, archive, env) as engine:
        yield engine


def test_docker(docker: Docker, gpus: Devices) -> None:
    options = (f"--user={USER}:{USER}",)
    env = ("AMD_VISIBLE_DEVICES=1,5",)
    with nothing_left(gpus.root, pid=docker.pid):
        done = docker.run(image("debian"), *LOOK, env=env, options=options)
    assert nodes_seen(done) == expected(gpus, 1, 5)
    assert vendors.groups_seen(done) == {USER, VIDEO, RENDER}


def test_docker_says_what_is_refused(docker: Docker) -> None:
    done = docker.run(image("debian"), "true", env=("AMD_VISIBLE_DEVICES=17",)).failed()
    assert "This machine has no AMD GPU '17': it has 0 (" in done.stderr


@pytest.fixture(scope="module")
def podman_by_cdi(workspace: Path, host: Namespace, archive: Path) -> Iterator[Podman]:
    runtime = Path(run(["sh", "-c", "command -v runc"]).ok().stdout.strip())
    with podman(workspace / "podman-amd", host, runtime, archive) as made:
        yield made


NAMED = pytest.mark.parametrize(
    ("name", "numbers"), [("5", [5]), ("0x84cafeae17e7610:1", [2]), ("all", range(6))]
)


def document(gpus: Devices, config: Path, folder: Path) -> None:
    """Make the CDI document of the machine's GPUs in a folder."""
    argv: list[str | Path] = [gpus.installation.command, "cdi", "generate", "--config", config]
    run([*argv, "--kind=amd.com/gpu", "--output", folder]).ok()


@NAMED
def test_documents_that_engines_read(
    podman_by_cdi: Podman,
    gpus: Devices,
    driver: Driver,
    tmp_path: Path,
    name: str,
    numbers: range | list[int],
) -> None:
    """podman reads the document by itself; gpu-py has no part in it. This one knows no groups."""
    off = "[features]\nno-additional-gids-for-device-nodes = true\n"
    config = gpus.configured(write_config(tmp_path / "etc", driver.root, ["runc"]), tail=off)
    CDI.mkdir(exist_ok=True)
    try:
        document(gpus, config, CDI)
        options = (f"--device=amd.com/gpu={name}",)
        with nothing_left(gpus.root):
            done = podman_by_cdi.run(image("debian"), *LOOK, options=options)
        numbers_of = {path: what[1] for path, what in nodes_seen(done).items()}
        assert numbers_of == {path: what[1] for path, what in expected(gpus, *numbers).items()}
        assert vendors.variables_seen(done, "AMD_") == ["AMD_VISIBLE_DEVICES=void"]
    finally:
        (CDI / "amd.com-gpu.yaml").unlink(missing_ok=True)


@NAMED
def test_documents_where_engines_call_the_runtime(
    bundle: Bundle, config: Path, gpus: Devices, name: str, numbers: range | list[int]
) -> None:
    """In mode cdi, gpu-py does what a document says: groups and modes of nodes, too.

    By CDI's rules a node is the process' own where the document doesn't say whose it is.
    """
    specs = config.parent / "cdi"
    document(gpus, config, specs)
    in_mode(config, "cdi")
    section = "[nvidia-container-runtime.modes.cdi]"
    config.write_text(f'{config.read_text()}{section}\nspec-dirs = ["{specs}"]\n')
    bundle.change(as_user)
    bundle.environ(f"AMD_VISIBLE_DEVICES={name}")
    bundle.command(*LOOK)
    done = gpus.started(bundle, config)
    wanted = expected(gpus, *numbers)
    assert nodes_seen(done) == {
        path: (*what[:3], what[3].replace("0:", f"{USER}:", 1)) for path, what in wanted.items()
    }
    assert vendors.groups_seen(done) == {USER, VIDEO, RENDER}
