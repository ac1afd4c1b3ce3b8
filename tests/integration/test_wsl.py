"""WSL2 on trees of files: the files that gpuhook finds, and the files in containers."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import vendors
from harness.bundles import Bundle
from harness.commands import Result, run
from harness.driver import Driver
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prefork import ONE
from harness.snapshot import nothing_left
from harness.vendor_engines import documents, podman_with_hook, run_with
from harness.vendors import MODES, Devices, in_mode, nodes_seen

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.vendors.nvidia.discover import discover
from gpuhook.vendors.nvidia.model import NvidiaInventory

ASK = "NVIDIA_VISIBLE_DEVICES"
DXG = "/dev/dxg"
STORE = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_5e5e0d4b7c1f2a90"
OLDER = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_ffb3c6a8d2e41770"
LIBRARIES = {
    "libcuda.so.1": f"{STORE}/libcuda.so.1.1",
    "libcuda.so": f"{STORE}/libcuda.so.1.1",
    "libnvidia-ml.so.1": f"{STORE}/libnvidia-ml.so.1",
    "libdxcore.so": "/usr/lib/wsl/lib/libdxcore.so",
}
IN_STORE = {
    "libcuda.so.1.1", "libcuda_loader.so", "libnvidia-ptxjitcompiler.so.1", "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so", "libnvdxgdmal.so.1", "libnvoptix.so.1", "nvcubins.bin", "nvidia-smi",
}  # fmt: skip
LINKS = {"libcuda.so.1", "libcuda.so"}
LOOK = (
    *vendors.look("/dev/dxg", "/dev/nvidia*")[:2],
    vendors.look("/dev/dxg", "/dev/nvidia*")[2]
    + f"""
for file in /usr/lib/wsl/*/* /usr/lib/wsl/drivers/*/*; do echo "file $file"; done
echo "smi $(busybox readlink /usr/bin/nvidia-smi)"
for name in {" ".join(LIBRARIES)}; do echo "library $(dlprobe $name)"; done
nvidia-smi -L
""",
)


@pytest.fixture(scope="module")
def wsl(installation: Installation, workspace: Path) -> Iterator[Devices]:
    """A WSL2 root with two GPUs, an older driver next to theirs, and another vendor's driver."""
    root = workspace / "wsl"
    words = ("--platform=wsl", "--gpus=2")
    made = run([installation.command, "simulate", root, *words]).ok().stdout
    yield Devices(installation, "nvidia", root, made)
    run([installation.command, "simulate", "--remove", root]).ok()


@pytest.fixture
def config(bundle: Bundle, wsl: Devices) -> Path:
    return write_config(bundle.path / "etc", wsl.root, [bundle.runtime])


