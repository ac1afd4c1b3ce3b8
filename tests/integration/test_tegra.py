"""Tegra on trees of files: the entries of its lists, and their effect in containers."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

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
from harness.vendors import MODES, USER, Devices, as_user, in_mode, nodes_seen

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, NoDriverError
from gpuhook.core.inventory import fingerprint
from gpuhook.vendors.nvidia.discover import discover
from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory
from gpuhook.vendors.nvidia.nvml import NvmlResponse
from gpuhook.vendors.nvidia.tegra import discover as discover_tegra
from gpuhook.vendors.nvidia.vendor import VENDOR

ASK = "NVIDIA_VISIBLE_DEVICES"
EVERY = "NVIDIA_REQUIRE_JETPACK=csv-mounts=all"
LISTS = "etc/nvidia-container-runtime/host-files-for-container.d"
FOLDER = f"/usr/lib/{os.uname().machine}-linux-gnu/nvidia"
NODES = (
    "/dev/nvhost-gpu", "/dev/nvmap", "/dev/nvhost-ctrl-gpu", "/dev/nvgpu/igpu0/ctrl",
    "/dev/dri/card0", "/dev/dri/renderD128",
)  # fmt: skip
OTHER = "/dev/nvhost-other"
VIDEO = 44
PLACES = {  # paths that each container has; mode spec makes none of the links
    "/etc/nv_tegra_release", "/etc/nvpmodel.conf", "/usr/share/nvpmodel/one.conf",
    f"{FOLDER}/libcuda.so.1.1", f"{FOLDER}/libnvrm_gpu.so",
}  # fmt: skip
SEEN = f"""
for path in /etc/nv_tegra_release /etc/nvpmodel.conf /usr/share/nvpmodel/* {FOLDER}/*; do
    busybox test -e $path && echo "file $path"
done
echo "sym $(busybox readlink /usr/lib/libcuda.so)"
echo "sym $(busybox readlink /dev/dri/by-path/*)"
for name in libcuda.so.1 libcuda.so libnvrm_gpu.so; do echo "library $(dlprobe $name)"; done
"""
_NODES = vendors.look("/dev/nv*", "/dev/dri/*")
LOOK = (*_NODES[:2], _NODES[2] + SEEN)


@pytest.fixture(scope="module")
def tegra(installation: Installation, workspace: Path) -> Iterator[Devices]:
    root = workspace / "tegra"
    made = run([installation.command, "simulate", root, "--platform=tegra"]).ok().stdout
    yield Devices(installation, "nvidia", root, made)
    run([installation.command, "simulate", "--remove", root]).ok()


@pytest.fixture
def config(bundle: Bundle, tegra: Devices) -> Path:
    return write_config(bundle.path / "etc", tegra.root, [bundle.runtime])


@pytest.fixture
def copy(tegra: Devices, workspace: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of the root that a test may change."""
    root = workspace / f"tegra-{id(request)}"
    run(["cp", "-a", tegra.root, root]).ok()
    yield root
    shutil.rmtree(root)


def settings(root: Path) -> Config:
    config = Config()
    config.driver_root = str(root)
    return config


def listed(root: Path, *lines: str) -> NvidiaInventory:
    """Return the inventory after writing l4t.csv, a further list, with these lines."""
    (root / LISTS / "l4t.csv").write_text("\n".join(lines))
    return discover(settings(root))


def check_inside(done: Result, tegra: Devices, *more: str, links: bool = True) -> None:
    """Check that a container has these nodes and files, and finds the libraries."""
    lines = [line.split() for line in done.ok().stdout.splitlines()]
    assert nodes_seen(done) == tegra.nodes(*NODES, *more)
    files = {words[1] for words in lines if words[0] == "file"}
    made = {f"{FOLDER}/{name}" for name in ("libcuda.so", "libcuda.so.1")}
    assert files - made == PLACES | ({f"{FOLDER}/libcudnn.so.9"} if more else set())
    sym = [word for words in lines if words[0] == "sym" for word in words[1:]]
    links_made = [f"{FOLDER.removeprefix('/usr/lib/')}/libcuda.so", "../card0"]
    assert sym == (links_made if links else [])
    inodes = {words[1]: words[3] for words in lines if words[0] == "library"}
    places = dict.fromkeys(("libcuda.so.1", "libcuda.so"), "libcuda.so.1.1")
    places["libnvrm_gpu.so"] = "libnvrm_gpu.so"
    folder = tegra.root / FOLDER.lstrip("/")
    host = {name: (folder / file).stat() for name, file in places.items()}
    assert inodes == {name: f"{found.st_dev}:{found.st_ino}" for name, found in host.items()}


# What is found ---------------------------------------------------------------------------------


def test_discovery_finds_the_tegra_device_nodes_and_files(tegra: Devices) -> None:
    found = discover(settings(tegra.root))
    assert found.platform == "tegra"
    [device] = found.devices
    assert (device.id, device.nodes) == ("0", NODES)
    assert {node.path for node in found.nodes} == {*NODES, OTHER}
    of_all = {file.target for file in found.files if file.capability}
    assert of_all == {f"{FOLDER}/libcudnn.so.9"}
    assert NvidiaInventory.from_json(found.to_json()) == found


def test_files_outside_the_driver_root_are_not_listed(copy: Path) -> None:
    """Links resolve below the driver root, and an entry counts only if its type is as listed."""
    (copy / "usr/out").symlink_to("/../../../../../../../etc/passwd")
    (copy / "usr/loop").symlink_to("loop")
    (copy / "usr/chain").symlink_to("/usr/lib/libcuda.so")
    links = ("lib, /usr/out", "sym, /usr/out", "sym, /usr/loop", "sym, /usr/chain")
    wrong = ("dir, /etc/nvpmodel.conf", "dev, /etc/nvpmodel.conf", "lib, /dev/nvmap", "dir, /")
    found = listed(copy, *links, *wrong, "lib, /usr/share", "lib, /usr/../etc/nvpmodel.conf")
    assert not [each for each in found.files if "out" in each.path or "loop" in each.path]
    assert {node.path for node in found.nodes} == {*NODES, OTHER}
    assert [each.target for each in found.files if each.kind == "folder"] == ["/usr/share/nvpmodel"]
    contents = {each.path: each.target for each in found.files if each.kind == "link"}
    assert contents["/usr/chain"] == "/usr/lib/libcuda.so"
    assert not [each for each in found.files if each.target == "/dev/nvmap"]


def test_a_file_within_a_listed_folder_is_not_added_separately(copy: Path) -> None:
    found = listed(copy, "lib, /usr/share/nvpmodel/one.conf", "dir, /usr/share/nvpmodel")
    assert not [each for each in found.files if each.target.endswith("one.conf")]


def test_links_matching_csv_ignore_are_not_made(copy: Path) -> None:
    config = settings(copy)
    config.csv_ignore = ("**/libcuda.so",)
    links = [each.path for each in discover(config).files if each.kind == "link"]
    assert links == ["/dev/dri/by-path/platform-13e00000.host1x-card"]


