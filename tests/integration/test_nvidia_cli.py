"""nvidia-container-cli as its callers use it: ctr --gpus, runtimes' hooks, Apptainer."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.bundles import Bundle, Spec
from harness.commands import Result, run
from harness.containerd import Containerd
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation
from harness.snapshot import nothing_left

DEBIAN = image("debian")
PROGRAM = "nvidia-container-cli"
CDI = Path("/etc/cdi")  # the test session has an /etc of its own


@pytest.fixture(scope="module")
def folder(workspace: Path, installation: Installation) -> Path:
    """A folder for PATH that contains the program's link, as gpuhook install creates it."""
    names = workspace / "cli-names"
    names.mkdir(exist_ok=True)
    link = names / PROGRAM
    link.unlink(missing_ok=True)
    link.symlink_to(installation.bin / "gpuhook-container-cli")
    return names


class Caller:
    """A function that calls the program with the simulated driver as the driver root."""

    def __init__(self, program: Path, driver: Driver, config: Path) -> None:
        self.program = program
        self._root = f"--root={driver.root}"
        self._env = {"GPUHOOK_CONFIG": str(config)}

    def __call__(self, *words: str) -> Result:
        return run([self.program, self._root, *words], env=self._env)


@pytest.fixture
def cli(folder: Path, driver: Driver, configs: dict[str, Path]) -> Caller:
    return Caller(folder / PROGRAM, driver, configs["runc"])


def test_info_prints_every_gpu(cli: Caller, driver: Driver) -> None:
    lines = cli("info").ok().stdout.splitlines()
    assert lines[0] == f"NVRM version:   {driver.version}"
    assert lines[1].startswith("CUDA version:   ")
    assert lines[2] == ""
    blocks = [lines[start : start + 7] for start in range(3, len(lines), 8)]
    assert len(blocks) == len(driver.gpus)
    for gpu, block in zip(driver.gpus, blocks, strict=True):
        assert [line[:16] for line in block] == [
            "Device Index:   ",
            "Device Minor:   ",
            "Model:          ",
            "Brand:          ",
            "GPU UUID:       ",
            "Bus Location:   ",
            "Architecture:   ",
        ]
        values = [line[16:] for line in block]
        assert values[:3] == [str(gpu.index), str(gpu.minor), gpu.model]
        assert values[4] == gpu.uuid


def test_info_as_csv_prints_every_gpu(cli: Caller, driver: Driver) -> None:
    lines = cli("info", "--csv").ok().stdout.splitlines()
    assert lines[0] == "NVRM version,CUDA version"
    assert lines[1].startswith(f"{driver.version},")
    header = "Device Index,Device Minor,Model,Brand,GPU UUID,Bus Location,Architecture"
    assert lines[2:4] == ["", header]
    uuids = [line.split(",")[4] for line in lines[4:]]
    assert uuids == [gpu.uuid for gpu in driver.gpus]


@pytest.mark.parametrize(
    "words", [["-d", "1,3", "-li"], ["--dev=1", "--device", "3", "--libr", "-i"]]
)
def test_list_prints_the_files_of_the_named_devices(
    cli: Caller, driver: Driver, words: list[str]
) -> None:
    paths = cli("list", *words).ok().stdout.splitlines()
    nodes = [path for path in paths if path.startswith("/dev/")]
    assert nodes[-2:] == [f"/dev/nvidia{gpu.minor}" for gpu in driver.chosen(1, 3)]
    assert set(nodes[:-2]) >= {"/dev/nvidiactl", "/dev/nvidia-uvm"}
    assert all((driver.root / path.lstrip("/")).exists() for path in paths)
    libraries = [path for path in paths if ".so." in path]
    assert any("libcuda.so." in path for path in libraries)
    assert not any("nvidia-smi" in path for path in paths)
    assert any(path.endswith("/socket") for path in paths)
    assert not any(
        "persistenced" in path for path in cli("list", *words, "--no-pers").stdout.split()
    )


