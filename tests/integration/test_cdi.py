"""gpuhook's CDI specs, read by podman: containers have the named devices and no others.

podman calls runc or crun itself, without gpu-py.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.bundles import CGROUP_PARENT
from harness.cdi import KIND, generate, read_by_engines
from harness.commands import Result, run
from harness.driver import Driver, lines_of_nvidia_smi, simulate
from harness.engines import settings
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.podman import Podman, podman
from harness.snapshot import nothing_left

from gpuhook.core.cdi.document import read

CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}


@dataclass(frozen=True)
class Site:
    """A podman whose containers get devices only by CDI, with the CDI spec's driver."""

    podman: Podman
    driver: Driver

    def run(self, *command: str, devices: tuple[str, ...], options: tuple[str, ...] = (),
            kind: str = "debian", env: tuple[str, ...] = ()) -> Result:  # fmt: skip
        """Run a command in a container with these devices."""
        named = settings("--device", [f"{KIND}={device}" for device in devices])
        return self.podman.run(image(kind), *command, env=env, options=(*named, *options))


@pytest.fixture(scope="module", params=["runc", "crun"])
def engine(request: pytest.FixtureRequest, workspace: Path, archive: Path) -> Iterator[Podman]:
    namespace: Namespace = request.getfixturevalue("host" if request.param == "runc" else "v1")
    runtime = Path(run(["sh", "-c", f"command -v {request.param}"]).ok().stdout.strip())
    folder = workspace / f"podman-cdi-{request.param}"
    with podman(folder, namespace, runtime, archive) as made:
        yield made


@pytest.fixture(scope="module")
def made(workspace: Path, installation: Installation, configs: dict[str, Path]) -> Path:
    return generate(installation, configs["runc"], workspace / "podman-cdi")


@pytest.fixture
def site(engine: Podman, driver: Driver, made: Path) -> Iterator[Site]:
    with read_by_engines(made):
        yield Site(engine, driver)


@pytest.mark.parametrize("indices", [(0,), (5,), (0, 2, 7), tuple(range(8))])
def test_a_container_gets_exactly_the_named_gpus(site: Site, indices: tuple[int, ...]) -> None:
    driver = site.driver
    devices = ("all",) if len(indices) == len(driver.gpus) else tuple(map(str, indices))
    with nothing_left(driver.root):
        inside = seen(site.run(*look(driver.minors), devices=devices))
    minors = {gpu.minor for gpu in driver.chosen(*indices)}
    assert inside.gpu_minors == minors
    assert {opened for opened, _ in inside.nodes.values()} == {"ENXIO"}
    assert {*inside.nodes} == CONTROL | {f"/dev/nvidia{minor}" for minor in minors}
    assert inside.by_hand == {
        minor: "ENXIO" if minor in minors else "EPERM" for minor in driver.minors
    }


def test_a_gpu_is_selected_by_uuid(site: Site) -> None:
    done = site.run("nvidia-smi", "-L", devices=(site.driver.gpus[3].uuid,)).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(site.driver.chosen(3))


@pytest.mark.parametrize("kind", ["debian", "lib64"])
def test_nvidia_smi_and_a_cuda_program_see_the_named_gpus(site: Site, kind: str) -> None:
    done = site.run(
        "sh", "-c", "nvidia-smi -L && gpuhook-cuda-probe", devices=("1", "4"), kind=kind
    )
    lines = done.ok().stdout.splitlines()
    assert lines[:2] == lines_of_nvidia_smi(site.driver.chosen(1, 4))
    assert "2" in lines[2].split(), done


def test_the_loader_finds_every_library(site: Site) -> None:
    folder = site.driver.library("libcuda.so.1").parent
    links = [path for path in folder.rglob("lib*.so.*") if path.is_symlink()]
    names = {path.name: path for path in [*links, folder / "libcuda.so"]}
    assert len(names) > 20
    found = seen(site.run(*look(libraries=names), devices=("0",))).libraries
    assert {name: inode for name, (_, inode) in found.items()} == {
        name: f"{path.stat().st_dev}:{path.stat().st_ino}" for name, path in names.items()
    }


def test_nvidia_visible_devices_is_set_to_void(site: Site) -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=all",)
    done = site.run("sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES", devices=("0",), env=env)
    assert done.ok().stdout == "void\n"


