"""Mode spec, in which a container has its GPUs without a hook."""

from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle
from harness.driver import Driver, lines_of_nvidia_smi
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left

SPEC = 'mode = "spec"\n'
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


@pytest.fixture
def spec_env(bundle: Bundle, driver: Driver) -> dict[str, str]:
    config = write_config(bundle.path / "config", driver.root, [bundle.runtime], SPEC)
    return {"GPUHOOK_CONFIG": str(config)}


@RUNTIMES
def test_programs_find_the_driver_without_a_loader_cache_in_mode_spec(
    bundle: GpuBundle, spec_env: dict[str, str], driver: Driver
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
    bundle.command("sh", "-c", "nvidia-smi -L && gpuhook-cuda-probe")
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        done = bundle.run(bundle.gpu_py, spec_env).ok()
    assert done.stdout.splitlines()[:2] == lines_of_nvidia_smi(driver.chosen(0, 2))
    assert "hooks" not in bundle.spec()


def test_libraries_are_mounted_under_each_of_their_names(
    bundle: Bundle, installation: Installation, spec_env: dict[str, str], driver: Driver
) -> None:
    """config.json can't make links, and the image's cache is unchanged.

    The loader therefore searches the folder.
    """
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    bundle.command(*look(libraries=LIBRARIES))
    inside = seen(bundle.run(installation.runtime, spec_env))
    for name in LIBRARIES:
        source = driver.library(name)
        status = source.stat()
        folder = str(source.parent).removeprefix(str(driver.root))
        assert inside.libraries[name] == (f"{folder}/{name}", f"{status.st_dev}:{status.st_ino}")
    assert not (bundle.path / "upper/etc/ld.so.cache").exists()


def test_a_container_in_mode_spec_opens_only_the_requested_gpu(
    bundle: GpuBundle, spec_env: dict[str, str], driver: Driver
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look(driver.minors))
    inside = seen(bundle.run(bundle.gpu_py, spec_env))
    (gpu,) = driver.chosen(5)
    assert inside.gpu_minors == {gpu.minor}
    assert {opened for opened, _ in inside.nodes.values()} == {"ENXIO"}
    assert inside.by_hand == {
        minor: "ENXIO" if minor == gpu.minor else "EPERM" for minor in driver.minors
    }


@ONE
def test_the_spec_of_a_container_without_a_request_is_unchanged(
    bundle: GpuBundle, spec_env: dict[str, str]
) -> None:
    before = Path(bundle.config).read_bytes()
    bundle.run(bundle.gpu_py, spec_env).ok()
    assert Path(bundle.config).read_bytes() == before


@RUNTIMES
def test_gpu_hooks_added_by_the_engine_are_removed_in_mode_spec(
    bundle: Bundle,
    installation: Installation,
    spec_env: dict[str, str],
    driver: Driver,
    tmp_path: Path,
) -> None:
    """Docker's --gpus and podman's hooks-dir add a hook, which would do the work again."""
    nvidia = tmp_path / "nvidia-container-runtime-hook"
    nvidia.symlink_to(installation.hook)
    # The hook reads its input; otherwise crun sometimes reports a broken pipe.
    other = {"path": "/bin/sh", "args": ["sh", "-c", "cat >/dev/null"]}
    given = [
        {"path": str(hook), "args": [hook.name, "prestart"]} for hook in (nvidia, installation.hook)
    ]
    bundle.change(lambda spec: spec.update(hooks={"prestart": [*given, other]}))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*look(driver.minors))
    inside = seen(bundle.run(installation.runtime, spec_env))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(5)}
    assert bundle.spec()["hooks"] == {"prestart": [other]}
