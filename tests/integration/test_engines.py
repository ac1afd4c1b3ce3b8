"""Exactly the requested GPUs in containers of Docker, containerd and podman."""

import pytest
from harness import images
from harness.driver import Driver, lines_of_nvidia_smi
from harness.engines import Engine
from harness.images import image
from harness.inside import Inside, look, seen
from harness.snapshot import nothing_left

CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
DEBIAN = image("debian")


def assert_sees(inside: Inside, driver: Driver, *indices: int) -> None:
    """Assert that exactly the GPUs with these indices can be reached."""
    minors = {gpu.minor for gpu in driver.chosen(*indices)}
    assert set(inside.nodes) == CONTROL | {f"/dev/nvidia{minor}" for minor in minors}
    assert {opened for opened, _ in inside.nodes.values()} == {"ENXIO"}
    assert inside.gpu_minors == minors
    assert inside.by_hand == {
        minor: "ENXIO" if minor in minors else "EPERM" for minor in driver.minors
    }


@pytest.mark.parametrize("kind", images.KINDS)
def test_a_container_gets_exactly_the_requested_gpus(
    engine: Engine, driver: Driver, kind: str
) -> None:
    names = [] if kind == "busybox" else ["libcuda.so.1", "libnvidia-ml.so.1"]
    command = look(driver.minors, names)
    with nothing_left(driver.root, pid=engine.pid):
        done = engine.run(image(kind), *command, env=["NVIDIA_VISIBLE_DEVICES=0,2"])
    inside = seen(done)
    assert_sees(inside, driver, 0, 2)
    for name in names:
        status = driver.library(name).stat()
        assert inside.libraries[name][1] == f"{status.st_dev}:{status.st_ino}"


@pytest.mark.parametrize("value", [None, ""])
def test_a_container_without_a_request_gets_no_gpus(
    engine: Engine, driver: Driver, value: str | None
) -> None:
    env = [] if value is None else [f"NVIDIA_VISIBLE_DEVICES={value}"]
    inside = seen(engine.run(DEBIAN, *look(driver.minors, ["libcuda.so.1"]), env=env))
    assert inside.nodes == {}
    assert inside.libraries["libcuda.so.1"][0] == "-"
    assert set(inside.by_hand.values()) == {"EPERM"}


def test_none_gives_driver_files_without_a_gpu(engine: Engine, driver: Driver) -> None:
    env = ["NVIDIA_VISIBLE_DEVICES=none"]
    inside = seen(engine.run(DEBIAN, *look(driver.minors, ["libcuda.so.1"]), env=env))
    assert_sees(inside, driver)
    assert inside.libraries["libcuda.so.1"][0] != "-"


@pytest.mark.parametrize("kind", ["debian", "lib64"])
def test_programs_see_the_requested_gpus(engine: Engine, driver: Driver, kind: str) -> None:
    script = f"nvidia-smi -L && {images.CUDA_PROBE}"
    gpus = driver.chosen(0, 2)
    env = [f"NVIDIA_VISIBLE_DEVICES={','.join(gpu.uuid for gpu in gpus)}"]
    lines = engine.run(image(kind), "sh", "-c", script, env=env).ok().stdout.splitlines()
    assert lines[:2] == lines_of_nvidia_smi(gpus)
    assert lines[2] == "CUDA devices: 2"
    assert [gpu.uuid in line for gpu, line in zip(gpus, lines[3:], strict=True)] == [True, True]
