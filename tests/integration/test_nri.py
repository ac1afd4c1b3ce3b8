"""gpuhook nri with real engines: containerd 1.7 (Debian 13) and 2.1 (sid), asked over the CRI.

Their runtime is plain runc, and their configuration has no settings for gpuhook.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Result, daemon, wait_until
from harness.cri import CriError, Security
from harness.driver import Driver, lines_of_nvidia_smi
from harness.inside import look, seen
from harness.installation import Installation
from harness.nri import DEBIAN, Node, running
from harness.releases import NAMES
from pod_resources import PodResources
from yardstick import yardstick


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
    folder = workspace / f"nri-{name}"
    hold = {"pause": roots["busybox"]}
    with running(name, engine_roots[name], folder, installation, driver, hold, [archive]) as made:
        yield made


def inside(node: Node, *env: str, command: tuple[str, ...] = ("true",), **pod: object) -> Result:
    """Return the result of a command in a container with these variables.

    Raise CriError if the container is refused.
    """
    return node.inside(*env, command=command, **pod)  # type: ignore[arg-type]


def test_a_container_gets_exactly_the_requested_gpus(node: Node, driver: Driver) -> None:
    with node.plugin():
        env = "NVIDIA_VISIBLE_DEVICES=1,4"
        found = seen(inside(node, env, command=look(driver.minors)))
    minors = {gpu.minor for gpu in driver.chosen(1, 4)}
    assert found.gpu_minors == minors
    assert found.by_hand == {
        minor: "ENXIO" if minor in minors else "EPERM" for minor in driver.minors
    }


def test_programs_and_libraries_of_the_driver_work(node: Node, driver: Driver) -> None:
    gpus = driver.chosen(3, 5)
    asked = ",".join(gpu.uuid for gpu in gpus)
    with node.plugin():
        env = f"NVIDIA_VISIBLE_DEVICES={asked}"
        script = ("sh", "-ec", "nvidia-smi -L; gpuhook-cuda-probe")
        said = inside(node, env, command=script).ok().stdout.splitlines()
    assert said[:3] == [*lines_of_nvidia_smi(gpus), "CUDA devices: 2"]


def test_a_memory_limit_in_pod_annotations_sets_the_variable(node: Node) -> None:
    """Runtimes and hooks read the variables; engines don't pass a pod's annotations to them."""
    given = {"nvidia.com/container.main.gpu-memory.limit": "8Gi"}
    with node.plugin():
        done = inside(node, "NVIDIA_GPU_MEMORY_LIMIT=16384", command=("env",), annotations=given)
    assert "NVIDIA_GPU_MEMORY_LIMIT=8192" in done.stdout.splitlines()
    # The hook that adds the devices reads the amount, and this node's driver is older than that.
    with node.plugin(), pytest.raises(CriError, match="limits memory since release 615"):
        inside(node, "NVIDIA_VISIBLE_DEVICES=0", annotations=given)
    with node.plugin(), pytest.raises(CriError, match="isn't an amount of memory"):
        inside(node, annotations={**given, "nvidia.com/container.main.gpu-memory.request": "1 Gi"})


def test_a_pod_of_the_kai_scheduler_gets_its_gpu_and_limit_variable(
    node: Node, driver: Driver
) -> None:
    """KAI names GPUs as NVIDIA's plugin does, and its annotations limit each container."""
    gpu = driver.gpus[3]
    asked = f"NVIDIA_VISIBLE_DEVICES=k8s.device-plugin.nvidia.com/gpu={gpu.uuid}"
    container = "nvidia.com/container.main"
    given = {f"{container}.gpus.devices": gpu.uuid, f"{container}.gpu-memory.request": "4Gi"}
    with node.plugin():
        found = seen(inside(node, asked, command=look(driver.minors)))
        assert found.gpu_minors == {gpu.minor}
        done = inside(node, command=("env",), annotations=given)
        assert "NVIDIA_GPU_MEMORY_LIMIT=4096" in done.stdout.splitlines()
        with pytest.raises(CriError, match="limits memory since release 615"):
            inside(node, asked, annotations=given)


