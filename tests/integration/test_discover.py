"""Discovery with simulated drivers finds exactly the simulated devices."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.commands import wait_until

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError
from gpuhook.vendors.nvidia.discover import discover
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook_simulate.vendors.nvidia import Built, Failure, Options, build, remove


@pytest.fixture
def root(workspace: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = workspace / f"discover-{id(request)}"
    yield path
    if path.exists():
        remove(str(path))


def simulate(root: Path, **options: Any) -> tuple[Built, Config]:
    built = build(Options(root=str(root), **options))
    config = Config()
    config.driver_root = built.root
    return built, config


def test_gpus_are_described_by_their_properties(root: Path) -> None:
    built, config = simulate(root, gpus=3, minors=(5, 0, 2), models=("H100", "L4", "T4"))
    found = discover(config)
    assert (found.root, found.driver_version) == (built.root, built.driver_version)
    assert found.cuda_version == built.cuda_version
    assert [gpu.minor for gpu in found.gpus] == [5, 0, 2]
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2]
    assert [gpu.uuid for gpu in found.gpus] == [gpu.uuid for gpu in built.gpus]
    assert [gpu.architecture for gpu in found.gpus] == ["9.0", "8.9", "7.5"]
    assert [gpu.kernel_bus_id for gpu in found.gpus] == [gpu.proc_bus_id for gpu in built.gpus]
    assert all(len(gpu.drm) == 2 for gpu in found.gpus)


def test_nodes_have_the_numbers_on_disk(root: Path) -> None:
    built, config = simulate(root, gpus=2, minors=(7, 1))
    for node in discover(config).nodes:
        device = (Path(built.root) / node.path.lstrip("/")).stat().st_rdev
        assert (node.major, node.minor) == (device >> 8, device & 0xFF), node.path


def test_mig_devices_have_their_capabilities(root: Path) -> None:
    built, config = simulate(
        root, gpus=2, minors=(1, 0), models=("A100",), mig={1: ("3g.40gb", "1g.10gb")}
    )
    found = discover(config)
    assert [gpu.mig_enabled for gpu in found.gpus] == [False, True]
    made = {(m.uuid, m.gi, m.ci, m.gi_cap, m.ci_cap) for m in built.gpus[1].migs}
    assert {(m.uuid, m.gi, m.ci, m.gi_cap, m.ci_cap) for m in found.gpus[1].mig} == made
    assert len(made) == 2
    for mig in found.gpus[1].mig:
        assert found.node(f"/dev/nvidia-caps/nvidia-cap{mig.gi_cap}") is not None


def test_an_inventory_survives_json(root: Path) -> None:
    _, config = simulate(root, gpus=2, models=("A100",), mig={0: ("1g.10gb",)})
    found = discover(config)
    assert NvidiaInventory.from_json(found.to_json()) == found


def test_a_machine_without_gpus_has_an_empty_inventory(root: Path) -> None:
    _, config = simulate(root, gpus=0)
    assert discover(config).gpus == ()


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (Failure.NOT_LOADED, "modprobe nvidia"),
        (Failure.VERSION_MISMATCH, "reload it or reboot"),
    ],
)
def test_a_broken_driver_is_reported_with_its_remedy(
    root: Path, failure: Failure, text: str
) -> None:
    _, config = simulate(root, gpus=1, failure=failure)
    with pytest.raises(DriverError, match=text):
        discover(config)


def test_a_lost_gpu_is_recorded_and_the_others_found(root: Path) -> None:
    built, config = simulate(root, gpus=3, lost=frozenset({1}))
    found = discover(config)
    assert [gpu.uuid for gpu in found.gpus] == [built.gpus[0].uuid, built.gpus[2].uuid]
    assert found.lost == (1,)


def test_a_hung_driver_causes_an_error_after_the_timeout(root: Path) -> None:
    _, config = simulate(root, gpus=1, init_seconds=3600)
    config.nvml_timeout = 0.5
    start = time.monotonic()
    with pytest.raises(DriverError, match=r"0\.5 seconds"):
        discover(config)
    assert time.monotonic() - start < 600


def test_a_hanging_driver_process_ends_with_its_caller(root: Path) -> None:
    _, config = simulate(root, gpus=1, init_seconds=3600)
    asker = os.fork()
    if asker == 0:
        try:
            discover(config)
        finally:
            os._exit(1)
    children = Path(f"/proc/{asker}/task/{asker}/children")
    wait_until(lambda: children.read_text() != "", "NVML was asked")
    (child,) = children.read_text().split()
    wait_until(lambda: "Uid:\t65534" in Path(f"/proc/{child}/status").read_text(), "it is nobody")
    held = {os.readlink(fd) for fd in Path(f"/proc/{child}/fd").iterdir() if fd.name not in "012"}
    assert len({name for name in held if name.startswith("pipe:")}) == 1
    os.kill(asker, signal.SIGKILL)
    os.waitpid(asker, 0)
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "the child ended with it")


def test_discovery_works_without_standard_streams(root: Path) -> None:
    """Their descriptors 0 to 2 are free then, and the pipe to NVML's child process gets them."""
    _, config = simulate(root, gpus=1)
    asker = os.fork()
    if asker == 0:
        found = 0
        try:
            os.closerange(0, 3)
            found = len(discover(config).gpus)
        finally:
            os._exit(0 if found == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(asker, 0)[1]) == 0


