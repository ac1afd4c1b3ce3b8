"""Huawei Ascend's NPUs, simulated, in real containers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import vendors
from harness.bundles import Bundle
from harness.commands import Result, run
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.snapshot import nothing_left
from harness.standing import ONE
from harness.vendor_engines import documents, podman_with_hook, run_with
from harness.vendors import MODES, USER, Devices, Seen, as_user, in_mode, nodes_seen

ASK = "ASCEND_VISIBLE_DEVICES"
KIND = "ascend.com/npu"
GROUP = 1000
LOOK = vendors.look("/dev/*davinci*", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp*", "/dev/ub*")
SHARED = (
    "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist",
    "/dev/uburma/ub0",
)  # fmt: skip
LIBRARY = "libascend_hal.so"
DRIVER_FOLDER = "/usr/local/Ascend/driver"
# What a container has of the files; the loader finds the library without any variable.
FILES = f"""
echo "library $(dlprobe {LIBRARY})"
npu-smi
for path in /etc/hccl_rootinfo.json {DRIVER_FOLDER}/lib64 /usr/local/dcmi /run/docker.sock; do
    [ ! -e $path ] || echo "path $path"
done
touch {DRIVER_FOLDER}/lib64/mine 2>/dev/null || echo read-only
"""


@pytest.fixture(scope="module")
def npus(installation: Installation, workspace: Path) -> Iterator[Devices]:
    """Eleven NPUs, 7 of them split, 4 unplugged; and what isn't one."""
    numbers = ",".join(str(number) for number in range(12) if number != 4)
    settings = {"numbers": numbers, "vnpus": "212,213", "ub": "ub0", "decoys": "yes"}
    root = workspace / "ascend-driver"
    with vendors.devices(installation, root, "ascend", 0, **settings) as found:
        assert "NPU 11: Ascend 910B at 0000:0b:00.0\n" in found.made
        assert "vNPU 212\n" in found.made
        yield found


@pytest.fixture
def config(bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, npus: Devices) -> Path:
    return npus.configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]))


def expected(npus: Devices, *numbers: int, opened: str = "ENXIO") -> dict[str, Seen]:
    """Return what a container sees that has these NPUs, or vNPUs from 100 on."""
    found = npus.nodes(*SHARED, opened=opened)
    for number in numbers:
        sort = "vdavinci" if number >= 100 else "davinci"
        found[f"/dev/davinci{number}"] = npus.node(f"/dev/{sort}{number}", opened)
    return found


def library_of(npus: Devices) -> str:
    """Return what dlprobe says of the host's library."""
    path = f"{DRIVER_FOLDER}/lib64/driver/{LIBRARY}"
    status = (npus.root / path.lstrip("/")).stat()
    return f"{path} {status.st_dev}:{status.st_ino}"


def lines_seen(done: Result, kind: str) -> list[str]:
    lines = done.ok().stdout.splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{kind} ")]


@MODES
def test_exactly_what_was_asked_for(bundle: Bundle, config: Path, npus: Devices, mode: str) -> None:
    in_mode(config, mode)
    bundle.change(as_user)
    bundle.environ(f"{ASK}=11, 2 - 3,212", "LD_LIBRARY_PATH=/mine")
    bundle.command(*LOOK)
    with nothing_left(npus.root, pid=bundle.namespace.pid):
        done = npus.started(bundle, config)
    assert nodes_seen(done) == expected(npus, 2, 3, 11, 212)
    assert vendors.groups_seen(done) == {USER, GROUP}
    assert vendors.variables_seen(done, "ASCEND_DOCKER", "LD_") == [
        "LD_LIBRARY_PATH=/mine",
        "ASCEND_DOCKER_RUNTIME=True",
    ]


@pytest.mark.parametrize("bundle", ["debian", "lib64"], indirect=True)
def test_files_and_the_loader(bundle: Bundle, config: Path, npus: Devices) -> None:
    bundle.environ(f"{ASK}=0")
    bundle.command("sh", "-c", FILES)
    with nothing_left(npus.root, pid=bundle.namespace.pid):
        done = npus.started(bundle, config)
    [library] = lines_seen(done, "library")
    assert library == f"{LIBRARY} {library_of(npus)}"
    assert lines_seen(done, "path") == [
        "/etc/hccl_rootinfo.json", f"{DRIVER_FOLDER}/lib64", "/usr/local/dcmi",
    ]  # fmt: skip
    assert {"npu-smi 24.1.rc3", "read-only"} < {*done.stdout.splitlines()}