def test_limits_are_raised_only_for_containers_with_devices(node: Node) -> None:
    """A container that requests no devices keeps its engine's limits."""
    had = node.system.config.read_text()
    shm = "df -k /dev/shm | tail -n 1 | tr -s ' ' | cut -d ' ' -f 2"
    command = ("sh", "-c", f"ulimit -s; {shm}")
    with node.plugin():
        before = inside(node, "NVIDIA_VISIBLE_DEVICES=0", command=command).ok().stdout
    more = '[gpuhook.containers]\nstack = "unlimited"\nshm-size = "1GiB"\n'
    node.system.config.write_text(had + more)
    try:
        with node.plugin():
            found = inside(node, "NVIDIA_VISIBLE_DEVICES=0", command=command).ok().stdout
            assert found == f"unlimited\n{1 << 20}\n"
            assert inside(node, command=command).ok().stdout == before
    finally:
        node.system.config.write_text(had)


def test_a_container_without_a_request_gets_no_gpus(node: Node, driver: Driver) -> None:
    with node.plugin():
        found = seen(inside(node, command=look(driver.minors)))
    assert found.nodes == {}
    assert {*found.by_hand.values()} == {"EPERM"}


def test_an_unprivileged_user_gets_the_requested_gpu(node: Node, driver: Driver) -> None:
    with node.plugin():
        env = "NVIDIA_VISIBLE_DEVICES=0"
        security = Security(user=1000, restricted=True)
        found = seen(inside(node, env, command=look(), security=security))
    assert found.gpu_minors == {driver.gpus[0].minor}


def test_an_unknown_capability_is_a_warning(node: Node, driver: Driver) -> None:
    """A start by gpu-py also only warns."""
    with node.plugin():
        env = ("NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_DRIVER_CAPABILITIES=magic")
        assert seen(inside(node, *env, command=look())).gpu_minors == {driver.gpus[1].minor}
    kept = node.system.config.parent / "state/warnings.log"
    assert "gpuhook nri: 'magic' isn't a driver capability" in kept.read_text()


def test_an_unknown_gpu_is_refused(node: Node) -> None:
    with node.plugin(), pytest.raises(CriError, match="99"):
        inside(node, "NVIDIA_VISIBLE_DEVICES=99")


def test_long_or_odd_values_in_a_pod_affect_no_other_pod(node: Node, driver: Driver) -> None:
    many = [f"V{number}={'x' * 60_000}" for number in range(20)]
    odd = ["A=\x1b[2J\n", "=", "NVIDIA_VISIBLE_DEVICES=0"]
    notes = {f"example.com/{number}": "y" * 10_000 for number in range(10)}
    with node.plugin():
        with node.cri.pod("", title="p" + "-odd" * 40) as pod:
            made = pod.start(DEBIAN, "sleep", "1000", env=[*many, *odd], annotations=notes)
            assert seen(made.exec(*look())).gpu_minors == {driver.gpus[0].minor}
        with pytest.raises(CriError, match="gpuhook: "):
            inside(node, "NVIDIA_VISIBLE_DEVICES=" + "9," * 50_000 + "9")
        env = "NVIDIA_VISIBLE_DEVICES=1"
        assert seen(inside(node, env, command=look())).gpu_minors == {driver.gpus[1].minor}
        assert node.log.read_text().count("Serves") == 1  # connected only once


def test_a_slow_pod_is_refused_in_time(node: Node, driver: Driver) -> None:
    """Otherwise the engine would drop the plugin after two seconds, and the gate with it."""
    gpu = driver.gpus[3]
    slow = [f"NVIDIA_REQUIRE_X{k}=" + f"arch<0.{k} " * 12_000 + "arch>=1" for k in range(14)]
    with tempfile.TemporaryDirectory(dir=node.folder) as folder:
        socket = Path(folder) / "kubelet.sock"
        given = ("default", "pod", "main", "nvidia.com/gpu", (gpu.uuid,))
        with PodResources(socket, given), node.plugin("--gate", f"--pod-resources={socket}"):
            for title in ("a", "b"):
                with pytest.raises(CriError, match=r"and they may have 65536"):
                    inside(node, "NVIDIA_VISIBLE_DEVICES=all", *slow, title=title)
                with pytest.raises(CriError, match="the kubelet hasn't allocated that to it"):
                    inside(node, "NVIDIA_VISIBLE_DEVICES=0", title=title)
            env = f"NVIDIA_VISIBLE_DEVICES={gpu.uuid}"
            assert seen(inside(node, env, command=look())).gpu_minors == {gpu.minor}
            assert node.log.read_text().count("Serves") == 1  # connected only once