def test_a_crashing_driver_causes_an_error(root: Path) -> None:
    """NVML runs in a child process, so its crash doesn't kill the container's creator."""
    built, config = simulate(root, gpus=1)
    library = Path(built.root) / built.library_dir.lstrip("/")
    target = library / f"libnvidia-ml.so.{built.driver_version}"
    broken = (library / f"libnvidia-cfg.so.{built.driver_version}").read_bytes()
    target.write_bytes(broken)
    with pytest.raises(DriverError):
        discover(config)


def test_nvml_runs_as_the_configured_user(root: Path) -> None:
    _, config = simulate(root, gpus=1)
    config.user = "nobody:nogroup"
    assert len(discover(config).gpus) == 1
    config.user = "no-such-user"
    with pytest.raises(DriverError, match="no-such-user"):
        discover(config)


def test_a_missing_root_is_named(root: Path) -> None:
    config = Config()
    config.driver_root = str(root)
    with pytest.raises(DriverError, match=str(root)):
        discover(config)


def modprobe(root: Path, script: str) -> None:
    """Add an nvidia-modprobe to the driver root; it runs there with busybox' shell."""
    (root / "bin").mkdir(exist_ok=True)
    shutil.copy2("/bin/busybox", root / "bin/busybox")
    program = root / "usr/bin/nvidia-modprobe"
    program.write_text(f"#!/bin/busybox sh\n{script}\n")
    program.chmod(0o755)


def test_missing_nodes_are_made_by_the_drivers_own_program(root: Path) -> None:
    _, config = simulate(root, gpus=1)
    (root / "dev/nvidia-uvm").unlink()
    modprobe(
        root,
        'echo "$@ $MARK" >/seen; busybox() { /bin/busybox "$@"; }; '
        "busybox mknod /dev/nvidia-uvm c 511 0",
    )
    config.environment = ("MARK=here",)
    assert discover(config).node("/dev/nvidia-uvm") is not None
    assert (root / "seen").read_text() == "-c 0 -u here\n"


def test_modprobe_is_not_run_when_unneeded_or_disabled(root: Path) -> None:
    _, config = simulate(root, gpus=1)
    modprobe(root, "echo run >/seen")
    discover(config)
    (root / "dev/nvidia-uvm").unlink()
    config.load_kmods = False
    discover(config)
    assert not (root / "seen").exists()


@pytest.mark.protects(
    "modprobe-writers", "root doesn't run an nvidia-modprobe that another user can change"
)
@pytest.mark.parametrize("owned", ["usr/bin/nvidia-modprobe", "usr/bin", "usr"])
def test_a_program_owned_by_another_user_is_not_run(root: Path, owned: str) -> None:
    _, config = simulate(root, gpus=1)
    (root / "dev/nvidia-uvm").unlink()
    modprobe(root, "echo run >/seen")
    os.chown(root / owned, 4401, -1)
    discover(config)
    assert not (root / "seen").exists()


def test_a_failing_modprobe_is_no_error(root: Path) -> None:
    _, config = simulate(root, gpus=1)
    (root / "dev/nvidia-uvm").unlink()
    modprobe(root, "exit 1")
    assert discover(config).node("/dev/nvidia-uvm") is None
