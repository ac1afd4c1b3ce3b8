"""GPUs for the steps of an image build, and the files that stay in the image."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import run, wait_until
from harness.docker import Docker, dockerd
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.installation import Installation
from harness.namespaces import Namespace
from harness.podman import Podman

BUILT = "localhost/built:test"
FILE = f"""\
FROM {image("debian")}
ENV NVIDIA_VISIBLE_DEVICES=0,2
RUN nvidia-smi -L >/seen && gpuhook-cuda-probe >>/seen
ENV NVIDIA_VISIBLE_DEVICES=void
"""
# Print what the step saw, and then which driver files are in the image without a GPU.
LOOK = (
    "cat /seen; busybox find / -xdev "
    r"'(' -name '*nvidia*' -o -name 'libcuda*' ')' -exec busybox stat -c 'left %s %F %n' '{}' ';'"
)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "Dockerfile").write_text(FILE)
    return tmp_path


def assert_built_with_gpus(printed: str, driver: Driver) -> None:
    """Assert that the step saw two GPUs and that the image contains no data of the driver.

    Empty files and folders may remain, because they were the mount points.
    """
    lines = printed.splitlines()
    seen = [line for line in lines if not line.startswith("left ")]
    assert seen[:3] == [*lines_of_nvidia_smi(driver.chosen(0, 2)), "CUDA devices: 2"]
    for line in lines:
        if line.startswith("left "):
            size, kind = line.split()[1:3]
            assert size == "0" or kind in {"directory", "symbolic"}, line


def test_podman_builds_with_gpus_by_the_hook(
    podman_hook_runc: Podman, context: Path, driver: Driver
) -> None:
    build(podman_hook_runc, context, f"--hooks-dir={podman_hook_runc.hooks}")
    done = podman_hook_runc.run(BUILT, "sh", "-c", LOOK).ok()
    assert_built_with_gpus(done.stdout, driver)


def test_podman_builds_with_gpus_by_the_runtime(
    podman_runtime: Podman, context: Path, driver: Driver
) -> None:
    build(podman_runtime, context)
    done = podman_runtime.run(BUILT, "sh", "-c", LOOK).ok()
    assert_built_with_gpus(done.stdout, driver)


def build(podman: Podman, context: Path, *options: str) -> None:
    limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    podman.call("build", "--network=none", *limits, *options, f"--tag={BUILT}", context).ok()


@pytest.fixture
def by_default(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    configs: dict[str, Path],
) -> Iterator[Docker]:
    """A dockerd whose default runtime is gpu-py."""
    env = {"GPUHOOK_CONFIG": str(configs["runc"])}
    runtimes = {"gpu-py": installation.runtime}
    with dockerd(workspace / "build-docker", host, runtimes, archive, env) as engine:
        settings = engine.folder / "daemon.json"
        wanted = {**json.loads(settings.read_text()), "default-runtime": "gpu-py"}
        settings.write_text(json.dumps(wanted))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGHUP)
        default = ("info", "--format", "{{.DefaultRuntime}}")
        wait_until(
            lambda: engine.call(*default).stdout.strip() == "gpu-py",
            "dockerd has taken the default runtime over",
        )
        yield engine


def test_dockers_classic_builder_builds_with_gpus(
    by_default: Docker, context: Path, driver: Driver
) -> None:
    server = ["docker", "-H", f"unix://{by_default.folder}/docker.sock"]
    env = {"DOCKER_BUILDKIT": "0", "DOCKER_CONFIG": str(by_default.folder / "client")}
    run([*server, "build", "--network=none", f"--tag={BUILT}", str(context)], env=env).ok()
    done = by_default.run(BUILT, "sh", "-c", LOOK).ok()
    assert_built_with_gpus(done.stdout, driver)
