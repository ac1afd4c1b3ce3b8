"""Memory limits of GPUs in a cluster, set by the device plugin or by a pod itself.

The kubelet is simulated; containerd, its CRI and runc are real, on cgroup v2.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import path_of
from harness.containerd import WITH_HANDLERS, containerd
from harness.cri import Container, Cri, CriError, Pod
from harness.device_plugin import device_plugin, start
from harness.driver import Driver, simulate
from harness.images import CUDA_PROBE, image
from harness.installation import Installation, harden, write_config
from harness.namespaces import Namespace, host_cgroups, namespace
from kubelet import Answers, Kubelet, Mount
from test_device_plugin_containers import cri_of, pause_archive
from test_memory_limits import EIGHT, NINE, OPTIONS, told

__all__ = ["pause_archive"]

DEBIAN = image("debian")
GPU = "nvidia.com/gpu"
FOLDER = "/var/run/nvidia-container-devices"
GIB = 1 << 30


@pytest.fixture(scope="module")
def entered() -> Iterator[Namespace]:
    with namespace("v2") as found:
        yield found


@pytest.fixture(scope="module")
def driver(workspace: Path, installation: Installation) -> Driver:
    return simulate(installation, workspace / "driver-615-pods", *OPTIONS)


@pytest.fixture(scope="module")
def low_level(workspace: Path) -> str:
    """Runc, without the CPU shares that the CRI sets for the processes of pods.

    The v2 tree of a hybrid host has no controller for them.
    """
    if host_cgroups() == "v2":
        return "runc"
    made = workspace / "limits-runc"
    made.write_text(
        "#!/bin/sh\nfor word; do\n"
        '    if [ -f "$word/config.json" ]; then\n'
        """        sed -i 's/"shares":[0-9]*,*//' "$word/config.json"\n"""
        f'    fi\ndone\nexec {path_of("runc")} "$@"\n'
    )
    made.chmod(0o755)
    return str(made)


@pytest.fixture(scope="module")
def config(workspace: Path, driver: Driver, low_level: str) -> Path:
    return write_config(workspace / "limits-pods-etc", driver.root, [low_level])


@pytest.fixture(scope="module")
def hardened(workspace: Path, driver: Driver, low_level: str) -> Path:
    """A node's settings as in the manifests, which gpu-py reads when the handler starts."""
    return harden(write_config(workspace / "limits-node-etc", driver.root, [low_level]))


@pytest.fixture(scope="module")
def cri(
    workspace: Path,
    entered: Namespace,
    installation: Installation,
    archive: Path,
    pause_archive: Path,
    hardened: Path,
) -> Iterator[Cri]:
    env = {"GPUHOOK_CONFIG": str(hardened)}
    words = (workspace / "limits-cri", entered, installation.runtime, archive, env, WITH_HANDLERS)
    with containerd(*words) as engine, cri_of(engine, archive, pause_archive) as made:
        yield made


@pytest.fixture
def place(workspace: Path, tmp_path: Path) -> Path:
    """A new folder with a short name: a socket's path has at most 107 characters."""
    return workspace / f"l{hash(tmp_path) & 0xFFFFFFFF:x}"


@pytest.fixture
def kubelet(
    place: Path, installation: Installation, hardened: Path, tmp_path: Path
) -> Iterator[Kubelet]:
    """A kubelet whose node has shares of 8 GiB and of 16 GiB of each GPU."""
    file = tmp_path / "plugin.yaml"
    file.write_text(
        "flags: {plugin: {deviceListStrategy: [volume-mounts]}}\n"
        "sharing:\n  memory:\n    failRequestsGreaterThanOne: false\n    resources:\n"
        "    - {name: gpu, sizes: [8GiB, 16GiB]}\n"
    )
    words = (f"--config-file={file}",)
    with device_plugin(place, installation, hardened, GPU, *words) as found:
        yield found


def allocated(container: Container) -> list[str]:
    """Return the output of a program that tries to allocate 9 GiB."""
    return told(container.exec(CUDA_PROBE, "9"))


def shares(kubelet: Kubelet) -> dict[str, Answers]:
    """Admit pods for both shares of a GPU; return the answers by the share's number."""
    every = [kubelet.admit(f"pod-{number}", {GPU: 1}) for number in range(4)]
    by_id = {answers["ids"][GPU][0]: answers for answers in every}
    uuid = next(iter(by_id)).partition("::")[0]
    return {number: by_id[f"{uuid}::{number}"] for number in ("0", "1")}


def test_a_share_limits_a_pod_and_not_its_neighbour(cri: Cri, kubelet: Kubelet) -> None:
    given = shares(kubelet)
    with cri.pod("gpu-py", "small") as small, cri.pod("gpu-py", "large") as large:
        assert allocated(start(small, DEBIAN, given["0"])) == EIGHT
        neighbour = allocated(start(large, DEBIAN, given["1"]))
        assert neighbour == ["CUDA memory: 16384 MiB of 16384 MiB", *NINE]


WIDER = {
    "a size": ("GPUHOOK_DEVICE_MEMORY=70GiB",),
    "all devices": ("NVIDIA_VISIBLE_DEVICES=all", "GPUHOOK_DEVICE_MEMORY=100%"),
    "no device": ("NVIDIA_VISIBLE_DEVICES=void",),
}