@pytest.fixture
def copy(wsl: Devices, workspace: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of the root that a test may change."""
    root = workspace / f"wsl-{id(request)}"
    run(["cp", "-a", wsl.root, root]).ok()
    yield root
    shutil.rmtree(root)


def found_in(root: Path) -> NvidiaInventory:
    config = Config()
    config.driver_root = str(root)
    return discover(config)


def uuids(wsl: Devices) -> list[str]:
    return re.findall(r"GPU-[0-9a-f-]{36}", wsl.made)


def check_inside(done: Result, wsl: Devices, *, links: bool = True) -> None:
    """Check that a container has the node, exactly these files, and finds the libraries.

    In mode spec, mounts take the place of links, and ``links`` is false.
    """
    lines = [line.split() for line in done.ok().stdout.splitlines()]
    assert nodes_seen(done) == wsl.nodes(DXG)
    files = {words[1] for words in lines if words[0] == "file"}
    names = {path.rpartition("/")[2] for path in files if path.startswith(f"{STORE}/")}
    assert names == IN_STORE | LINKS
    others = {path for path in files if not path.startswith(STORE)}
    assert others == {"/usr/lib/wsl/lib/libdxcore.so"}
    [smi] = [words[1:] for words in lines if words[0] == "smi"]
    assert smi == ([f"{STORE}/nvidia-smi"] if links else [])
    inodes = {words[1]: words[3] for words in lines if words[0] == "library"}
    host = {name: (wsl.root / path.lstrip("/")).stat() for name, path in LIBRARIES.items()}
    assert inodes == {name: f"{found.st_dev}:{found.st_ino}" for name, found in host.items()}
    assert all(uuid in done.stdout for uuid in uuids(wsl))


def test_discovery_finds_the_wsl_gpus_and_driver_files(wsl: Devices) -> None:
    found = found_in(wsl.root)
    assert found.platform == "wsl"
    assert [gpu.uuid for gpu in found.gpus] == uuids(wsl)
    assert [node.path for node in found.nodes] == [DXG]
    assert {device.nodes for device in found.devices} == {(DXG,)}
    paths = {file.path for file in found.files}
    assert {path.rpartition("/")[2] for path in paths if path.startswith(STORE)} == IN_STORE
    assert paths - {f"{STORE}/{name}" for name in IN_STORE} == {"/usr/lib/wsl/lib/libdxcore.so"}
    assert NvidiaInventory.from_json(found.to_json()) == found


@pytest.mark.parametrize("name", ["libnvoptix_loader.so", "nvoptix.bin", "nvapi64.dll"])
def test_additional_files_of_a_windows_driver_are_found(copy: Path, name: str) -> None:
    (copy / STORE.lstrip("/") / name).write_bytes(b"Windows'")
    assert f"{STORE}/{name}" in {file.path for file in found_in(copy).files}


def test_the_driver_with_the_newest_library_is_used(copy: Path) -> None:
    os.utime(copy / OLDER.lstrip("/") / "libcuda.so.1.1")
    paths = [file.path for file in found_in(copy).files if "/drivers/" in file.path]
    assert all(path.startswith(f"{OLDER}/") for path in paths)


def test_without_nvml_there_is_one_gpu_without_uuid(copy: Path) -> None:
    for library in copy.rglob("libnvidia-ml.so.1"):
        library.unlink()
    [device] = found_in(copy).devices
    assert (device.id, device.label, device.nodes) == ("0", "0", (DXG,))
    assert device.names["uuid"] == device.names["bus_id"] == ()


def test_wsl_without_nvidias_windows_driver_is_an_error(copy: Path) -> None:
    for store in (STORE, OLDER):
        (copy / store.lstrip("/") / "libcuda.so.1.1").unlink()
    with pytest.raises(NoDriverError, match=r"This is WSL2, and no folder"):
        found_in(copy)


def test_a_driver_without_dxcore_is_not_treated_as_wsl(copy: Path) -> None:
    """NVML reports no minor here, and gpuhook must not derive a node /dev/nvidia-1 from that."""
    (copy / "usr/lib/wsl/lib/libdxcore.so").unlink()
    with pytest.raises(DriverError, match=r"can't say which device nodes the GPUs 0, 1 have"):
        found_in(copy)


def test_links_out_of_the_root_and_special_files_are_ignored(copy: Path) -> None:
    """Links resolve below the driver root, and only regular files count as driver files."""
    store = copy / STORE.lstrip("/")
    (store / "libout.so.1").symlink_to("/../../../../../../etc/passwd")
    os.mkfifo(store / "libpipe.so.1")
    (store / "libfolder.so").mkdir()
    (store / "libtext.so").write_text("no library")
    found = {file.target.rpartition("/")[2]: file.kind for file in found_in(copy).files}
    assert found.get("libtext.so") == "config"
    assert not {"libout.so.1", "libpipe.so.1", "libfolder.so"} & set(found)


@MODES
@pytest.mark.parametrize("word", ["all", "1", "uuid"])
@ONE
def test_a_wsl_container_has_the_requested_gpu(
    bundle: Bundle, config: Path, wsl: Devices, mode: str, word: str
) -> None:
    in_mode(config, mode)
    bundle.environ(f"{ASK}={uuids(wsl)[0] if word == 'uuid' else word}")
    bundle.command(*LOOK)
    with nothing_left(wsl.root, pid=bundle.namespace.pid):
        done = wsl.started(bundle, config)
    check_inside(done, wsl, links=mode == "hook")


@MODES
@ONE
def test_a_request_for_none_cannot_open_the_wsl_node(
    bundle: Bundle, config: Path, wsl: Devices, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ(f"{ASK}=none")
    bundle.command(*vendors.make_and_open(wsl, [DXG]))
    assert vendors.opened(wsl.started(bundle, config), [DXG]) == {DXG: "EPERM"}


@ONE
@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ([f"{ASK}=2"], r"This host has no GPU or MIG device '2': it has 0 \(GPU-"),
        ([f"{ASK}=GPU-00000000"], r"This host has no GPU or MIG device 'GPU-00000000'"),
        ([f"{ASK}=all", "NVIDIA_REQUIRE_CUDA=cuda>=99"], r"requires 'cuda>=99'"),
        ([f"{ASK}=all", "NVIDIA_IMEX_CHANNELS=0"], r"WSL2 has no IMEX channels"),
    ],
)
def test_unavailable_devices_and_unmet_requirements_are_refused(
    bundle: Bundle, config: Path, wsl: Devices, env: list[str], sentence: str
) -> None:
    bundle.environ(*env)
    assert re.search(sentence, wsl.refused(bundle, config))


@ONE
def test_a_read_only_image_gets_its_wsl_gpu(bundle: Bundle, config: Path, wsl: Devices) -> None:
    bundle.change(lambda spec: spec["root"].update(readonly=True))
    bundle.environ(f"{ASK}=all")
    bundle.command(*LOOK)
    check_inside(wsl.started(bundle, config), wsl)


@ONE
def test_list_explain_and_doctor_describe_wsl(bundle: Bundle, config: Path, wsl: Devices) -> None:
    bundle.environ(f"{ASK}=0")
    wsl.start(bundle, config)
    listed: dict[str, Any] = wsl.ask(config, "list")
    assert [gpu["uuid"] for gpu in listed["gpus"]] == uuids(wsl)
    assert listed["gpus"][0]["containers"] == [bundle.name]
    explained = wsl.ask(config, "explain", "-e", f"{ASK}=1")
    assert explained["inventory"]["platform"] == "wsl"
    assert explained["selected"] == uuids(wsl)[1:]
    assert "one node for all GPUs" in explained["warnings"][0]
    findings = {each["check"]: each for each in wsl.ask(config, "doctor")["findings"]}
    assert "This is WSL2" in findings["driver-loaded"]["message"]
    assert findings["wsl-driver"]["status"] == "ok"
    assert f"{STORE} with the newest" in findings["wsl-stores"]["message"]
    assert not {"device-nodes", "nvml", "driver-versions", "ld-cache"} & set(findings)


def test_podman_gives_wsl_gpus_by_cdi_spec_and_hook(
    wsl: Devices, workspace: Path, host: Namespace, archive: Path, driver: Driver
) -> None:
    del driver  # the images are built with it
    config = write_config(workspace / "wsl-podman-etc", wsl.root, ["runc"])
    with (
        podman_with_hook(wsl, config, workspace / "wsl-podman", host, archive) as engine,
        documents(wsl, config, workspace / "wsl-cdi", "nvidia.com/gpu"),
    ):
        check_inside(run_with(engine, LOOK, "nvidia.com/gpu=all"), wsl)
