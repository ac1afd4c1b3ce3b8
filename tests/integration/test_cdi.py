"""CDI documents of ours, read by podman: containers have what they name, and nothing of the rest.

podman calls runc or crun itself; gpu-py has no part in any of this.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from harness.commands import Result, run
from harness.driver import Driver, lines_of_nvidia_smi, simulate
from harness.engines import settings
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.podman import Podman, podman
from harness.snapshot import nothing_left

KIND = "nvidia.com/gpu"
CDI = Path("/etc/cdi")  # the session has an /etc of its own
CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}


def generate(installation: Installation, config: Path, output: Path, *options: str) -> Result:
    words = ["cdi", "generate", "--config", config, "--output", output, *options]
    return run([installation.command, *words]).ok()


@dataclass(frozen=True)
class Site:
    """A podman whose containers get devices by CDI alone, the document and the driver of it."""

    podman: Podman
    driver: Driver
    document: Path

    def run(self, *command: str, devices: tuple[str, ...], options: tuple[str, ...] = (),
            kind: str = "debian", env: tuple[str, ...] = ()) -> Result:  # fmt: skip
        """Run a command in a container with these devices."""
        named = settings("--device", [f"{KIND}={device}" for device in devices])
        return self.podman.run(image(kind), *command, env=env, options=(*named, *options))


def folder_of_engine(request: pytest.FixtureRequest) -> str:
    return f"podman-cdi-{request.param}"


@pytest.fixture(scope="module", params=["runc", "crun"])
def engine(request: pytest.FixtureRequest, workspace: Path, archive: Path) -> Iterator[Podman]:
    namespace: Namespace = request.getfixturevalue("host" if request.param == "runc" else "v1")
    runtime = Path(run(["sh", "-c", f"command -v {request.param}"]).ok().stdout.strip())
    folder = workspace / f"podman-cdi-{request.param}"
    with podman(folder, namespace, runtime, archive) as made:
        yield made


@pytest.fixture(scope="module")
def site(
    engine: Podman, installation: Installation, driver: Driver, configs: dict[str, Path]
) -> Iterator[Site]:
    generate(installation, configs["runc"], CDI)
    document = CDI / "nvidia.com-gpu.yaml"
    yield Site(engine, driver, document)
    document.unlink()


@pytest.mark.parametrize("indices", [(0,), (5,), (0, 2, 7), tuple(range(8))])
def test_exactly_the_gpus_that_are_named(site: Site, indices: tuple[int, ...]) -> None:
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


def test_by_uuid(site: Site) -> None:
    done = site.run("nvidia-smi", "-L", devices=(site.driver.gpus[3].uuid,)).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(site.driver.chosen(3))


@pytest.mark.parametrize("kind", ["debian", "lib64"])
def test_programs_that_use_the_driver(site: Site, kind: str) -> None:
    done = site.run(
        "sh", "-c", "nvidia-smi -L && gpuhook-cuda-probe", devices=("1", "4"), kind=kind
    )
    lines = done.ok().stdout.splitlines()
    assert lines[:2] == lines_of_nvidia_smi(site.driver.chosen(1, 4))
    assert "2" in lines[2].split(), done