@ONE
def test_nodes_alone(bundle: Bundle, config: Path, npus: Devices) -> None:
    bundle.environ(f"{ASK}=0", "ASCEND_RUNTIME_OPTIONS=NODRV", "DISABLE_UB_MOUNT=True")
    bundle.command("sh", "-c", f"{LOOK[-1]}\nls {DRIVER_FOLDER} 2>/dev/null && echo there")
    bundle.command("sh", "-c", f"{LOOK[-1]}\n[ ! -e {DRIVER_FOLDER} ] && echo no files")
    done = npus.started(bundle, config)
    wanted = expected(npus, 0)
    del wanted["/dev/uburma/ub0"]
    assert nodes_seen(done) == wanted
    assert "no files" in done.stdout.splitlines()


@ONE
@MODES
def test_vnpus_by_the_option(bundle: Bundle, config: Path, npus: Devices, mode: str) -> None:
    in_mode(config, mode)
    bundle.environ(f"{ASK}=all", "ASCEND_RUNTIME_OPTIONS=VIRTUAL")
    bundle.command(*LOOK)
    assert nodes_seen(npus.started(bundle, config)) == expected(npus, 212, 213)


@ONE
def test_no_engine_socket_is_given(bundle: Bundle, config: Path, npus: Devices) -> None:
    """Neither by the vendor's variable nor by a list."""
    lists = npus.root / "etc/ascend-docker-runtime.d"
    (npus.root / "run").mkdir(exist_ok=True)
    socket, mine = npus.root / "run/docker.sock", lists / "mine.list"
    try:
        socket.write_text("")
        mine.write_text("/run/docker.sock\n/run\n/usr/local/dcmi\n")
        bundle.environ(f"{ASK}=0", "ASCEND_RUNTIME_MOUNTS=MINE", "MOUNT_BY_RUNTIME_FOR_DP=1")
        bundle.command("sh", "-c", FILES)
        done = npus.started(bundle, config)
        assert lines_seen(done, "path") == ["/etc/hccl_rootinfo.json", "/usr/local/dcmi"]
        warnings = vendors.logged(config)["warnings"]
        assert warnings[0].startswith("The list mine has /run/docker.sock, which is of /run/docker")
        assert "which contains /run/" in warnings[1]
        explained = npus.ask(config, "explain", "--bundle", str(bundle.path))
        assert explained["warnings"] == warnings
        [ignored] = explained["request"]["ignored"]
        assert ignored["reason"].startswith("MOUNT_BY_RUNTIME_FOR_DP asks for the engines' sockets")
    finally:
        mine.unlink(missing_ok=True)
        socket.unlink(missing_ok=True)


@MODES
def test_what_was_not_asked_for_cannot_be_opened(
    bundle: Bundle, config: Path, npus: Devices, mode: str
) -> None:
    in_mode(config, mode)
    paths = [f"/dev/{name}" for name in ("davinci0", "davinci1", "vdavinci212", "vdavinci213")]
    bundle.environ(f"{ASK}=1,213")
    bundle.command(*vendors.make_and_open(npus, paths))
    assert vendors.opened(npus.started(bundle, config), paths) == {
        path: "ENXIO" if path in (paths[1], paths[3]) else "EPERM" for path in paths
    }


