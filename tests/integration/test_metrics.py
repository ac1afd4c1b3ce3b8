"""gpuhook metrics for real containers, with the simulated driver's values for their processes."""

import os
import shutil
import signal
import socket
import subprocess
import uuid
from pathlib import Path

import prometheus_client
import pytest
from harness.bundles import CGROUP_PARENT, GpuBundle
from harness.commands import run, wait_until
from harness.docker import Docker
from harness.driver import Driver, simulate
from harness.images import image
from harness.installation import Installation, write_config
from harness.metrics import (
    COMMAND,
    GIB,
    Samples,
    children,
    devices,
    exporter,
    labels_of,
    listening,
    of_container,
    pid_of,
    scrape,
    state,
    using,
)
from harness.podman import Podman

from gpuhook_simulate.vendors.nvidia import report_xid


def test_a_container_of_a_low_level_runtime_has_metrics(bundle: GpuBundle, driver: Driver) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,7")
    bundle.command("sleep", "1000")
    config = bundle.settings
    bundle.detach(bundle.gpu_py, config)
    pid = pid_of(config, bundle.name)
    used, idle = driver.gpus[0].uuid, driver.gpus[7].uuid
    with exporter(config) as port, using(driver, used, pid, 2 * GIB, 40):
        found = of_container(scrape(port), bundle.name)
        assert found["assigned", used] == found["assigned", idle] == 1
        assert found["memory_used_bytes", used] == 2 * GIB
        assert (found["memory_used_bytes", idle], found["processes", idle]) == (0, 0)
        assert found["processes", used] == 1
        assert found["sm_utilization_ratio", idle] == 0
        wait_until(
            lambda: (
                of_container(scrape(port), bundle.name)["sm_utilization_ratio", used]
                == pytest.approx(0.4, abs=0.02)
            ),
            "the use of the SMs is known",
        )


def test_containers_of_docker_and_podman_have_metrics(
    docker: Docker, podman_runtime: Podman, driver: Driver, configs: dict[str, Path]
) -> None:
    name = f"metrics-{uuid.uuid4().hex[:8]}"
    options = ("run", "--detach", "--name", name)
    limits = ("--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024",
              "--pids-limit=-1", "--stop-timeout=0",
              f"--cgroup-parent={CGROUP_PARENT}")  # fmt: skip
    first, second = driver.gpus[1].uuid, driver.gpus[2].uuid
    engines: list[tuple[Docker | Podman, tuple[str, ...], str]] = [
        (docker, ("--runtime=gpu-py",), "docker"),
        (podman_runtime, limits, "podman"),
    ]
    for engine, more, title in engines:
        words = (*options, *more, "-e", "NVIDIA_VISIBLE_DEVICES=1,2", image("debian"))
        container = engine.call(*words, "sleep", "1000").ok().stdout.strip()
        try:
            pid = pid_of(configs["runc"], container)
            with (
                exporter(configs["runc"]) as port,
                using(driver, first, pid, GIB, 30),
                using(driver, second, os.getpid(), 3 * GIB, 10),
            ):
                samples = scrape(port)
                found = of_container(samples, container)
                assert found["memory_used_bytes", first] == GIB, title
                assert found["memory_used_bytes", second] == 0
                assert found["assigned", first] == found["assigned", second] == 1
                labels = labels_of(samples, container)
                assert (labels["engine"], labels["name"]) == (title, name)
                # The memory of a process that is in no container.
                assert of_container(samples, "")["memory_used_bytes", second] == 3 * GIB
                engine.call("rm", "--force", name).ok()
                _wait_until_gone(port, container)
                kinds = {labels["kind"]: value for each, labels, value in scrape(port)
                         if each == "gpuhook_metrics_errors_total"}  # fmt: skip
                assert kinds["failed"] == kinds["device"] == kinds["ended"] == 0
        finally:
            engine.call("rm", "--force", name)


def _wait_until_gone(port: int, container: str) -> None:
    """Wait until an exited container has no series, though the driver still lists its process."""
    wait_until(lambda: not of_container(scrape(port), container), "the container is gone")


def test_sighup_closes_the_driver_held_by_one_child_process(
    driver: Driver, configs: dict[str, Path]
) -> None:
    with exporter(configs["runc"]) as port:
        [pid] = listening(port)
        scrape(port)
        [child] = children(pid)
        scrape(port)
        assert children(pid) == [child]
        os.kill(pid, signal.SIGHUP)
        wait_until(lambda: children(pid) == [], "the driver is let go")
        names = {name for name, _, _ in scrape(port)}
        assert "gpuhook_gpu_info" in names
        assert "gpuhook_gpu_memory_total_bytes" not in names
        assert children(pid) == []


