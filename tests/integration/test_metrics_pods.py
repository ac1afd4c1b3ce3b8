"""gpuhook metrics for pods: the resources that their processes use, and the pods' names."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import images
from harness.commands import run, wait_until
from harness.containerd import WITH_HANDLERS, containerd
from harness.cri import Container, Cri
from harness.driver import Driver, simulate
from harness.images import image
from harness.installation import Installation, write_config
from harness.metrics import GIB, GPUHOOK, Samples, exporter, labels_of, of_container, scrape, using
from harness.namespaces import Namespace
from pod_resources import PodResources

from gpuhook_simulate.vendors.nvidia.state import load_machine

SLEEP = ("sleep", "1000")
PODS = "k8s.io"  # containerd's namespace for images of the CRI


@dataclass(frozen=True)
class Node:
    """A simulated machine with two GPUs, one of them in MIG mode, and a containerd."""

    cri: Cri
    driver: Driver
    config: Path
    migs: tuple[str, ...]  # UUIDs of GPU 1's MIG devices

    @contextlib.contextmanager
    def pod(self, handler: str, *environment: str, nodes: bool = False) -> Iterator[Container]:
        """Run a pod that sleeps, in cgroups with the kubelet's names."""
        group = f"/kubepods/burstable/pod{uuid.uuid4()}"
        node = f"/dev/nvidia{self.driver.gpus[0].minor}"
        given = [(node, f"{self.driver.root}{node}", "rw")] if nodes else []
        with self.cri.pod(handler, f"metrics-{uuid.uuid4().hex[:8]}", group) as pod:
            yield pod.start(image("debian"), *SLEEP, env=environment, nodes=given)


@pytest.fixture(scope="module")
def node(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    roots: dict[str, Path],
) -> Iterator[Node]:
    folder = workspace / "metrics-pods"
    driver = simulate(installation, folder / "driver", "--gpus=2", "--mig=1:3g.71gb,1g.18gb")
    config = write_config(folder / "config", driver.root, ["runc"])
    pause = images.save({"pause": roots["busybox"]}, folder / "pause.tar", ("sleep", "infinity"))
    env = {"GPUHOOK_CONFIG": str(config)}
    words = (folder / "containerd", host, installation.runtime, archive, env, WITH_HANDLERS)
    with containerd(*words) as engine:
        for each in (archive, pause):
            engine.call("images", "import", each, within=PODS).ok()
        cri = Cri(engine.folder / "containerd.sock")
        wait_until(cri.is_ready, "the CRI answers")
        migs = tuple(mig.uuid for mig in load_machine(str(driver.root)).gpus[1].migs)
        yield Node(cri, driver, config, migs)
        cri.close()
    run([installation.command, "simulate", "--remove", driver.root]).ok()


def pids_in(container: str) -> list[int]:
    """Return the processes in a container's cgroup."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            if f"{container}\n" in path.read_text():
                found.append(int(path.parent.name))
    return found


def names_of(labels: dict[str, str]) -> tuple[str, str, str]:
    return labels["namespace"], labels["pod"], labels["container"]


def assigned_pods(samples: Samples) -> set[str]:
    name = "gpuhook_container_gpu_assigned"
    return {labels["pod"] for each, labels, _ in samples if each == name}


def test_processes_on_mig_devices_count_for_their_pod(node: Node) -> None:
    first, second = node.migs
    wanted = f"NVIDIA_VISIBLE_DEVICES={first},{second}"
    with node.pod("gpu-py", wanted) as container, exporter(node.config) as port:
        container.exec("sh", "-c", "sleep 1000 </dev/null >/dev/null 2>&1 &").ok()
        wait_until(lambda: len(pids_in(container.name)) == 2, "two processes run")
        one, two = pids_in(container.name)
        with (
            using(node.driver, first, one, 2 * GIB, 40),
            using(node.driver, first, two, GIB, 10),
            using(node.driver, second, 1, 5 * GIB, 10),
        ):
            samples = scrape(port)
        found = of_container(samples, container.name)
        assert found == {
            ("assigned", first): 1, ("assigned", second): 1,
            ("memory_used_bytes", first): 3 * GIB, ("memory_used_bytes", second): 0,
            ("processes", first): 2, ("processes", second): 0,
        }  # fmt: skip
        assert of_container(samples, "")["memory_used_bytes", second] == 5 * GIB
        labels = labels_of(samples, container.name)
        assert labels["engine"] == "kubernetes"
        assert labels["pod"].startswith("metrics-")
        assert (labels["namespace"], labels["container"]) == ("default", "main")


def test_a_pod_that_was_given_nodes_is_named_by_list_and_stats(node: Node, workspace: Path) -> None:
    """The device plugin's strategy mounts passes nodes to pods in this way."""
    path = workspace / f"k{uuid.uuid4().hex[:8]}.sock"
    gpu = node.driver.gpus[0].uuid
    given = ("space", "alone", "web", "nvidia.com/gpu", (gpu,))
    options = (f"--pod-resources={path}", f"--config={node.config}")

    def printed(*words: str) -> str:
        return run([*GPUHOOK, *words, *options]).ok().stdout

    with node.pod("runc", nodes=True) as container, PodResources(path, given):
        assert "space/alone/web" in printed("list")
        for words in (("list",), ("stats", "--no-stream")):
            answer = json.loads(printed(*words, "--format=json"))
            [found] = [
                each
                for each in answer["containers"]
                if container.name in (each.get("id"), each.get("name"))
            ]
            assert names_of(found) == ("space", "alone", "web")


def test_a_pod_without_our_runtime_is_named_by_the_kubelet(node: Node, workspace: Path) -> None:
    path = workspace / f"k{uuid.uuid4().hex[:8]}.sock"
    gpu = node.driver.gpus[0].uuid
    resource = "nvidia.com/gpu.shared"
    given = (
        ("space", "alone", "web", resource, (f"{gpu}::1",)),
        ("space", "other", "web", "other.example/thing", ("1",)),
    )
    with (
        node.pod("runc", nodes=True) as container,
        PodResources(path, *given) as kubelet,
        exporter(node.config, f"--pod-resources={path}") as port,
    ):
        [pid] = pids_in(container.name)
        named = ("space", "alone", "web")
        with using(node.driver, gpu, pid, GIB, 0):
            wait_until(
                lambda: named == names_of(labels_of(scrape(port), container.name)),
                "the kubelet has named the pod",
                timeout=300,
            )
            samples = scrape(port)
            found = of_container(samples, container.name)
            assert (found["assigned", gpu], found["memory_used_bytes", gpu]) == (1, GIB)
            # Two pods share the GPU, and nothing tells which of them the container belongs to.
            kubelet.given.append(("space", "second", "web", resource, (f"{gpu}::2",)))
            wait_until(
                lambda: assigned_pods(scrape(port)) == {"alone", "second"},
                "both pods have the GPU",
                timeout=300,
            )
            assert names_of(labels_of(scrape(port), container.name)) == ("", "", "")
            kubelet.given.pop()
            # A kubelet that hangs doesn't delay the metrics; the container then has no pod name.
            kubelet.hangs = True
            samples = scrape(port)
            assert of_container(samples, container.name)["memory_used_bytes", gpu] == GIB
            assert ("gpuhook_metrics_complete", {}, 0.0) in samples
            kubelet.hangs = False
            wait_until(
                lambda: named == names_of(labels_of(scrape(port), container.name)),
                "the kubelet has named it again",
                timeout=300,
            )