def test_a_killed_plugin_gives_no_gpus_until_it_is_started_again(
    node: Node, driver: Driver
) -> None:
    """Without the plugin, containers get no GPUs; the engine accepts a new plugin."""
    process = node.start()
    process.kill()
    process.wait()
    env = "NVIDIA_VISIBLE_DEVICES=2"
    assert seen(inside(node, env, command=look())).gpu_minors == set()
    with node.plugin():
        assert seen(inside(node, env, command=look())).gpu_minors == {driver.gpus[2].minor}


def test_sigterm_stops_the_plugin(node: Node) -> None:
    process = node.start()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_running_containers_are_unchanged_when_the_plugin_starts(
    node: Node, driver: Driver
) -> None:
    """The engine reports the running containers to the plugin, which doesn't change them."""
    with node.cri.pod("") as pod:
        old = pod.start(DEBIAN, "sleep", "1000", env=["NVIDIA_VISIBLE_DEVICES=1"])
        with node.plugin():
            assert seen(old.exec(*look())).gpu_minors == set()
            env = "NVIDIA_VISIBLE_DEVICES=1"
            found = seen(inside(node, env, command=look(), title="other"))
            assert found.gpu_minors == {driver.gpus[1].minor}


def test_the_plugin_answers_in_time(node: Node) -> None:
    with node.plugin():
        for _ in range(4):
            inside(node, "NVIDIA_VISIBLE_DEVICES=all")
        lines = [line for line in node.log.read_text().splitlines() if "answered in" in line]
    times = [int(line.rpartition(" in ")[2].partition(" ")[0]) for line in lines]  # ms
    assert len(times) == 4
    assert min(times) < 6 * 1000 * yardstick(), times


def test_cdi_device_names_give_gpus_only_with_containerd_2(node: Node, driver: Driver) -> None:
    """containerd 2.1 accepts the names; 1.7 ignores them, so the container gets no GPU."""
    node.system.gpuhook("cdi", "generate", "--output", "/etc/cdi")
    with node.plugin("--cdi"):
        found = seen(inside(node, "NVIDIA_VISIBLE_DEVICES=1,4", command=look()))
    takes = node.system.name == "sid"
    assert found.gpu_minors == ({gpu.minor for gpu in driver.chosen(1, 4)} if takes else set())


def test_the_gate_gives_only_gpus_allocated_by_the_kubelet(node: Node, driver: Driver) -> None:
    gpu = driver.gpus[3]
    with tempfile.TemporaryDirectory(dir=node.folder) as folder:
        socket = Path(folder) / "kubelet.sock"
        given = ("default", "pod", "main", "nvidia.com/gpu", (gpu.uuid,))
        with PodResources(socket, given), node.plugin("--gate", f"--pod-resources={socket}"):
            refused = pytest.raises(CriError, match="the kubelet hasn't allocated that to it")
            with refused:
                inside(node, "NVIDIA_VISIBLE_DEVICES=0")
            env = f"NVIDIA_VISIBLE_DEVICES={gpu.uuid}"
            assert seen(inside(node, env, command=look())).gpu_minors == {gpu.minor}
            env = "NVIDIA_VISIBLE_DEVICES=all"
            assert seen(inside(node, env, command=look())).gpu_minors == {gpu.minor}
            assert seen(inside(node, env, command=look(), title="b")).gpu_minors == set()


def test_the_plugin_reconnects_to_a_restarted_engine(node: Node, driver: Driver) -> None:
    """This must be the last test, because it stops the engine that the other tests use."""
    engine, env = node.engine, "NVIDIA_VISIBLE_DEVICES=2"
    assert engine.pid is not None
    stat = Path(f"/proc/{engine.pid}/stat")
    argv = node.system.namespace.enter("containerd", "--config", engine.folder / "config.toml")
    with node.plugin():
        assert seen(inside(node, env, command=look())).gpu_minors == {driver.gpus[2].minor}
        os.kill(engine.pid, signal.SIGTERM)
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "it has ended")
        with daemon(argv, engine.folder / "log-again", node.cri.is_ready):
            node.serves(2)
            assert seen(inside(node, env, command=look())).gpu_minors == {driver.gpus[2].minor}
