"""The gate with a real engine: requests by a pod's author, and devices from the node's runtimes.

The engine is containerd 1.7 (Debian 13) and 2.1 (sid), asked over the CRI as a kubelet does.
It has two handlers. One is gpu-py. The other's runtime knows nothing of the gate, as NVIDIA's
own: it is gpu-py with another config.toml, and reads the last entry of a variable as NVIDIA's
does.
"""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import nri_engines
import pytest
from harness import images
from harness.commands import daemon, wait_until
from harness.cri import Container, CriError
from harness.driver import Driver, Gpu
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.nri import Node, running
from harness.releases import NAMES
from pod_resources import PodResources

from gpuhook.base.config.loader import load
from gpuhook.cluster.nri.answer import InjectionMode, decide
from gpuhook.cluster.nri.asked import ContainerRequest

OURS, STRANGER = "gpu-py", "stranger"
PLAIN = image("debian")
CUDA = image("cuda")  # its ENV asks for all GPUs, as in CUDA's images


@pytest.fixture(scope="module", params=NAMES)
def node(
    request: pytest.FixtureRequest,
    workspace: Path,
    engine_roots: dict[str, Path],
    installation: Installation,
    driver: Driver,
    roots: dict[str, Path],
    archive: Path,
) -> Iterator[Node]:
    name = request.param
    folder = workspace / f"gate-{name}"
    asking = images.save(
        {"cuda": roots["debian"]}, folder.with_suffix(".cuda"), env=["NVIDIA_VISIBLE_DEVICES=all"]
    )
    hold, archives = {"pause": roots["busybox"]}, [archive, asking]
    run = running(
        name, engine_roots[name], folder, installation, driver, hold, archives, (OURS, STRANGER)
    )
    with run as made:
        config = made.system.config
        gated = config.read_text().replace("[gpuhook]\n", "[gpuhook]\ngate = true\n")
        config.write_text(gated)
        other = write_config(folder / "other", driver.root, ["runc"])
        for handler, settings in ((OURS, config), (STRANGER, other)):
            program = folder / "handlers" / handler
            gpu_py = made.system.installation.runtime
            program.write_text(f'#!/bin/sh\nGPUHOOK_CONFIG={settings} exec {gpu_py} "$@"\n')
            program.chmod(0o755)
        yield made


@dataclass(frozen=True)
class Kubelet:
    """A simulated kubelet, and the plugin's option with its socket."""

    says: PodResources
    socket: Path

    @property
    def words(self) -> tuple[str, ...]:
        return (f"--pod-resources={self.socket}",)

    def gives(self, *gpus: Gpu, pod: str = "pod") -> None:
        """Set the GPUs that the kubelet has allocated to the container main of a pod."""
        ids = tuple(gpu.uuid for gpu in gpus)
        self.says.given = [("default", pod, "main", "nvidia.com/gpu", ids)]


@pytest.fixture
def kubelet(node: Node) -> Iterator[Kubelet]:
    with tempfile.TemporaryDirectory(dir=node.folder) as folder:
        socket = Path(folder) / "kubelet.sock"
        with PodResources(socket) as made:
            yield Kubelet(made, socket)


ALL = "NVIDIA_VISIBLE_DEVICES=all"
WITHOUT = "and this node gives them only to containers of pods that gpuhook nri --gate has seen"
TWICE = "more than once"
# The image, and the environment of the pod.
DOUBLED = {
    "image's and pod's": (CUDA, (ALL,)),
    "the pod's own": (PLAIN, (ALL, ALL)),
    "after void": (PLAIN, ("NVIDIA_VISIBLE_DEVICES=void", ALL)),
    "image's and two of the pod's": (CUDA, ("NVIDIA_VISIBLE_DEVICES=none", ALL)),
}