def test_errors_of_a_device_are_counted(driver: Driver, configs: dict[str, Path]) -> None:
    def counted(port: int) -> dict[tuple[str, str], float]:
        name = "gpuhook_gpu_xid_errors_total"
        return {(labels["uuid"], labels["xid"]): value
                for each, labels, value in scrape(port) if each == name}  # fmt: skip

    first, second = driver.gpus[4].uuid, driver.gpus[5].uuid
    with exporter(configs["runc"]) as port:
        wait_until(lambda: "gpuhook_gpu_power_watts" in names(scrape(port)), "it listens")
        assert counted(port) == {}
        for xid, gpu in ((31, first), (31, first), (13, second)):
            report_xid(str(driver.root), xid, gpu)
        expected = {(first, "31"): 2.0, (second, "13"): 1.0}
        wait_until(lambda: counted(port) == expected, "the errors are counted")


def names(samples: Samples) -> set[str]:
    return {name for name, _, _ in samples}


def _has_ended(pid: int) -> bool:
    try:
        return state(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_hung_driver_blocks_no_scrape(driver: Driver, configs: dict[str, Path]) -> None:
    with exporter(configs["runc"]) as port:
        [pid] = listening(port)
        scrape(port)
        [child] = children(pid)
        os.kill(child, signal.SIGSTOP)
        found = scrape(port)
        errors = {labels["kind"]: value for name, labels, value in found
                  if name == "gpuhook_metrics_errors_total"}  # fmt: skip
        assert errors["timeout"] == 1
        wait_until(lambda: _has_ended(child), "the child that hung ends")
        wait_until(
            lambda: any(name == "gpuhook_gpu_memory_total_bytes" for name, _, _ in scrape(port)),
            "another child answers",
        )


def test_devices_of_a_hung_driver_are_exported_as_incomplete(
    installation: Installation, workspace: Path
) -> None:
    folder = workspace / f"hangs-{uuid.uuid4().hex[:8]}"
    here = simulate(installation, folder / "driver", "--gpus=2")
    config = write_config(folder / "config", here.root, ["runc"])
    text = config.read_text().replace("[gpuhook]\n", "[gpuhook]\nnvml-timeout = 3600\n")
    config.write_text(text)
    with exporter(config) as port:
        assert {*devices(scrape(port))} == {gpu.uuid for gpu in here.gpus}
        simulate(installation, here.root, "--gpus=2", "--init-seconds=3600")
        found = scrape(port)
        assert {*devices(found)} == {gpu.uuid for gpu in here.gpus}
        assert ("gpuhook_metrics_complete", {}, 0.0) in found
    run([installation.command, "simulate", "--remove", here.root]).ok()


def test_a_taken_port_is_refused_and_a_silent_client_blocks_nothing(
    configs: dict[str, Path],
) -> None:
    with exporter(configs["runc"]) as port:
        argv = [*COMMAND, "--listen", f"127.0.0.1:{port}", "--config", str(configs["runc"])]
        taken = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert taken.returncode == 1
        assert "Nothing can listen" in taken.stderr
        with socket.create_connection(("127.0.0.1", port)):
            assert scrape(port)


def test_a_textfile_for_node_exporter_has_all_gpus(
    driver: Driver, configs: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "gpuhook.prom"
    argv = [*COMMAND, "--textfile", str(file), "--config", str(configs["runc"])]
    subprocess.run(argv, check=True)
    assert file.read_text().count("\ngpuhook_gpu_memory_total_bytes{") == len(driver.gpus)
    assert [*tmp_path.iterdir()] == [file]


def test_without_root_the_metrics_are_written_as_incomplete(
    driver: Driver, configs: dict[str, Path], reachable: Path, workspace: Path
) -> None:
    """gpuhook reports the containers that it can't see, and writes all other values.

    Root writes only in folders where no other user may write.
    """
    folder = workspace / f"nobody-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    file = folder / "gpuhook.prom"
    library = workspace / f"library-{folder.name}"  # the installation doesn't have this library
    shutil.copytree(Path(prometheus_client.__file__).parent, library / "prometheus_client")
    env = {"PYTHONPATH": str(library)}
    command = "from gpuhook.tools.cli import main; main()"  # the gpuhook program ignores PYTHONPATH
    words: list[str | Path] = [reachable / "python3", "-c", command, "metrics"]
    words += ["--textfile", file, "--config", configs["runc"]]
    done = run(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words], env).ok()
    plain = (
        "Without root, only your own containers are listed, and those of a Docker that you can "
        "access; run this as root for all"
    )
    assert f"gpuhook: {plain}." in done.stderr.splitlines()
    text = file.read_text()
    assert text.count("\ngpuhook_gpu_memory_total_bytes{") == len(driver.gpus)
    assert "\ngpuhook_metrics_complete 0.0\n" in text
    assert "could lead root elsewhere" in run(words, env).failed().stderr
