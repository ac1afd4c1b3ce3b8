"""A complete simulated driver root with nodes, /proc and caches: replaced, refused and removed."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuhook.base.errors import SimulateError, UntrustedPathError
from gpuhook.base.loader import ldcache
from gpuhook.tools.cli import cli
from gpuhook_simulate.place import new_tree
from gpuhook_simulate.vendors.nvidia import (
    Failure,
    Options,
    build,
    change,
    remove,
    report_xid,
    run_process,
)
from gpuhook_simulate.vendors.nvidia.activity import SimulatedProcess

VERSION = "580.65.06"
LIBRARY_DIR = f"usr/lib/{os.uname().machine}-linux-gnu"

# Runs in a child below the root: load NVML and CUDA by bare library names, and print their view.
CHROOT = """
import ctypes, os, sys
os.chroot(sys.argv[1])
os.chdir("/")
nvml, cuda = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.CDLL("libcuda.so.1")
count = ctypes.c_uint()
print(nvml.nvmlInit_v2(), nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value)
print(cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""


# Runs in a child, which is killed in the middle of its work.
KILLED = """
import os, signal, sys
from gpuhook_simulate.build import build
build(sys.argv[1], lambda tree: (tree.text("a/b", ""), os.kill(os.getpid(), signal.SIGKILL)))
"""
ADA = 4401


@pytest.fixture
def folder(workspace: Path) -> Iterator[Path]:
    """An empty folder on a file system where device nodes work."""
    folder = workspace / "simulate"
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


def numbers(path: Path) -> tuple[int, int]:
    status = path.lstat()
    assert stat.S_ISCHR(status.st_mode)
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def test_device_nodes_have_the_numbers_listed_in_proc_devices(folder: Path) -> None:
    root = folder / "root"
    build(Options(root=str(root), gpus=2, minors=(3, 1), mig={1: ("1g.18gb",)}))
    dev = root / "dev"
    assert numbers(dev / "nvidia3") == (195, 3)
    assert numbers(dev / "nvidia1") == (195, 1)
    assert numbers(dev / "nvidiactl") == (195, 255)
    assert numbers(dev / "nvidia-modeset") == (195, 254)
    assert stat.S_IMODE((dev / "nvidia3").stat().st_mode) == 0o666
    assert not (dev / "nvidia0").exists()
    majors = {}
    for line in (root / "proc/devices").read_text().partition("Block")[0].splitlines()[1:]:
        if line.strip():
            number, name = line.split(maxsplit=1)
            majors[name] = int(number)
    assert numbers(dev / "nvidia-uvm") == (majors["nvidia-uvm"], 0)
    assert numbers(dev / "nvidia-uvm-tools") == (majors["nvidia-uvm"], 1)
    caps = majors["nvidia-caps"]
    assert numbers(dev / "nvidia-caps/nvidia-cap1") == (caps, 1)
    assert numbers(dev / "nvidia-caps/nvidia-cap201") == (caps, 201)  # GPU 1, instance 7
    assert numbers(dev / "dri/card1") == (226, 1)
    assert os.readlink(dev / "dri/by-path/pci-0000:1b:00.0-render") == "../renderD128"
    with open("/proc/devices", encoding="ascii") as file:
        used = {line.split()[0] for line in file.read().splitlines() if line[:3].strip().isdigit()}
    assert not {str(majors["nvidia-uvm"]), str(caps)} & used
    # The kernel has no such driver. Its error shows that the node itself works.
    with pytest.raises(OSError, match=r"No such (device or address|device)"):
        os.close(os.open(dev / "nvidia-uvm", os.O_RDONLY))


def test_nodes_for_selected_features_are_created(folder: Path) -> None:
    root = folder / "root"
    features = frozenset({"gds", "gdrcopy", "mofed", "nvswitch"})
    build(Options(root=str(root), models=("T4",), drm=False, imex_channels=2, features=features))
    dev = root / "dev"
    [major, _] = numbers(dev / "nvidia-caps-imex-channels/channel1")
    assert numbers(dev / "nvidia-caps-imex-channels/channel1") == (major, 1)
    assert f"{major} nvidia-caps-imex-channels\n" in (root / "proc/devices").read_text()
    for name in ("nvidia-fs0", "gdrdrv", "infiniband/uverbs0", "nvidia-nvswitchctl"):
        assert numbers(dev / name)[0] not in {195, major}
    assert not (dev / "dri").exists()
    assert not (dev / "nvidia-caps").exists()  # this model doesn't support MIG


def test_proc_and_sys_describe_the_simulated_gpus(folder: Path) -> None:
    root = folder / "root"
    [first, second] = build(
        Options(root=str(root), gpus=2, minors=(3, 1), mig={1: ("1g.18gb",)})
    ).gpus
    proc = root / "proc/driver/nvidia"
    assert VERSION in (proc / "version").read_text()
    assert "ModifyDeviceFiles: 1\n" in (proc / "params").read_text()
    information = (proc / "gpus/0000:1b:00.0/information").read_text()
    assert f"GPU UUID: \t {first.uuid}\n" in information
    assert "Device Minor: \t 3\n" in information
    access = proc / "capabilities/gpu1/mig/gi7"
    assert "DeviceFileMinor: 201\n" in (access / "access").read_text()
    assert "DeviceFileMinor: 202\n" in (access / "ci0/access").read_text()
    assert (proc / "capabilities/mig/config").exists()
    assert "gpu1/gi7/access 201\n" in (root / "proc/driver/nvidia-caps/mig-minors").read_text()
    assert (root / "sys/module/nvidia/version").read_text() == f"{VERSION}\n"
    device = root / f"sys/bus/pci/devices/{second.proc_bus_id}"
    assert (device / "vendor").read_text() == "0x10de\n"
    assert (device / "device").read_text() == "0x2335\n"


def test_driver_files_and_links_are_created_in_a_simulated_root(folder: Path) -> None:
    root = folder / "root"
    build(Options(root=str(root)))
    entries = ldcache.parse((root / "etc/ld.so.cache").read_bytes(), "cache").entries
    keys = {entry.key: entry.value for entry in entries}
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-nvvm.so.4", "libEGL_nvidia.so.0"):
        assert keys[name] == f"/{LIBRARY_DIR}/{name}"
    assert f"libnvidia-glcore.so.{VERSION}" in keys
    files = {(root / path.lstrip("/")).resolve().name for path in keys.values()}
    assert {name for name in files if not name.endswith(VERSION)} == {"libnvidia-nvvm70.so.4"}
    assert (root / f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin").is_file()
    assert (root / "run/nvidia-persistenced/socket").is_socket()
    assert (root / "run/nvidia-fabricmanager/socket").is_socket()
    assert os.readlink(root / "var/run") == "/run"
    for name in ("nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control"):
        assert os.access(root / "usr/bin" / name, os.X_OK)
    simulated = subprocess.run(
        [root / "usr/bin/nvidia-persistenced"], capture_output=True, text=True, check=True
    )
    assert (
        simulated.stdout == f"nvidia-persistenced: simulated by gpuhook, driver version {VERSION}\n"
    )
    icd = json.loads((root / "etc/vulkan/icd.d/nvidia_icd.json").read_text())
    assert icd["ICD"]["library_path"] == "libGLX_nvidia.so.0"
    assert not list(root.parent.glob(".root.*"))


def test_nvml_works_from_inside_the_simulated_root(folder: Path) -> None:
    root = folder / "root"
    build(Options(root=str(root), gpus=3))
    argv = [sys.executable, "-c", CHROOT, str(root)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "0 0 3\n0 0 3\n"
    (root / "dev/nvidia1").unlink()
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "0 0 2\n0 0 2\n"


@pytest.mark.parametrize("gpus", [0, 64])
def test_zero_and_64_simulated_gpus_are_listed_by_nvidia_smi(folder: Path, gpus: int) -> None:
    built = build(
        Options(root=str(folder / "root"), gpus=gpus, minors=tuple(range(100, 100 + gpus)))
    )
    done = subprocess.run(
        [f"{built.root}/usr/bin/nvidia-smi", "-L"],
        env={"LD_LIBRARY_PATH": f"{built.root}{built.library_dir}"},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = [f"GPU {gpu.index}: NVIDIA H200 (UUID: {gpu.uuid})" for gpu in built.gpus]
    assert done.stdout.splitlines() == (expected or ["No devices found."])


def test_another_library_folder_and_32_bit_libraries_are_in_the_cache(folder: Path) -> None:
    if os.uname().machine != "x86_64":
        with pytest.raises(SimulateError, match="only on x86_64"):
            build(Options(root=str(folder / "root"), compat32=True))
        return
    root = folder / "root"
    build(Options(root=str(root), library_dir="/usr/lib64", compat32=True))
    entries = ldcache.parse((root / "etc/ld.so.cache").read_bytes(), "cache").entries
    cuda = {entry.flags: entry.value for entry in entries if entry.key == "libcuda.so.1"}
    assert cuda == {0x0303: "/usr/lib64/libcuda.so.1", 0x0003: "/usr/lib/libcuda.so.1"}


def test_a_driver_that_is_not_loaded_has_libraries_but_no_nodes(folder: Path) -> None:
    root = folder / "root"
    build(Options(root=str(root), failure=Failure.NOT_LOADED))
    assert (root / LIBRARY_DIR / "libcuda.so.1").exists()
    assert not (root / "dev/nvidiactl").exists()
    assert not (root / "proc/driver").exists()
    assert not (root / "sys/module").exists()


def test_version_mismatch_shows_in_the_kernel_files(folder: Path) -> None:
    root = folder / "root"
    build(Options(root=str(root), failure=Failure.VERSION_MISMATCH))
    assert (root / LIBRARY_DIR / f"libcuda.so.{VERSION}").exists()
    assert "580.65.05" in (root / "proc/driver/nvidia/version").read_text()


def test_building_again_replaces_the_old_root(folder: Path) -> None:
    root = folder / "root"
    build(Options(root=str(root), gpus=2, driver_version="535.1.1"))
    with open(root / LIBRARY_DIR / "libcuda.so.1", "rb") as old:
        build(Options(root=str(root), gpus=2, unplugged=frozenset({0})))
        assert old.read(4) == b"\x7fELF"  # a process that uses the old driver still has it
    assert not (root / "dev/nvidia0").exists()
    assert (root / "dev/nvidia1").exists()
    assert not (root / LIBRARY_DIR / "libcuda.so.535.1.1").exists()
    assert [path.name for path in folder.iterdir()] == ["root"]


def test_a_failed_build_leaves_the_old_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder / "root"
    build(Options(root=str(root), gpus=2))
    before = sorted(str(path) for path in root.rglob("*"))
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(SimulateError, match="There is no C compiler"):
        build(Options(root=str(root), gpus=1))
    assert sorted(str(path) for path in root.rglob("*")) == before
    assert [path.name for path in folder.iterdir()] == ["root"]


def test_building_or_removing_an_unrelated_folder_is_refused(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "precious").touch()
    with pytest.raises(SimulateError, match="not empty and isn't a simulated driver root"):
        build(Options(root=str(other)))
    with pytest.raises(SimulateError, match="is not a simulated driver root"):
        remove(str(other))
    with pytest.raises(SimulateError, match="is not a folder"):
        build(Options(root=str(other / "precious")))
    with pytest.raises(SimulateError, match="is not a folder"):
        build(Options(root=str(other / "precious/root")))
    assert [path.name for path in other.iterdir()] == ["precious"]
    (other / "precious").unlink()
    build(Options(root=str(other)))
    remove(str(other))
    assert not other.exists()


def test_a_folder_mounted_with_nodev_is_refused(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nodev,mode=755", "tmpfs", folder], check=True)
    try:
        with pytest.raises(SimulateError, match="mounted with nodev"):
            build(Options(root=str(folder / "deeper/root")))
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", folder], check=True)


def test_mounts_in_the_root_are_refused(folder: Path) -> None:
    root = folder / "root"
    build(Options(root=str(root)))
    outside = folder / "out side"
    outside.mkdir()
    (outside / "precious").touch()
    inside = root / "m n"
    inside.mkdir()
    subprocess.run(["mount", "--bind", outside, inside], check=True)
    try:
        for attempt in (lambda: build(Options(root=str(root))), lambda: remove(str(root))):
            with pytest.raises(SimulateError, match="Something is mounted on"):
                attempt()
    finally:
        subprocess.run(["umount", inside], check=True)
    remove(str(root))
    assert (outside / "precious").exists()


def test_a_root_named_by_a_symlink_is_built_and_removed(folder: Path) -> None:
    (folder / "link").symlink_to("real")
    build(Options(root=str(folder / "link")))
    build(Options(root=str(folder / "link"), gpus=2))
    assert (folder / "link").is_symlink()
    assert (folder / "real/dev/nvidia1").exists()
    remove(str(folder / "link"))
    assert not (folder / "real").exists()


def test_a_user_other_than_root_is_refused(folder: Path) -> None:
    script = (
        "import os; os.setresuid(65534, 65534, 65534)\n"
        "from gpuhook_simulate.place import check_place\n"
        f"check_place({str(folder)!r})\n"
    )
    # The modules are loaded first, because the user nobody may not be able to read them.
    script = "import gpuhook_simulate.place\n" + script
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Only root can create device nodes" in done.stderr


@pytest.mark.protects(
    "simulated-way", "a simulated root isn't built at a path that another user controls"
)
@pytest.mark.protects(
    "removed-way", "a simulated root isn't removed at a path that another user controls"
)
@pytest.mark.protects(
    "changed-way", "a simulated machine is changed only at a path that no other user controls"
)
@pytest.mark.parametrize("way", ["folder", "link", "root"])
def test_a_simulated_root_whose_path_another_user_controls_is_refused(
    folder: Path, way: str
) -> None:
    """The other user could replace the unfinished tree by a link to root's own folders."""
    place = folder / "his/root"
    if way == "link":
        (folder / "elsewhere").mkdir()
        (folder / "his").symlink_to("elsewhere")
        os.lchown(folder / "his", ADA, ADA)
    else:
        place.parent.mkdir()
    options = Options(root=str(place))
    if way != "link":
        build(options)
        os.chown(place if way == "root" else place.parent, ADA, ADA)
    before = sorted(folder.rglob("*"))
    for attempt in (
        lambda: build(options),
        lambda: remove(str(place)),
        lambda: change(str(place), lost=frozenset({0})),
        lambda: report_xid(str(place), 79, "0"),
        lambda: run_process(str(place), SimulatedProcess("0", 4711, 0)),
    ):
        with pytest.raises(UntrustedPathError, match="could lead root elsewhere"):
            attempt()
    assert sorted(folder.rglob("*")) == before


def test_leftovers_of_a_killed_build_are_removed_by_the_next(folder: Path) -> None:
    root = folder / "root"
    command = [sys.executable, "-c", KILLED, str(root)]
    for _ in range(2):
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert len(os.listdir(folder)) == 1
    others = [folder / name for name in (".root.others_1", ".rooT.12345678", ".root.123456789")]
    for each in others:
        each.mkdir()
        (each / "file").touch()
    with new_tree(str(root)) as used:  # as if another process used it
        build(Options(root=str(root)))
        assert Path(used).is_dir()
    assert sorted(folder.iterdir()) == sorted([root, *others])
    subprocess.run(command, check=False)
    remove(str(root))
    assert sorted(folder.iterdir()) == sorted(others)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("ro", "can't be built: Read-only file system. Choose a folder"),
        ("size=200k", "can't be built: No space left on device. Free space"),
        ("size=1m", "can't be built: No space left on device. Free space"),
        ("nr_inodes=40", "can't be built: No space left on device. Free space"),
    ],
)
def test_a_full_or_read_only_disk_fails_cleanly(folder: Path, options: str, sentence: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        done = CliRunner().invoke(cli, ["simulate", str(folder / "root")])
        assert sentence in str(done.exception)
        assert isinstance(done.exception, SimulateError)
        assert os.listdir(folder) == []
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_folder_name_that_is_too_long_is_refused(folder: Path) -> None:
    with pytest.raises(SimulateError, match="can't be built: File name too long"):
        build(Options(root=str(folder / ("name" * 62))))


@pytest.mark.parametrize("word", ["--gpus=2", "--lost=0", "--set=model=T4", "--drm", "--end=5"])
def test_remove_with_other_options_is_refused_and_deletes_nothing(folder: Path, word: str) -> None:
    root = folder / "root"
    build(Options(root=str(root)))
    done = CliRunner().invoke(cli, ["simulate", str(root), "--remove", word])
    assert "--remove doesn't go with --" in str(done.exception)
    assert root.is_dir()


def test_a_seed_that_is_not_valid_text_is_refused(folder: Path) -> None:
    with pytest.raises(SimulateError, match="can't be the seed"):
        build(Options(root=str(folder / "root"), seed="\udcff"))


def test_the_simulate_command_builds_prints_and_removes_a_root(folder: Path) -> None:
    root = str(folder / "root")
    words = ["--gpus=2", "--model=A100", "--mig=1:3g.40gb", "--minors=4,2", "--lost=0"]
    done = CliRunner().invoke(cli, ["simulate", root, *words, "--format=json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert (answer["driver_version"], answer["cuda_version"]) == (VERSION, "13.0")
    lost, split = answer["gpus"]
    assert (lost["minor"], lost["lost"], split["lost"]) == (4, True, False)
    assert [mig["profile"] for mig in split["mig"]] == ["3g.40gb"]
    text = CliRunner().invoke(cli, ["simulate", root, *words]).output
    assert text.splitlines()[1].endswith("/dev/nvidia4 (lost)")
    assert split["mig"][0]["uuid"] in text
    assert CliRunner().invoke(cli, ["simulate", root, "--remove"]).exit_code == 0
    assert not os.path.exists(root)


def invoke(*words: str) -> str:
    done = CliRunner().invoke(cli, ["simulate", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_running_simulated_machine_is_changed_in_place(folder: Path) -> None:
    root = folder / "root"
    built = build(Options(root=str(root), gpus=2, minors=(3, 1), mig={1: ("1g.18gb",)}))
    [kept] = built.gpus[1].migs
    text = invoke(str(root), "--mig=1:3g.71gb,1g.18gb", "--mig=0:7g.141gb", "--lost=0")
    assert "(MIG) (lost)\n" in text.splitlines(keepends=True)[0]
    assert kept.uuid in text
    caps = root / "dev/nvidia-caps"
    assert {path.name for path in caps.iterdir()} == {
        f"nvidia-cap{minor}" for minor in (1, 2, 147, 148, 201, 202, 408, 409)
    }
    assert numbers(caps / "nvidia-cap147") == (numbers(caps / "nvidia-cap1")[0], 147)
    proc = root / "proc/driver/nvidia/capabilities"
    assert "DeviceFileMinor: 148\n" in (proc / "gpu1/mig/gi1/ci0/access").read_text()
    before = (proc / "gpu1/mig/gi7").stat().st_ino
    invoke(str(root), "--mig=0:off", "--mig=1:1g.18gb", "--found=0")
    assert {path.name for path in caps.iterdir()} == {
        f"nvidia-cap{minor}" for minor in (1, 2, 201, 202)
    }
    assert [path.name for path in (proc / "gpu1/mig").iterdir()] == ["gi7"]
    assert not list((proc / "gpu3/mig").iterdir())
    assert (proc / "gpu1/mig/gi7").stat().st_ino == before
    assert not list((root / "simulate").glob(".*"))
    smi = subprocess.run(
        [root / "usr/bin/nvidia-smi", "-L"],
        env={"LD_LIBRARY_PATH": f"{root}/{LIBRARY_DIR}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert kept.uuid in smi.stdout
    assert len(smi.stdout.splitlines()) == 3
    invoke(str(root), "--xid=94", "--xid=79", f"--gpu={kept.uuid}")
    assert (root / "simulate/events").read_text() == "1 94 7 0\n1 79 7 0\n"
    invoke(str(root), f"--process={kept.uuid},4711,8G,60", "--process=0,12,1M")
    answer = json.loads(invoke(str(root), "--end=12", "--format=json"))
    assert [gpu["number"] for gpu in answer["gpus"]] == [0, 1]
    lines = (root / "simulate/activity").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        "boot",
        "1:7:0 process 4711 compute 8589934592 60 0 0 0",
        "0 process 12 compute 1048576 0 0 0 0",
        "0 end 12",
    ]
    with (root / "simulate/lost").open("a") as file:
        file.write("GPU-x\n")
    assert "simulate/lost, line 1, is skipped: 'GPU-x'" in invoke(str(root), "--xid=79", "--gpu=0")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--xid=79"], "An XID needs one GPU"),
        (["--gpu=1"], "An XID needs one GPU"),
        (["--xid=79", "--gpu=7"], "no device '7'"),
        (["--found=0", "--gpus=2"], "change a machine"),
        (["--mig=0:4g.71gb,4g.71gb"], "don't fit on GPU 0"),
        (["--lost=2"], "There is no GPU 2 among 2"),
    ],
)
def test_invalid_changes_of_a_simulated_machine_are_refused(
    folder: Path, words: list[str], cause: str
) -> None:
    build(Options(root=str(folder / "root"), gpus=2))
    done = CliRunner().invoke(cli, ["simulate", str(folder / "root"), *words])
    assert done.exit_code != 0
    assert isinstance(done.exception, SimulateError)
    assert cause in done.exception.cause


def test_changes_of_non_nvidia_simulated_roots_are_refused(folder: Path) -> None:
    root = str(folder / "root")
    invoke(root, "--platform=wsl")
    done = CliRunner().invoke(cli, ["simulate", root, "--found=0"])
    assert "has no simulated NVIDIA machine" in str(done.exception)
    assert invoke(root, "--gpus=3").count("GPU ") == 3
    assert invoke(root, "--lost=0", "--gpus=1").count("GPU ") == 1  # built again