@MODES
def test_beside_nvidia(
    bundle: Bundle, config: Path, npus: Devices, driver: Driver, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ(f"{ASK}=Ascend910-10", "NVIDIA_VISIBLE_DEVICES=5")
    command = vendors.look("/dev/*davinci*", driver=driver)
    if mode == "hook":
        command = (*command[:-1], f"{command[-1]}\n{FILES}")
    bundle.command(*command)
    with nothing_left(driver.root, npus.root, pid=bundle.namespace.pid):
        done = npus.started(bundle, config)
    named = {"/dev/davinci10", "/dev/davinci_manager"}
    assert nodes_seen(done) == {path: expected(npus, 10)[path] for path in named}
    assert vendors.gpus_seen(done, driver) == {5}
    if mode == "hook":
        assert f"{LIBRARY} {library_of(npus)}" in lines_seen(done, "library")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("4", r"This machine has no NPU or vNPU '4': it has 0 \(npu-0\), .*"),
        ("2-5", r"This machine has no NPU or vNPU '2-5': 4 doesn't exist; it has .*"),
        ("98", r"This machine has no NPU or vNPU '98': .*"),
        ("7", r"NPU 7 can't be used: it is split into vNPUs\. Ask for another one; .*"),
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
    bundle.environ(f"{ASK}={asked}")
    with nothing_left(npus.root, bundle.root, pid=bundle.namespace.pid):
        said = npus.refused(bundle, config)
    assert re.fullmatch(f"gpu-py: {sentence}\n", said), said
    bundle.call(low_level[0], "state", bundle.name).failed()


def test_the_hook_alone(
    bundle: Bundle, config: Path, npus: Devices, low_level: tuple[str, Namespace]
) -> None:
    npus.hook(bundle, config)
    bundle.environ(f"{ASK}=0")
    bundle.command("sh", "-c", f"{LOOK[-1]}\n{FILES}")
    done = bundle.run(low_level[0])
    assert nodes_seen(done) == expected(npus, 0)
    assert lines_seen(done, "library") == [f"{LIBRARY} {library_of(npus)}"]
    assert vendors.logged(config)["undone"] == [
        f"put the process in the host's group {GROUP}",
        "set ASCEND_DOCKER_RUNTIME=True",
    ]


@ONE
def test_the_commands_name_its_devices(bundle: Bundle, config: Path, npus: Devices) -> None:
    bundle.environ(f"{ASK}=212")
    npus.start(bundle, config)
    listed = npus.ask(config, "list")
    holders = {device["label"]: device["containers"] for device in listed["devices"]}
    assert {label for label, users in holders.items() if users} == {"212"}
    assert holders["212"] == [bundle.name]
    assert len(holders) == 13
    explained = npus.ask(config, "explain", "-e", f"{ASK}=0")
    assert explained["selected"] == ["npu-0"]
    assert explained["undone"] == []
    info = run([npus.installation.command, "info", "--config", config]).ok().stdout
    assert re.search(
        r"^7 +Ascend 910B +0000:07:00\.0 +npu-7 +it is split into vNPUs$", info, re.MULTILINE
    )
    findings = npus.ask(config, "doctor")["findings"]
    found = [each for each in findings if each["check"].startswith("ascend-")]
    assert [(each["check"], each["status"]) for each in found] == [("ascend-devices", "ok")]
    assert "has 13 NPUs and vNPUs" in found[0]["message"]


# podman --------------------------------------------------------------------------------------


def test_podman_by_hook_and_by_document(
    npus: Devices, driver: Driver, host: Namespace, workspace: Path, archive: Path
) -> None:
    """Debian 12's podman knows no groups in documents."""
    off = "[features]\nno-additional-gids-for-device-nodes = true\n"
    own = write_config(workspace / "ascend-etc", driver.root, ["runc"])
    npus.configured(own, tail=off)
    command = ("sh", "-c", f"{LOOK[-1]}\n{FILES}")
    library = [f"{LIBRARY} {library_of(npus)}"]
    with (
        podman_with_hook(npus, own, workspace / "ascend-podman", host, archive) as engine,
        documents(npus, own, workspace / "ascend-cdi", KIND),
    ):
        done = engine.run(image("debian"), *command, env=(f"{ASK}=5",))
        assert nodes_seen(done) == expected(npus, 5)
        assert lines_seen(done, "library") == library
        done = run_with(engine, command, f"{KIND}=10", f"{KIND}=vnpu-212")
        assert nodes_seen(done) == expected(npus, 10, 212)
        assert lines_seen(done, "library") == library
        assert sorted(vendors.variables_seen(done, "ASCEND_")) == [
            "ASCEND_DOCKER_RUNTIME=True",
            f"{ASK}=void",
        ]
        done = run_with(engine, command, f"{KIND}=all")
        whole = [number for number in range(12) if number not in (4, 7)]
        assert nodes_seen(done) == expected(npus, *whole, 212, 213)
