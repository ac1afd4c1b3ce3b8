"""Containers that real containerds start by the CRI from the CDI ids of gpuhook dra."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import images
from harness.commands import wait_until
from harness.containerd import WITH_CDI, containerd
from harness.cri import Container, Cri, CriError
from harness.dra import GPU_DRIVER, Node, result, slice_name
from harness.driver import Driver, Gpu, lines_of_nvidia_smi, simulate
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.releases import Release, release

DEBIAN = image("debian")
SCRIPT = "nvidia-smi -L; gpuhook-cuda-probe"


@pytest.fixture(scope="module")
def pause_archive(workspace: Path, roots: dict[str, Path]) -> Path:
    """The image of the process that keeps a pod's namespaces open."""
    return images.save(
        {"pause": roots["busybox"]}, workspace / "dra-pause.tar", ("sleep", "infinity")
    )


@pytest.fixture(scope="module")
def driver(installation: Installation, workspace: Path) -> Driver:
    return simulate(installation, workspace / "dra/root", "--gpus", "4", "--minors", "3,0,1,2")


@pytest.fixture(scope="module", params=["trixie", "sid"])
def debian(
    request: pytest.FixtureRequest,
    workspace: Path,
    engine_roots: dict[str, Path],
    installation: Installation,
    driver: Driver,
) -> Iterator[Release]:
    """A Debian release; trixie has containerd 1.7, where CDI isn't enabled by default."""
    name = request.param
    words = (name, engine_roots[name], workspace / f"dra-{name}", installation, driver)
    with release(*words) as made:
        yield made


@pytest.fixture(scope="module")
def node(workspace: Path, debian: Release, driver: Driver) -> Iterator[Node]:
    config = write_config(workspace / f"dra/{debian.name}", driver.root, ["runc"])
    made = Node(workspace / f"n-{debian.name}", debian.installation, config)
    more: Any = {"device_metadata": True}
    with made.kubelet, made.service(options=more):
        yield made


@pytest.fixture(scope="module")
def cri(
    workspace: Path, debian: Release, node: Node, archive: Path, pause_archive: Path
) -> Iterator[Cri]:
    """The release's containerd, with plain runc, which reads the claims' CDI specs."""
    text = WITH_CDI.replace('["/etc/cdi", "/var/run/cdi"]', f'["{node.cdi}"]')
    folder = workspace / f"c-{debian.name}"
    words: Any = (folder, debian.namespace, Path(debian.which("runc")), archive, {}, text)
    with containerd(*words) as engine:
        for each in (archive, pause_archive):
            engine.call("images", "import", each, within="k8s.io").ok()
        made = Cri(engine.folder / "containerd.sock")
        wait_until(made.is_ready, "the CRI answers")
        yield made
        made.close()


def check(container: Container, driver: Driver, gpus: list[Gpu]) -> None:
    """Check that a container has these GPUs, can use them, and can open no other."""
    lines = container.exec("sh", "-ec", SCRIPT).ok().stdout.splitlines()
    found = [line for line in lines if not line.startswith("CUDA device ")]
    assert found == [*lines_of_nvidia_smi(gpus), f"CUDA devices: {len(gpus)}"]
    minors = {gpu.minor for gpu in gpus}
    inside = seen(container.exec(*look(driver.minors)))
    assert inside.gpu_minors == minors
    assert inside.by_hand == {
        minor: "ENXIO" if minor in minors else "EPERM" for minor in driver.minors
    }


@contextmanager
def claimed(node: Node, driver: Driver, name: str, *numbers: int) -> Iterator[list[str]]:
    """Prepare a claim, with a request for each of these GPUs, during a block; yield the CDI ids."""
    gpus = [driver.gpus[number] for number in numbers]
    words = (result(slice_name(gpu.uuid), f"r{at}") for at, gpu in enumerate(gpus))
    claim = node.claim(name, *words)
    answer = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
    assert not isinstance(answer, str), answer
    yield [each for device in answer for each in device.cdi]
    assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}


def test_device_metadata_is_readable_and_not_writable(node: Node, cri: Cri, driver: Driver) -> None:
    """Each container has its requests' files, which all users can read and no user can write."""
    place = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/said"
    with claimed(node, driver, "said", 1, 2) as both, cri.pod("", "said") as pod:
        container = pod.start(DEBIAN, "sleep", "1000", devices=both[1:])
        path = f"{place}/r1/{GPU_DRIVER}-metadata.json"
        found = container.exec("sh", "-c", f"ls -l {place}/*/*").ok().stdout.splitlines()
        [(mode, name)] = [(line.split()[0], line.split()[-1]) for line in found]
        assert (mode, name) == ("-rw-r--r--", path)
        assert driver.gpus[2].uuid in container.exec("cat", path).ok().stdout
        assert container.exec("sh", "-c", f"echo x >> {path}").status != 0


def test_a_container_gets_exactly_the_claimed_gpus(node: Node, cri: Cri, driver: Driver) -> None:
    """Two pods have two claims; containers of the claim with two requests have one GPU or both."""
    with (
        claimed(node, driver, "one", 2) as one,
        claimed(node, driver, "two", 0, 3) as two,
        cri.pod("", "one") as pod,
        cri.pod("", "two") as other,
    ):
        check(pod.start(DEBIAN, "sleep", "1000", devices=one), driver, driver.chosen(2))
        both = other.start(DEBIAN, "sleep", "1000", devices=two)
        check(both, driver, driver.chosen(0, 3))
        half = other.start(DEBIAN, "sleep", "1000", devices=two[1:], name="half")
        check(half, driver, driver.chosen(3))
        plain = other.start(DEBIAN, "sleep", "1000", name="plain")
        assert "nvidia" not in plain.exec("ls", "/dev").ok().stdout
    with cri.pod("", "late") as pod, pytest.raises(CriError):
        pod.start(DEBIAN, "sleep", "1000", devices=one)  # released: engines no longer know it


def test_two_claims_in_one_container_share_driver_files(
    node: Node, cri: Cri, driver: Driver
) -> None:
    """Both CDI specs have the hook and the driver's files, which must not conflict."""
    with (
        claimed(node, driver, "one", 1) as one,
        claimed(node, driver, "two", 3) as two,
        cri.pod("", "one") as pod,
    ):
        container = pod.start(DEBIAN, "sleep", "1000", devices=[*one, *two])
        check(container, driver, driver.chosen(1, 3))
        mounts = container.exec("cat", "/proc/self/mountinfo").ok().stdout.splitlines()
        places = [line.split()[4] for line in mounts]
        libraries = [place for place in places if "libcuda.so" in place]
        assert len(libraries) == len({*libraries})


def test_the_environment_of_a_pod_gives_no_further_gpus(
    node: Node, cri: Cri, driver: Driver
) -> None:
    with claimed(node, driver, "one", 1) as one, cri.pod("", "one") as pod:
        words = ("sleep", "1000")
        env = ["NVIDIA_VISIBLE_DEVICES=all"]
        container = pod.start(DEBIAN, *words, devices=one, env=env)
        check(container, driver, driver.chosen(1))