def test_list_without_options_prints_everything(cli: Caller, driver: Driver) -> None:
    paths = cli("list").ok().stdout.splitlines()
    assert {f"/dev/nvidia{gpu.minor}" for gpu in driver.gpus} <= set(paths)
    assert "/usr/bin/nvidia-smi" in paths
    assert any(path.startswith("/lib/firmware/nvidia/") for path in paths)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "--device=99"], "device error: 99: unknown device"),
        (["list", "--mig-config=0"], "mig-config error: 0: only 'all' devices are currently"),
        (["configure", "/"], "input error: invalid rootfs directory"),
        (["configure", "--pid=1", "relative"], "input error: invalid rootfs directory"),
        (["configure", "--pid=x", "/tmp"], "input error: invalid process id: x"),
        (["configure", "--cuda-compat-mode=x", "/tmp"], "invalid option: cuda-compat-mode=x"),
        (["configure", *["--require=cuda>=1"] * 33, "/tmp"], "input error: too many requirements"),
        (["configure", "--pid=1", "--require=cuda>=99", "/tmp"], "requirement error: "),
        (["configure"], "a root directory is missing"),
        (["configure", "--dev"], "requires an argument"),
        (["configure", "--mig", "/tmp"], "option '--mig' is ambiguous"),
        (["configure", "--compute=1", "/tmp"], "doesn't allow an argument"),
        (["frobnicate"], "unknown command 'frobnicate'"),
        ([], "no command given"),
        (["--unknown", "info"], "unrecognized option '--unknown'"),
    ],
)
def test_errors_are_printed_with_status_1(cli: Caller, words: list[str], message: str) -> None:
    done = cli(*words)
    assert done.status == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"{PROGRAM}: ")
    assert message in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["-?"], ["info", "--usage"], ["list", "-V"]])
def test_help_and_version_are_printed_to_standard_output(cli: Caller, words: list[str]) -> None:
    done = cli(*words).ok()
    assert done.stdout
    assert done.stderr == ""


def test_a_missing_driver_root_is_an_initialization_error(
    folder: Path, configs: dict[str, Path]
) -> None:
    env = {"GPUHOOK_CONFIG": str(configs["runc"])}
    for root in ("/no/such/folder", ""):
        done = run([folder / PROGRAM, "-r", root, "info"], env=env)
        assert (done.status, done.stderr[:42]) == (1, f"{PROGRAM}: initialization error")


@pytest.fixture
def hooked(bundle: Bundle, cli: Caller, driver: Driver, configs: dict[str, Path]) -> Bundle:
    """A bundle whose hook calls the program as containerd's oci-hook does."""
    script = (
        # crun 1.28 writes the state in several lines, with blanks.
        "pid=$(grep -o '\"pid\" *: *[0-9]*' | grep -o '[0-9]*$'); "
        f"exec {cli.program} --root={driver.root} "
        f'configure --device=0,2 --utility --compute --pid="$pid" {bundle.root}'
    )
    hook = {
        "path": "/bin/sh",
        "args": ["sh", "-c", script],
        "env": ["PATH=/usr/bin:/bin", f"GPUHOOK_CONFIG={configs['runc']}"],
    }

    def mutate(spec: Spec) -> None:
        spec["hooks"] = {"createRuntime": [hook]}

    bundle.change(mutate)
    return bundle


def test_configure_from_a_hook_gives_the_requested_gpus(
    hooked: Bundle, low_level: tuple[str, object], driver: Driver
) -> None:
    hooked.command(*look(driver.minors))
    with nothing_left(driver.root, pid=hooked.namespace.pid):
        inside = seen(hooked.run(low_level[0]))
    minors = {gpu.minor for gpu in driver.chosen(0, 2)}
    assert inside.gpu_minors == minors
    assert {minor for minor, opened in inside.by_hand.items() if opened == "ENXIO"} == minors
    hooked.command("nvidia-smi", "-L")
    done = hooked.run(low_level[0]).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))