@pytest.mark.parametrize("name", WIDER)
def test_a_pod_cannot_raise_its_limit(cri: Cri, kubelet: Kubelet, name: str) -> None:
    """The kubelet puts a pod's own variables after the plugin's variables."""
    answers = shares(kubelet)["0"]
    for setting in WIDER[name]:
        key, _, value = setting.partition("=")
        answers["envs"][key] = value
    with cri.pod("gpu-py", "wide") as pod:
        assert allocated(start(pod, DEBIAN, answers)) == EIGHT


def test_a_pod_can_lower_its_limit(cri: Cri, kubelet: Kubelet) -> None:
    answers = shares(kubelet)["0"]
    with cri.pod("gpu-py", "less") as pod:
        less = allocated(start(pod, DEBIAN, answers, ("GPUHOOK_DEVICE_MEMORY=4GiB",)))
    assert less == ["CUDA memory: 4096 MiB of 4096 MiB", "CUDA allocated: 4 GiB of 9 GiB"]


def test_a_volume_over_the_limit_mount_does_not_lift_the_limit(
    cri: Cri, kubelet: Kubelet, tmp_path: Path
) -> None:
    """If a pod's volume replaces the mount with the limit, the engine drops the device, too."""
    answers = shares(kubelet)["0"]
    [mount] = answers["mounts"]
    place = mount[0]
    assert place.startswith(f"{FOLDER}/memory/{8 * GIB}/GPU-")
    volume = tmp_path / "volume"
    volume.write_text("")
    with cri.pod("gpu-py", "over") as pod:
        answers["mounts"] = [mount, Mount(place, str(volume), read_only=False)]
        assert allocated(start(pod, DEBIAN, answers)) == EIGHT
    with cri.pod("gpu-py", "instead") as pod:
        answers["mounts"] = [Mount(place, str(volume), read_only=False)]
        without = start(pod, DEBIAN, answers)
        assert "nvidia" not in without.exec("ls", "/dev").ok().stdout


def test_two_shares_of_a_device_add_up(cri: Cri, kubelet: Kubelet) -> None:
    answers = kubelet.admit("both", {GPU: 4})
    assert len(answers["mounts"]) == 2
    with cri.pod("gpu-py", "both") as pod:
        found = allocated(start(pod, DEBIAN, answers))
        assert found == ["CUDA memory: 24576 MiB of 24576 MiB", *NINE]


def test_a_pod_can_set_a_limit_by_its_environment(
    workspace: Path,
    entered: Namespace,
    installation: Installation,
    archive: Path,
    pause_archive: Path,
    config: Path,
) -> None:
    """The node accepts requests by environment variables."""
    env = {"GPUHOOK_CONFIG": str(config)}
    words = (workspace / "limits-own", entered, installation.runtime, archive, env, WITH_HANDLERS)
    gpu = "NVIDIA_VISIBLE_DEVICES=0"

    def begin(pod: Pod, *settings: str) -> Container:
        return pod.start(DEBIAN, "sleep", "1000", env=[gpu, *settings])

    with containerd(*words) as engine, cri_of(engine, archive, pause_archive) as cri:
        with cri.pod("gpu-py", "limited") as one, cri.pod("gpu-py", "other") as two:
            assert allocated(begin(one, "GPUHOOK_DEVICE_MEMORY=8GiB")) == EIGHT
            assert allocated(begin(two))[1:] == NINE
        with cri.pod("gpu-py", "bad") as pod, pytest.raises(CriError, match="isn't a memory size"):
            begin(pod, "GPUHOOK_DEVICE_MEMORY=8G")


def test_annotations_of_the_kai_scheduler_limit_each_container(
    workspace: Path,
    entered: Namespace,
    installation: Installation,
    archive: Path,
    pause_archive: Path,
    config: Path,
    driver: Driver,
) -> None:
    """KAI names GPUs as NVIDIA's plugin does, and its annotations limit each container."""
    options = '    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu-py.options]'
    text = WITH_HANDLERS.replace(options, f'    pod_annotations = ["nvidia.com/*"]\n{options}')
    env = {"GPUHOOK_CONFIG": str(config)}
    words = (workspace / "limits-kai", entered, installation.runtime, archive, env, text)
    gpu = f"NVIDIA_VISIBLE_DEVICES=k8s.device-plugin.nvidia.com/gpu={driver.gpus[1].uuid}"
    container = "nvidia.com/container.main"
    given = {
        f"{container}.gpus.devices": driver.gpus[1].uuid,
        f"{container}.gpu-compute.mode": "shared",
        f"{container}.gpu-memory.request": "4Gi",
        f"{container}.gpu-memory.limit": "8Gi",
    }
    with containerd(*words) as engine, cri_of(engine, archive, pause_archive) as cri:
        with cri.pod("gpu-py", "kai", annotations=given) as pod:
            main = pod.start(DEBIAN, "sleep", "1000", env=[gpu])
            assert allocated(main) == EIGHT
            assert driver.gpus[1].uuid in main.exec("nvidia-smi", "-L").ok().stdout
            assert main.exec("nvidia-smi", "-L").ok().stdout.count("UUID") == 1
            other = pod.start(DEBIAN, "sleep", "1000", env=[gpu], name="other")
            assert allocated(other)[1:] == NINE
        more = {**given, f"{container}.gpu-memory.request": "9Gi"}
        refused = pytest.raises(CriError, match="asks for 9Gi, which is more than 8Gi")
        with cri.pod("gpu-py", "kai", annotations=more) as pod, refused:
            pod.start(DEBIAN, "sleep", "1000", env=[gpu])
