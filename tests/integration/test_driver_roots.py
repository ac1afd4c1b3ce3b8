"""Drivers in unusual places: other driver roots and other folders."""

import shutil
from pathlib import Path

import pytest
from harness.bundles import GpuBundle
from harness.driver import Driver, simulate
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prefork import ONE
from harness.snapshot import nothing_left

GKE = "usr/local/nvidia/lib64"
ODD = "opt/driver/lib64"


@pytest.fixture(scope="module")
def moved(workspace: Path, installation: Installation) -> Driver:
    """A driver as on GKE, with all libraries in a folder that isn't in ld.so.cache."""
    return _with_libraries_in(GKE, simulate(installation, workspace / "driver-gke", "--gpus=2"))


@pytest.fixture(scope="module")
def odd(workspace: Path, installation: Installation) -> Driver:
    """A driver with all libraries in a folder that gpuhook doesn't search by default."""
    return _with_libraries_in(ODD, simulate(installation, workspace / "driver-odd", "--gpus=2"))


def _with_libraries_in(where: str, made: Driver) -> Driver:
    folder = made.root / where
    folder.mkdir(parents=True)
    for path in (made.root / "usr/lib/x86_64-linux-gnu").iterdir():
        shutil.move(path, folder / path.name)
    (made.root / "etc/ld.so.cache").unlink()
    return made


def environment(
    driver: Path, folder: Path, low_level: tuple[str, Namespace], more: str
) -> dict[str, str]:
    config = write_config(folder, driver, [low_level[0]])
    text = config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{more}\n")
    config.write_text(text)
    return {"GPUHOOK_CONFIG": str(config)}


@ONE
@pytest.mark.parametrize("where", [GKE, ODD])
def test_libraries_missing_from_the_loader_cache_are_found(
    bundle: GpuBundle,
    low_level: tuple[str, Namespace],
    moved: Driver,
    odd: Driver,
    tmp_path: Path,
    where: str,
) -> None:
    driver, more = (moved, "") if where == GKE else (odd, f'library-search-paths = ["/{ODD}"]')
    env = environment(driver.root, tmp_path / "config", low_level, more)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    bundle.command(*look(libraries=["libcuda.so.1", "libnvidia-ml.so.1"]))
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        inside = seen(bundle.run(bundle.gpu_py, env))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.gpus}
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        status = (driver.root / where / name).resolve().stat()
        assert inside.libraries[name][1] == f"{status.st_dev}:{status.st_ino}"


@ONE
def test_unusual_library_folders_must_be_configured(
    bundle: GpuBundle, low_level: tuple[str, Namespace], odd: Driver, tmp_path: Path
) -> None:
    env = environment(odd.root, tmp_path / "config", low_level, "")
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    failed = bundle.run(bundle.gpu_py, env).failed()
    assert "libnvidia-ml.so.1" in failed.stderr
    assert str(odd.root) in failed.stderr


@ONE
def test_a_missing_driver_container_is_refused_with_a_remedy(
    bundle: GpuBundle, low_level: tuple[str, Namespace], tmp_path: Path
) -> None:
    env = environment(tmp_path / "run/nvidia/driver", tmp_path / "config", low_level, "")
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    failed = bundle.run(bundle.gpu_py, env).failed()
    assert "Start the driver container" in failed.stderr


@ONE
def test_a_driver_root_behind_a_link_is_followed(
    bundle: GpuBundle, low_level: tuple[str, Namespace], driver: Driver, tmp_path: Path
) -> None:
    (tmp_path / "driver").symlink_to(driver.root)
    env = environment(tmp_path / "driver", tmp_path / "config", low_level, "")
    bundle.environ("NVIDIA_VISIBLE_DEVICES=4")
    bundle.command(*look(libraries=["libcuda.so.1"]))
    inside = seen(bundle.run(bundle.gpu_py, env))
    assert inside.gpu_minors == {driver.gpus[4].minor}
    assert inside.libraries["libcuda.so.1"][0] != "-"