def test_without_tegra_marker_files_there_is_no_driver(copy: Path) -> None:
    (copy / "etc/nv_tegra_release").unlink()
    (copy / "sys/devices/soc0/family").write_text("other")
    with pytest.raises(NoDriverError, match="There is no NVIDIA driver"):
        discover(settings(copy))


@pytest.fixture
def with_nvml(installation: Installation, workspace: Path, tegra: Devices) -> Iterator[Path]:
    """A root with Tegra's lists, and a driver with an NVML."""
    root = workspace / "tegra-nvml"
    run([installation.command, "simulate", root, "--gpus=1"]).ok()
    try:
        run(["cp", "-a", tegra.root / "etc/nv_tegra_release", root / "etc"]).ok()
        run(["cp", "-a", tegra.root / "etc/nvidia-container-runtime", root / "etc"]).ok()
        run(["cp", "-a", tegra.root / "dev/nvmap", root / "dev"]).ok()
        yield root
    finally:
        run([installation.command, "simulate", "--remove", root]).ok()


def test_an_nvml_driver_without_tegra_gpus_is_not_treated_as_tegra(with_nvml: Path) -> None:
    """This NVML knows none of Tegra's own GPUs. The platform probe calls such a platform NVML."""
    found = discover(settings(with_nvml))
    assert (found.platform, len(found.gpus)) == ("", 1)


def test_an_nvml_that_names_an_nvgpu_device_is_tegra(with_nvml: Path) -> None:
    [library] = with_nvml.glob("usr/lib/*/libnvidia-ml.so.[1-9]*.*")
    data = library.read_bytes()
    assert b"NVIDIA H200\0" in data
    library.write_bytes(data.replace(b"NVIDIA H200\0", b"Orin(nvgpu)\0"))
    found = discover(settings(with_nvml))
    assert (found.platform, found.cuda_version) == ("tegra", "13.0")
    [device] = found.devices
    assert (device.id, device.nodes) == ("0", ("/dev/nvmap", *NODES[-2:]))


def test_another_gpu_beside_tegras_own_is_refused(tegra: Devices) -> None:
    gpus = tuple(
        Gpu(index, index, "", "", name, "", "", False, ())
        for index, name in enumerate(("Orin (nvgpu)", "NVIDIA RTX A2000"))
    )
    answer = NvmlResponse("580.1", "13.0", gpus, ())
    with Rootfs(str(tegra.root)) as root, pytest.raises(DriverError, match="Tegra with 2 GPUs"):
        discover_tegra(root, settings(tegra.root), answer)


