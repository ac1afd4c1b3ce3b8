"""A container that asks for no GPU runs as if gpu-py were the low-level runtime itself."""

import pytest
from harness.bundles import GpuBundle
from harness.driver import Driver
from harness.inside import look, seen
from harness.prefork import RUNTIMES
from harness.snapshot import nothing_left

NOTHING: list[list[str]] = [
    [],
    ["NVIDIA_VISIBLE_DEVICES="],
    ["NVIDIA_VISIBLE_DEVICES=void"],
    ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"],
    ["NVIDIA_DRIVER_CAPABILITIES=all"],
    ["nvidia_visible_devices=all"],
]


@pytest.mark.parametrize("settings", NOTHING, ids=str)
@RUNTIMES
def test_a_container_without_a_request_is_left_unchanged(
    bundle: GpuBundle, driver: Driver, settings: list[str]
) -> None:
    bundle.environ(*settings)
    bundle.command(*look(libraries=["libcuda.so.1"]))
    before = bundle.config.stat(), bundle.config.read_bytes()
    with nothing_left(driver.root, bundle.path / "upper", pid=bundle.namespace.pid):
        inside = seen(bundle.start())
    after = bundle.config.stat(), bundle.config.read_bytes()
    assert after[1] == before[1]
    assert after[0].st_ino == before[0].st_ino
    assert after[0].st_mtime_ns == before[0].st_mtime_ns
    assert inside.nodes == {}
    assert inside.libraries["libcuda.so.1"][0] == "-"


def test_a_container_without_gpus_is_the_same_with_and_without_gpu_py(bundle: GpuBundle) -> None:
    script = """
    busybox find /dev /etc /run /usr/lib | sort
    busybox env
    busybox awk '{print $4, $5, $6}' /proc/self/mountinfo
    busybox grep -E 'Cap|Groups|NoNewPrivs|Seccomp|SigBlk|SigIgn|SigCgt' /proc/self/status
    ls -l /proc/self/fd | busybox wc -l
    """
    bundle.command("sh", "-c", script)
    ours = bundle.start().ok()
    theirs = bundle.run(bundle.runtime).ok()
    assert ours.stdout.splitlines() == theirs.stdout.splitlines()
    assert ours.stderr == theirs.stderr


@pytest.mark.parametrize("status", [0, 1, 42])
@RUNTIMES
def test_the_containers_exit_status_is_returned(bundle: GpuBundle, status: int) -> None:
    for settings in ([], ["NVIDIA_VISIBLE_DEVICES=0"]):
        bundle.environ(*settings)
        bundle.command("sh", "-c", f"exit {status}")
        assert bundle.start().status == status