@pytest.mark.parametrize("name", [*DOUBLED])
@pytest.mark.parametrize("handler", ["", OURS, STRANGER])
def test_a_repeated_variable_is_refused_by_the_plugin(
    node: Node, kubelet: Kubelet, driver: Driver, handler: str, name: str
) -> None:
    """The engine's last entry for a variable replaces the value that a plugin has set."""
    made_of, env = DOUBLED[name]
    gpu = driver.gpus[3]
    with node.plugin(*kubelet.words):
        for gpus in ((), (gpu,)):
            kubelet.gives(*gpus)
            if handler == OURS:
                found = node.inside(*env, command=look(), handler=handler, made_of=made_of)
                assert seen(found).gpu_minors == {each.minor for each in gpus}
            else:
                with pytest.raises(CriError, match=TWICE):
                    node.inside(*env, command=look(), handler=handler, made_of=made_of)


@pytest.mark.parametrize("handler", ["", OURS, STRANGER])
def test_only_devices_allocated_by_the_kubelet_are_given(
    node: Node, kubelet: Kubelet, driver: Driver, handler: str
) -> None:
    """The plugin's variable comes after the image's, which is ``all`` in each CUDA image."""
    gpu, other = driver.gpus[3], driver.gpus[5]
    kubelet.gives(gpu)
    with node.plugin(*kubelet.words):
        for made_of, env in (
            (CUDA, ()),
            (CUDA, (f"NVIDIA_VISIBLE_DEVICES={gpu.uuid}",)),
            (PLAIN, (ALL,)),
            (PLAIN, ("NVIDIA_VISIBLE_DEVICES=3",)),
        ):
            found = node.inside(*env, command=look(), handler=handler, made_of=made_of)
            assert seen(found).gpu_minors == {gpu.minor}, (made_of, env)
        for word in ("5", other.uuid, "3,5", f"{gpu.uuid},{other.uuid}"):
            for made_of in (PLAIN, CUDA):
                wanted = f"NVIDIA_VISIBLE_DEVICES={word}"
                with pytest.raises(CriError, match="the kubelet hasn't allocated that to it"):
                    node.inside(wanted, handler=handler, made_of=made_of)
        found = node.inside(command=look(), handler=handler, made_of=CUDA, title="other")
        assert seen(found).gpu_minors == set()


def test_without_the_plugin_our_runtime_refuses_requests(
    node: Node, kubelet: Kubelet, driver: Driver
) -> None:
    """Without the plugin, our runtime refuses a request even if it accepted one before."""
    kubelet.gives(driver.gpus[3])
    process = node.start(*kubelet.words)
    assert seen(node.inside(ALL, command=look(), handler=OURS)).gpu_minors
    process.kill()
    process.wait()
    for env, made_of in (((ALL,), PLAIN), ((), CUDA), (("NVIDIA_VISIBLE_DEVICES=0",), PLAIN)):
        with pytest.raises(CriError, match=WITHOUT):
            node.inside(*env, handler=OURS, made_of=made_of)
        assert node.inside(handler=OURS).status == 0, "it asks for nothing"
    with node.plugin(*kubelet.words):
        assert seen(node.inside(ALL, command=look(), handler=OURS)).gpu_minors


def test_an_imitated_verdict_is_refused(node: Node, kubelet: Kubelet, driver: Driver) -> None:
    """The real verdict is in a folder of root, by the container's id, where a pod can't write."""
    state = node.system.config.parent / "state"
    kubelet.gives(driver.gpus[3])
    with node.plugin(*kubelet.words), node.cri.pod(OURS) as pod:
        container = pod.start(PLAIN, "sleep", "1000", env=[ALL])
        [verdict] = [each for each in (state / "verdicts").iterdir() if each.name == container.name]
    assert verdict.stat().st_mode & 0o077 == 0
    assert verdict.parent.stat().st_mode & 0o077 == 0
    text = verdict.read_text()
    notes = {
        each: value
        for each in ("gpuhook.io/verdict", "gpuhook.io/gate", "io.kubernetes.cri.container-id")
        for value in (container.name, text)
    }
    mounts = [(f"/run/gpuhook/verdicts/{container.name}", str(verdict), True)]
    mounts += [(f"/var/run/nvidia-container-devices/{each.uuid}", "/dev/null", True)
               for each in driver.gpus]  # fmt: skip
    with node.cri.pod(OURS, title=container.name[:60]) as pod:
        for name in ("main", container.name):
            with pytest.raises(CriError, match=WITHOUT):
                pod.start(
                    PLAIN, "sleep", "1000", env=[ALL, f"GPUHOOK_VERDICT={text}"], name=name,
                    annotations=notes, mounts=mounts,
                )  # fmt: skip