def test_changed_nodes_and_lists_make_an_inventory_stale(copy: Path) -> None:
    config = settings(copy)
    before = fingerprint.of(config, VENDOR)
    assert fingerprint.of(config, VENDOR) == before
    for name in ("nvhost-late", "nvgpu/igpu0/late", "dri/card9"):
        (copy / "dev" / name).touch()
        later = fingerprint.of(config, VENDOR)
        assert later != before
        before = later
    (copy / LISTS / "devices.csv").write_text("dev, /dev/nvmap")
    assert fingerprint.of(config, VENDOR) != later


def test_tegra_without_csv_lists_is_an_error(copy: Path) -> None:
    shutil.rmtree(copy / LISTS)
    with pytest.raises(DriverError, match="no list in"):
        discover(settings(copy))


# Containers ------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("word", ["all", "0"])
@ONE
def test_a_tegra_container_has_its_gpu_and_groups(
    bundle: Bundle, config: Path, tegra: Devices, mode: str, word: str
) -> None:
    in_mode(config, mode)
    bundle.change(as_user)
    bundle.environ(f"{ASK}={word}")
    bundle.command(*LOOK)
    with nothing_left(tegra.root, pid=bundle.namespace.pid):
        done = tegra.started(bundle, config)
    check_inside(done, tegra, links=mode == "hook")
    assert vendors.groups_seen(done) == {USER, VIDEO}


@ONE
@MODES
def test_every_csv_list_gives_its_nodes_when_requested(
    bundle: Bundle, config: Path, tegra: Devices, mode: str
) -> None:
    in_mode(config, mode)
    bundle.environ(f"{ASK}=all", EVERY)
    bundle.command(*LOOK)
    check_inside(tegra.started(bundle, config), tegra, OTHER, links=mode == "hook")


@MODES
def test_a_tegra_container_cannot_open_unlisted_nodes(
    bundle: Bundle, config: Path, tegra: Devices, mode: str
) -> None:
    in_mode(config, mode)
    paths = [*NODES, OTHER]
    bundle.environ(f"{ASK}=0")
    bundle.command(*vendors.make_and_open(tegra, paths))
    found = vendors.opened(tegra.started(bundle, config), paths)
    assert found == {path: "EPERM" if path == OTHER else "ENXIO" for path in paths}


@ONE
def test_a_request_for_none_gets_no_tegra_node(
    bundle: Bundle, config: Path, tegra: Devices
) -> None:
    bundle.environ(f"{ASK}=none")
    bundle.command(*LOOK)
    assert nodes_seen(tegra.started(bundle, config)) == {}


@ONE
def test_a_missing_device_is_refused(bundle: Bundle, config: Path, tegra: Devices) -> None:
    bundle.environ(f"{ASK}=1")
    assert "no GPU or MIG device '1': it has 0" in tegra.refused(bundle, config)


@ONE
def test_list_explain_and_doctor_describe_tegra(
    bundle: Bundle, config: Path, tegra: Devices
) -> None:
    bundle.environ(f"{ASK}=0")
    tegra.start(bundle, config)
    assert tegra.ask(config, "list")["gpus"][0]["containers"] == [bundle.name]
    explained = tegra.ask(config, "explain", "-e", f"{ASK}=all")
    assert (explained["inventory"]["platform"], explained["selected"]) == ("tegra", ["0"])
    findings = {each["check"]: each["message"] for each in tegra.ask(config, "doctor")["findings"]}
    assert "This is Tegra" in findings["driver-loaded"]
    assert re.search(r"devices\.csv line 11 .*drivers\.csv line 6 ", findings["tegra-lines"])
    assert "/dev/nvhost-absent" in findings["tegra-lists"]
    assert not {"device-nodes", "nvml", "driver-versions"} & set(findings)


def test_podman_gives_the_tegra_gpu_by_cdi_spec_and_hook(
    tegra: Devices, workspace: Path, host: Namespace, archive: Path, driver: Driver
) -> None:
    del driver  # the images are built with it
    config = write_config(workspace / "tegra-podman-etc", tegra.root, ["runc"])
    off = "[features]\nno-additional-gids-for-device-nodes = true\n"  # podman here is too old
    config.write_text(config.read_text() + off)
    with (
        podman_with_hook(tegra, config, workspace / "tegra-podman", host, archive) as engine,
        documents(tegra, config, workspace / "tegra-cdi", "nvidia.com/gpu"),
    ):
        done = run_with(engine, LOOK, "nvidia.com/gpu=0")
    check_inside(done, tegra)
