"""A real Prometheus that scrapes gpuhook metrics, with data for the dashboard and with alerts."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dashboard
import pytest
import yaml
from harness.bundles import Bundle
from harness.bundles import bundle as make_bundle
from harness.commands import run, stop, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prometheus import Prometheus, prometheus

from gpuhook_simulate.vendors.nvidia import SimulatedProcess, report_xid, run_process
from gpuhook_simulate.vendors.nvidia.state import load_machine

GIB = 1 << 30
PATIENCE = 300.0
COMMAND = (sys.executable, "-c", "from gpuhook.tools.cli import main; main()", "metrics")
NASTY = 'quote " backslash \\ newline \n end'
WINDOW = "20s"
CRI = "io.containerd.runtime.v2.task/k8s.io"  # folder for bundles of containerd's CRI plugin


@dataclass(frozen=True)
class Scene:
    """A machine with containers, and the Prometheus that watches it."""

    prometheus: Prometheus
    driver: Driver
    parts: list[str]
    pod: Bundle
    nasty: Bundle
    idle: Bundle


@contextlib.contextmanager
def exporter(config: Path) -> Iterator[int]:
    """Run the exporter on a free port; yield the port."""
    for _ in range(10):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        argv = [*COMMAND, "--listen", f"127.0.0.1:{port}", "--config", str(config)]
        with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
            try:
                assert process.stderr is not None
                line = process.stderr.readline()
                if b"Listening at" in line:
                    yield port
                    return
                assert b"Nothing can listen" in line, line  # another process took the port
            finally:
                stop(process)
    pytest.fail("no port is free")


@pytest.fixture(scope="module")
def scene(
    workspace: Path,
    roots: dict[str, Path],
    host: Namespace,
    installation: Installation,
    prometheus_programs: Path,
) -> Iterator[Scene]:
    folder = workspace / f"prometheus-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    root = folder / "driver"
    driver = simulate(installation, root, "--gpus=3", "--mig=1:3g.71gb,1g.18gb")
    parts = [mig.uuid for mig in load_machine(str(root)).gpus[1].migs]
    config = write_config(folder / "config", root, ["runc"])
    with contextlib.ExitStack() as stack:
        made = []
        for devices, words in (
            ("0", {"sandbox-name": "train", "sandbox-namespace": "team", "container-name": "main"}),
            ("1:0", {"sandbox-name": NASTY, "sandbox-namespace": "x", "container-name": "y"}),
            ("2", {}),
        ):
            each = stack.enter_context(make_bundle(workspace / CRI, roots["debian"], host, "runc"))
            _start(each, devices, words, installation, config)
            made.append(each)
        used = driver.gpus[0].uuid
        run_process(str(root), SimulatedProcess(used, _first_process(made[0]), 2 * GIB, 40))
        run_process(str(root), SimulatedProcess(parts[0], _first_process(made[1]), GIB, 20))
        run_process(str(root), SimulatedProcess(used, os.getpid(), 3 * GIB, 10))
        port = stack.enter_context(exporter(config))
        server = stack.enter_context(prometheus(prometheus_programs, folder / "server", port))
        wait_until(lambda: bool(server.query("gpuhook_gpu_power_watts")), "it scrapes", PATIENCE)
        report_xid(str(root), 79, driver.gpus[2].uuid)
        yield Scene(server, driver, parts, *made)
    run([installation.command, "simulate", "--remove", root]).ok()


def _start(
    container: Bundle,
    devices: str,
    words: dict[str, str],
    installation: Installation,
    config: Path,
) -> None:
    container.environ(f"NVIDIA_VISIBLE_DEVICES={devices}")
    container.command("sleep", "1000")
    names = {f"io.kubernetes.cri.{name}": word for name, word in words.items()}
    container.change(lambda spec: spec.update(annotations=names))
    container.detach(installation.runtime, config)


def _first_process(container: Bundle) -> int:
    return int(json.loads(container.call("runc", "state", container.name).ok().stdout)["pid"])


def value(scene: Scene, expression: str) -> float:
    """Return the one value that a query finds, or -1 for none."""
    found = scene.prometheus.query(expression)
    assert len(found) < 2, found
    return float(found[0]["value"][1]) if found else -1.0


def test_every_panel_and_variable_has_data(scene: Scene) -> None:
    missing: dict[str, str] = {}

    def has_data() -> bool:
        missing.clear()
        for title, expression in dashboard.queries():
            plain = expression.removesuffix(" or vector(0)")  # the vector would hide missing data
            if not scene.prometheus.query(dashboard.filled(plain, WINDOW)):
                missing[title] = expression
        return not missing

    with contextlib.suppress(AssertionError):
        wait_until(has_data, "every panel has data", PATIENCE, interval=0.5)
    assert missing == {}


def test_metric_values_equal_the_simulators(scene: Scene) -> None:
    used, pod = scene.driver.gpus[0].uuid, f'container_id="{scene.pod.name}"'
    memory = "gpuhook_container_gpu_memory_used_bytes"
    assert value(scene, f'{memory}{{{pod},pod="train",namespace="team"}}') == 2 * GIB
    assert value(scene, f'{memory}{{container_id="",uuid="{used}"}}') == 3 * GIB
    assert value(scene, f'{memory}{{uuid="{scene.parts[0]}"}}') == GIB
    idle = f'gpuhook_container_gpu_processes{{container_id="{scene.idle.name}"}}'
    assert value(scene, idle) == 0
    share = f"gpuhook_container_gpu_sm_utilization_ratio{{{pod}}}"
    wait_until(lambda: abs(value(scene, share) - 0.4) < 0.02, "its SM use is known", PATIENCE)
    panels = dict(dashboard.queries())
    by_pod = scene.prometheus.query(dashboard.filled(panels["Memory by pod"], WINDOW))
    assert {each["metric"]["pod"]: int(each["value"][1]) for each in by_pod} == {
        "train": 2 * GIB, NASTY: GIB,
    }  # fmt: skip
    titles = scene.prometheus.query(dashboard.filled(panels["Memory by container"], WINDOW))
    assert {each["metric"]["who"] for each in titles} == {
        "train", NASTY, scene.idle.name[:12], "in no container",
    }  # fmt: skip


def test_quotes_backslashes_and_newlines_survive(scene: Scene) -> None:
    [found] = scene.prometheus.query(
        f'gpuhook_container_gpu_assigned{{container_id="{scene.nasty.name}"}}'
    )
    assert found["metric"]["pod"] == NASTY
    assert found["metric"]["uuid"] == scene.parts[0]


def test_an_xid_fires_its_alert(scene: Scene) -> None:
    wait_until(lambda: "GpuXidError" in scene.prometheus.firing(), "the alert fires", PATIENCE)
    [labels] = scene.prometheus.firing()["GpuXidError"]
    assert (labels["xid"], labels["uuid"]) == ("79", scene.driver.gpus[2].uuid)
    assert {*scene.prometheus.firing()} <= {"GpuXidError", "GpuNeedsRecovery"}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    words = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{words}}}", "values": values}


# Alert -> series that fire it, in promtool's notation for values a minute apart, and the time of
# the alert.
FIRING = {
    "GpuhookExporterDown": ([series("up", "0x60", job="gpuhook", instance="a")], "10m"),
    "GpuhookIncomplete": ([series("gpuhook_metrics_complete", "0x60", instance="a")], "20m"),
    "GpuDriverHangs": (
        [series("gpuhook_metrics_errors_total", "0x5 1x60", kind="timeout", instance="a")], "10m",
    ),
    "GpuSilent": (
        [series("gpuhook_gpu_info", "1x60", vendor="nvidia", uuid="G", instance="a"),
         series("gpuhook_gpu_memory_total_bytes", "5x60", uuid="H", instance="a")], "15m",
    ),
    "GpuXidError": (
        [series("gpuhook_gpu_xid_errors_total", "_x5 1x60", xid="79", instance="a")], "7m",
    ),
    "GpuNeedsRecovery": (
        [series("gpuhook_gpu_recovery_action", "1x60", action="gpu_reset", instance="a")], "5m",
    ),
    "GpuUncorrectedErrors": (
        [series("gpuhook_gpu_ecc_errors_total", "0x5 1x60", kind="uncorrected", instance="a")],
        "10m",
    ),
    "GpuHot": ([series("gpuhook_gpu_temperature_celsius", "95x60", instance="a")], "10m"),
    "GpuAssignedButIdle": (
        [series("gpuhook_container_gpu_assigned", "1x500", container_id="c", instance="a"),
         series("gpuhook_container_gpu_processes", "0x500", container_id="c", instance="a")],
        "6h10m",
    ),
}  # fmt: skip
QUIET = [
    series("up", "1x500", job="gpuhook", instance="a"),
    series("gpuhook_metrics_complete", "1x500", instance="a"),
    series("gpuhook_metrics_errors_total", "3x500", kind="timeout", instance="a"),
    series("gpuhook_gpu_info", "1x500", vendor="nvidia", uuid="G", instance="a"),
    series("gpuhook_gpu_memory_total_bytes", "5x500", uuid="G", instance="a"),
    series("gpuhook_gpu_temperature_celsius", "80x500", uuid="G", instance="a"),
    series("gpuhook_gpu_recovery_action", "1x500", action="none", instance="a"),
    series("gpuhook_gpu_ecc_errors_total", "0+1x500", kind="corrected", instance="a"),
    series("gpuhook_gpu_ecc_errors_total", "4x500", kind="uncorrected", instance="a"),
    # An error that a program caused, an older error of another kind, and a container that became
    # idle only recently.
    series("gpuhook_gpu_xid_errors_total", "0+1x500", xid="13", instance="a"),
    series("gpuhook_gpu_xid_errors_total", "2x500", xid="79", instance="a"),
    series("gpuhook_container_gpu_assigned", "1x500", container_id="c", instance="a"),
    series("gpuhook_container_gpu_processes", "1x300 0x200", container_id="c", instance="a"),
    # A GPU without memory of its own, a MIG device, and a container whose processes aren't known.
    series("gpuhook_gpu_info", "1x500", vendor="nvidia", uuid="GB10", instance="a"),
    series("gpuhook_gpu_temperature_celsius", "40x500", uuid="GB10", instance="a"),
    series("gpuhook_gpu_info", "1x500", vendor="nvidia", uuid="MIG", instance="a"),
    series("gpuhook_gpu_memory_total_bytes", "5x500", uuid="MIG", instance="a"),
    series("gpuhook_container_gpu_assigned", "1x500", container_id="d", vendor="amd", instance="a"),
    # A pod that is known only from the kubelet, so its processes can't be determined.
    series("gpuhook_container_gpu_assigned", "1x500", pod="p", uuid="G", instance="a"),
]


def test_each_alert_fires_and_is_quiet(prometheus_programs: Path, tmp_path: Path) -> None:
    promtool = prometheus_programs / "promtool"
    run([promtool, "check", "rules", dashboard.RULES]).ok()
    assert {*FIRING} == {rule["alert"] for rule in dashboard.rules()}
    expression = "count by (alertname) (ALERTS{alertstate='firing'})"
    cases = [(given, when, name) for name, (given, when) in FIRING.items()]
    tests = [
        {
            "interval": "1m",
            "input_series": given,
            "promql_expr_test": [
                {
                    "expr": expression,
                    "eval_time": when,
                    "exp_samples": [
                        {"labels": f'{{alertname="{each}"}}', "value": 1} for each in names.split()
                    ],
                }
            ],
        }
        for given, when, names in [*cases, (QUIET, "8h", "")]
    ]
    file = tmp_path / "alerts.yml"
    text = yaml.safe_dump({"rule_files": [str(dashboard.RULES)], "tests": tests})
    file.write_text(text)
    run([promtool, "test", "rules", file]).ok()