def test_configure_without_a_process_gives_the_gpu_in_its_namespace(
    cli: Caller, roots: dict[str, Path], driver: Driver, tmp_path: Path
) -> None:
    """Apptainer and enroot call it without a process, in the namespace that they created."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "upper").mkdir()
    (tmp_path / "work").mkdir()
    layers = f"lowerdir={roots['debian']},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    script = f"""
    set -e
    mount -t overlay -o {layers} overlay {root}
    mount -t proc proc {root}/proc
    {cli.program} --root={driver.root} configure --no-cgroups --device=1 --utility {root}
    exec chroot {root} nvidia-smi -L
    """
    with nothing_left(driver.root):
        done = run(["unshare", "--mount", "sh", "-c", script]).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(1))


@pytest.mark.parametrize("volume", ["volume", "session/volume"])
def test_configure_with_a_volume_at_the_library_folder_is_refused(
    cli: Caller, roots: dict[str, Path], driver: Driver, tmp_path: Path, volume: str
) -> None:
    """The volume is the host's, or it is on the root's filesystem, which the caller also has.

    The caller is a shell, and another program calls gpuhook, as an engine does.
    """
    session, root = tmp_path / "session", tmp_path / "session/root"
    layers = f"lowerdir={roots['debian']},upperdir={session}/upper,workdir={session}/work"
    libraries = f"{root}/usr/lib/{os.uname().machine}-linux-gnu"
    engine = f"""
    set -e
    mount -t overlay -o {layers} overlay {root}
    mount -o bind {tmp_path / volume} {libraries}
    {cli.program} --root={driver.root} configure --no-cgroups --device=1 --utility {root}
    """
    caller = f"""
    mkdir {session} {tmp_path}/volume
    mount -t tmpfs tmpfs {session}
    mkdir {root} {session}/upper {session}/work {session}/volume
    unshare --mount busybox sh -c '{engine}'
    echo "status $?"
    ls -A {tmp_path / volume}
    """
    done = run(["unshare", "--mount", "sh", "-c", caller]).ok()
    assert "would have to be made in a volume" in done.stderr
    assert done.stdout == "status 1\n"


def test_configure_for_a_process_in_our_mount_namespace_is_refused(
    cli: Caller, tmp_path: Path
) -> None:
    """A process that shares our mount namespace isn't a container."""
    pid = f"--pid={os.getpid()}"
    done = cli("configure", pid, "--device=0", "--no-cgroups", str(tmp_path)).failed()
    assert "mount error: The container has no mount namespace of its own" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ctr(
    containerd_runc: Containerd,
    folder: Path,
    installation: Installation,
    configs: dict[str, Path],
    archive: Path,
) -> Iterator[Containerd]:
    """containerd with plain runc, and a ctr that finds the program, or the CDI spec from 2.3 on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin")
        patch.setenv("GPUHOOK_CONFIG", str(configs["runc"]))
        made = Containerd(containerd_runc.folder, containerd_runc.pid, Path("/usr/sbin/runc"))
        if made.takes_cdi:
            CDI.mkdir(exist_ok=True)
            options = ["generate", f"--config={configs['runc']}", f"--output={CDI}"]
            run([installation.command, "cdi", *options]).ok()
        yield made
    (CDI / "nvidia.com-gpu.yaml").unlink(missing_ok=True)


def test_the_gpus_option_of_ctr_gives_the_named_gpus(ctr: Containerd, driver: Driver) -> None:
    options = ["--gpus=0"]
    inside = seen(ctr.run(DEBIAN, *look(driver.minors), options=options))
    assert inside.gpu_minors == {driver.gpus[0].minor}
    done = ctr.run(DEBIAN, "nvidia-smi", "-L", options=[*options, "--gpus=2"]).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))


def test_the_gpus_option_of_ctr_with_an_unknown_gpu_is_refused(ctr: Containerd) -> None:
    done = ctr.run(DEBIAN, "true", options=["--gpus=99"]).failed()
    why = "devices nvidia.com/gpu=99" if ctr.takes_cdi else "99: unknown device"
    assert why in json.dumps(done.stderr)