def test_each_of_many_containers_of_a_pod_gets_its_own_gpu(
    node: Node, kubelet: Kubelet, driver: Driver
) -> None:
    """Each container has its own verdict, however many are created at the same time."""
    kubelet.says.given = [
        ("default", "pod", f"c{gpu.index}", "nvidia.com/gpu", (gpu.uuid,)) for gpu in driver.gpus
    ]
    with node.plugin(*kubelet.words), node.cri.pod(OURS) as pod:

        def made(index: int) -> Container:
            return pod.start(CUDA, "sleep", "1000", env=[ALL], name=f"c{index}")

        with ThreadPoolExecutor(4) as pool:
            containers = [*pool.map(made, range(len(driver.gpus)))]
        for gpu, container in zip(driver.gpus, containers, strict=True):
            assert seen(container.exec(*look())).gpu_minors == {gpu.minor}


@pytest.mark.parametrize("size", [3 << 20, 5 << 20])
@pytest.mark.parametrize("handler", ["", OURS])
def test_a_request_of_several_megabytes_is_refused_in_time(
    node: Node, kubelet: Kubelet, driver: Driver, handler: str, size: int
) -> None:
    """The refusal comes in time, so the engine keeps the plugin, and the next pod has its gate."""
    gpu = driver.gpus[3]
    kubelet.gives(gpu)
    many = [f"V{number}={'x' * 1000}" for number in range(size // 1000)]
    with node.plugin(*kubelet.words):
        for env in ([ALL, *many], [f"A={'y' * size}", ALL]):
            # Newer engines don't send messages above 4 MiB, and refuse the container as well.
            with pytest.raises(CriError, match=r"bytes|message length|larger than max"):
                node.inside(*env, handler=handler)
        found = node.inside(ALL, command=look(), handler=handler)
        assert seen(found).gpu_minors == {gpu.minor}
        # On a busy host, the tests' kubelet may exceed the time limit for an answer, and then the
        # container is refused.
        with pytest.raises(
            CriError, match=r"hasn't allocated that to it|doesn't say which devices"
        ):
            node.inside("NVIDIA_VISIBLE_DEVICES=0", handler=handler)
        assert node.log.read_text().count("Serves") == 1, "it was never dropped"


def test_the_plugin_starts_beside_running_pods_of_any_size(
    node: Node, kubelet: Kubelet, driver: Driver
) -> None:
    """The engine reports running containers; an older engine uses one message of any length."""
    kubelet.gives(driver.gpus[3], pod="late")
    large = [f"V{number}={'x' * 100_000}" for number in range(5)]
    with ExitStack() as stack:
        for number in range(10):
            pod = stack.enter_context(node.cri.pod("", title=f"large{number}"))
            pod.start(image("pause"), "sleep", "1000", env=large)
        with node.plugin(*kubelet.words):
            found = node.inside(ALL, command=look(), handler=OURS, title="late")
            assert seen(found).gpu_minors == {driver.gpus[3].minor}


MERGED = {
    "nothing twice": ("A=1", f"B={'x' * 3000}"),
    "twice": ("NVIDIA_X=1", "A=1", "NVIDIA_X=2", "A=2", "NVIDIA_X=3"),
    "its own": ("A=1", "NVIDIA_VISIBLE_DEVICES={uuid}", "A="),
    "twice its own": ("NVIDIA_VISIBLE_DEVICES={uuid}", "NVIDIA_VISIBLE_DEVICES={uuid}"),
}


@pytest.mark.parametrize("name", [*MERGED])
def test_the_unit_tests_model_of_variables_matches_the_engine(
    node: Node, kubelet: Kubelet, driver: Driver, name: str
) -> None:
    """The model predicts how an engine merges variables of the image, the pod and a plugin."""
    gpu = driver.gpus[3]
    kubelet.gives(gpu)
    env = [each.format(uuid=gpu.uuid) for each in MERGED[name]]

    def entries() -> list[str]:
        with node.cri.pod("") as pod:
            made = pod.start(CUDA, "sleep", "1000", env=env)
            folder = node.engine.folder / "state/io.containerd.runtime.v2.task/k8s.io" / made.name
            found: list[str] = json.loads((folder / "config.json").read_text())["process"]["env"]
            return found

    without = entries()
    image = [each for each in without if each.startswith(("PATH=/usr", "HOSTNAME="))]
    assert without == nri_engines.of_containerd([*image, ALL], env)
    way = InjectionMode(
        load(str(node.system.config)), "/hook", given=lambda *_: [("nvidia.com/gpu", gpu.uuid)]
    )
    asked = ContainerRequest("default", "pod", "main", "", tuple(without))
    changes = dict(each.partition("=")[::2] for each in decide(asked, way).edits["env"])
    with node.plugin(*kubelet.words):
        assert sorted(entries()) == sorted(nri_engines.adjusted(without, changes))


@pytest.mark.protects(
    "nri-settings",
    "gpuhook nri applies the current config.toml to each container",
    instead="pass",
    only="settings_of_later and trixie",
)
def test_settings_of_later_apply_to_the_next_container(
    node: Node, kubelet: Kubelet, driver: Driver
) -> None:
    """The plugin reads changed settings for the next container, as gpu-py does."""
    settings = node.system.config
    before = settings.read_text()
    kubelet.gives(driver.gpus[3])
    try:
        with node.plugin(*kubelet.words):
            assert seen(node.inside(ALL, command=look())).gpu_minors == {driver.gpus[3].minor}
            key = "accept-nvidia-visible-devices-envvar-when-unprivileged"
            settings.write_text(f"{key} = false\n{before}")
            assert seen(node.inside(ALL, command=look())).gpu_minors == set()
            settings.write_text("[gpuhook\n")
            with pytest.raises(CriError, match="Correct it"):
                node.inside(ALL)
            assert node.inside().status == 0, "it asks for nothing"
            settings.write_text(before.replace("gate = true", "gate = false"))
            assert seen(node.inside("NVIDIA_VISIBLE_DEVICES=0", command=look())).gpu_minors
            settings.write_text(before)
            with pytest.raises(CriError, match="the kubelet hasn't allocated that to it"):
                node.inside("NVIDIA_VISIBLE_DEVICES=0")
    finally:
        settings.write_text(before)


def test_a_restarted_engine_gives_nothing_until_the_plugin_connects(
    node: Node, kubelet: Kubelet, driver: Driver
) -> None:
    """This must be the last test, because it stops the engine that the other tests use."""
    engine = node.engine
    kubelet.gives(driver.gpus[3])
    assert engine.pid is not None
    stat = Path(f"/proc/{engine.pid}/stat")
    argv = node.system.namespace.enter("containerd", "--config", engine.folder / "config.toml")
    with node.plugin(*kubelet.words) as process:
        assert seen(node.inside(ALL, command=look(), handler=OURS)).gpu_minors
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(engine.pid, signal.SIGTERM)
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "it has ended")
        with daemon(argv, engine.folder / "log-again", node.cri.is_ready):
            for made_of in (PLAIN, CUDA):
                with pytest.raises(CriError, match=WITHOUT):
                    node.inside(ALL, handler=OURS, made_of=made_of)
            os.kill(process.pid, signal.SIGCONT)
            node.serves(2)
            found = seen(node.inside(ALL, command=look(), handler=OURS))
            assert found.gpu_minors == {driver.gpus[3].minor}