def test_a_container_without_a_request_gets_no_gpus(site: Site) -> None:
    done = site.run("busybox", "ls", "/dev", devices=())
    assert "nvidia" not in done.ok().stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--read-only",),
        ("--volume=/usr/share/common-licenses:/usr/share/nvidia2:ro", "--tmpfs=/tmp"),
        ("--ipc=host", "--pid=host"),
        ("--security-opt=no-new-privileges", "--cap-drop=all"),
    ],
    ids=lambda options: options[0],
)
def test_gpus_are_given_with_further_engine_options(site: Site, options: tuple[str, ...]) -> None:
    with nothing_left(site.driver.root):
        done = site.run("nvidia-smi", "-L", devices=("2",), options=options)
    assert done.ok().stdout.splitlines() == lines_of_nvidia_smi(site.driver.chosen(2))


def test_a_user_namespace_gets_gpus_or_a_clear_error(site: Site) -> None:
    options = ("--uidmap=0:100000:65536", "--gidmap=0:100000:65536")
    done = site.run("nvidia-smi", "-L", devices=("2",), options=options)
    if site.podman.runtime is not None and site.podman.runtime.name == "runc":
        # runc takes a user namespace's nodes from the host's own /dev, which has none here.
        assert "/dev/nvidia" in done.failed().stderr
        return
    if not (site.podman.folder / "root").stat().st_mode & 0o001:
        # podman 5 hides config.json from the container's users, and so from its hooks.
        assert "gpuhook-cdi-hook" in done.failed().stderr
        return
    assert done.ok().stdout.splitlines() == lines_of_nvidia_smi(site.driver.chosen(2))


def test_a_restarted_container_gets_the_same_gpu(site: Site) -> None:
    named = settings("--device", [f"{KIND}=6"])
    name = "gpuhook-cdi-again"
    words = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    words += ["--pids-limit=-1", f"--cgroup-parent={CGROUP_PARENT}", f"--name={name}"]
    site.podman.call("create", *words, *named, image("debian"), "nvidia-smi", "-L").ok()
    try:
        for _ in range(2):
            done = site.podman.call("start", "--attach", name).ok()
            assert done.stdout.splitlines() == lines_of_nvidia_smi(site.driver.chosen(6))
    finally:
        site.podman.call("rm", "--force", name)


def test_an_unknown_device_name_is_refused(site: Site) -> None:
    assert "nvidia.com/gpu=8" in site.run("true", devices=("8",)).failed().stderr


@pytest.fixture(scope="module")
def mig_driver(installation: Installation, workspace: Path) -> Driver:
    options = ("--gpus=2", "--model=H100", "--mig=0:1g.10gb,2g.20gb")
    return simulate(installation, workspace / "podman-mig", *options)


@pytest.fixture
def mig_site(
    engine: Podman, installation: Installation, mig_driver: Driver, tmp_path: Path
) -> Iterator[Site]:
    """A simulated machine whose first GPU is in MIG mode."""
    config = write_config(tmp_path / "config", mig_driver.root, ["runc"])
    with read_by_engines(generate(installation, config, tmp_path / "cdi")):
        yield Site(engine, mig_driver)


@pytest.mark.parametrize(
    ("devices", "gpus", "migs", "caps"),
    [(("0:0",), 1, 1, 2), (("0:1", "1"), 2, 1, 2), (("all",), 2, 2, 4), (("1",), 1, 0, 0)],
)
def test_mig_devices_are_given_by_name(
    mig_site: Site, devices: tuple[str, ...], gpus: int, migs: int, caps: int
) -> None:
    script = "nvidia-smi -L; busybox find /dev/nvidia-caps -type c | busybox wc -l"
    lines = mig_site.run("sh", "-c", script, devices=devices).ok().stdout.splitlines()
    assert len([line for line in lines if line.startswith("GPU ")]) == gpus
    assert len([line for line in lines if line.startswith("  MIG")]) == migs
    assert lines[-1] == str(caps)


# The document -------------------------------------------------------------------------------


def call(installation: Installation, config: Path, *words: str | Path) -> Result:
    return run([installation.command, "cdi", "generate", "--config", config, *words])


def test_generated_yaml_and_json_specs_are_valid_and_equal(
    installation: Installation, configs: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("a.yaml", "a.json"):
        path = tmp_path / name
        done = call(installation, configs["runc"], "--output", path).ok()
        assert done.stdout == f"wrote {path} (version 0.5.0, 17 names)\n"
        assert read(path.read_bytes()).problems == ()
    both = [read((tmp_path / name).read_bytes()).document for name in ("a.yaml", "a.json")]
    assert both[0] == both[1]


def test_cdi_generate_dry_run_shows_a_diff_and_writes_nothing(
    installation: Installation, configs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "nvidia.com-gpu.yaml"
    words = (installation, configs["runc"], "--output", tmp_path)
    new = call(*words, "--dry-run").ok().stdout
    assert new.startswith(f"--- /dev/null\n+++ {path}\n")
    assert not path.exists()
    assert call(*words).ok().stdout.startswith(f"wrote {path} ")
    before = path.stat()
    assert call(*words).ok().stdout == f"{path}: unchanged\n"
    assert call(*words, "--dry-run").ok().stdout == ""
    assert path.stat().st_ino == before.st_ino
    less = call(*words, "--device-name-strategy=uuid", "--dry-run").ok().stdout
    assert '-   name: "0"\n' in less
    assert path.stat().st_ino == before.st_ino


def test_another_generators_spec_for_the_same_devices_causes_a_warning(
    installation: Installation, configs: dict[str, Path], tmp_path: Path, made: Path
) -> None:
    other = tmp_path / "nvidia.yaml"
    shutil.copy(made, other)
    said = call(installation, configs["runc"], "--output", tmp_path).ok().stderr
    assert said.startswith(f"gpuhook: warning: {other} names the same devices of nvidia.com/gpu")
    other.unlink()
    assert call(installation, configs["runc"], "--output", tmp_path).ok().stderr == ""


def test_a_spec_is_written_to_standard_output(
    installation: Installation, configs: dict[str, Path]
) -> None:
    words = ("--format=json", "--device-name-strategy=type-index", f"--kind={KIND}")
    made = json.loads(call(installation, configs["runc"], *words).ok().stdout)
    assert [device["name"] for device in made["devices"]] == ["all", *(f"gpu{n}" for n in range(8))]


def test_a_machine_without_a_driver_is_refused(installation: Installation, tmp_path: Path) -> None:
    empty = tmp_path / "root"
    empty.mkdir()
    config = write_config(tmp_path / "config", empty, ["runc"])
    said = call(installation, config, "--output", tmp_path / "cdi").failed().stderr
    assert said.startswith(f"gpuhook: There is no NVIDIA driver below the driver root {empty}")
    assert not (tmp_path / "cdi").exists()


def test_a_full_disk_keeps_the_old_spec(
    installation: Installation, configs: dict[str, Path], workspace: Path
) -> None:
    folder = workspace / "small-disk"
    folder.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder]).ok()
    try:
        path = folder / "nvidia.com-gpu.yaml"
        path.write_text("old")
        done = call(installation, configs["runc"], "--output", folder).failed()
        assert done.stderr.startswith(f"gpuhook: {path} can't be written: No space left on device")
        assert path.read_text() == "old"
        assert list(folder.iterdir()) == [path]
    finally:
        run(["umount", folder]).ok()


def test_transform_root_rewrites_paths_and_keeps_a_valid_spec(
    installation: Installation, configs: dict[str, Path], driver: Driver, tmp_path: Path, made: Path
) -> None:
    words: list[str | Path] = [installation.command, "cdi", "transform", "root"]
    away = [*words, f"--from={driver.root}", "--to=/", "--input", made]
    moved = tmp_path / "moved.yaml"
    run([*away, "--output", moved]).ok()
    assert moved.stat().st_mode & 0o777 == 0o644
    made.chmod(0o600)  # a private spec may contain what other users must not read
    run([*away, "--output", moved]).ok()
    assert moved.stat().st_mode & 0o777 == 0o600
    made.chmod(0o644)
    assert str(driver.root) not in moved.read_text().replace(str(configs["runc"]), "")
    assert read(moved.read_bytes()).problems == ()
