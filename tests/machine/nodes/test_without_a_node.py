"""Loss of power on one node: the other nodes continue and notice it.

The node stays off, so these tests come last.
"""

from dataclasses import dataclass

import pytest
from booted import GPUS
from clusters import Prometheus, Slurm, Swarm
from harness.commands import wait_until
from nodes import FIRST, SECOND, THIRD, Node

GONE, STAY = f"{THIRD.name}:9836", [f"{FIRST.name}:9836", f"{SECOND.name}:9836"]
HALF, MORE = (f"--generic-resource=NVIDIA-GPU={count}" for count in (GPUS // 2, GPUS // 2 + 1))


@dataclass
class Jobs:
    """Two Slurm jobs: one on node3, and one with all GPUs of node2."""

    job: str
    blocker: str


@pytest.fixture(scope="module")
def before(
    made_swarm: Swarm, made_slurm: Slurm, prometheus: Prometheus, nodes: dict[Node, list[str]]
) -> Jobs:
    """A service and a job that had GPUs of node3 when that node lost its power."""
    for node in (SECOND, THIRD):
        node.call("gpuhook", "config", "set", "nvidia-container-runtime.mode=spec")
    for node in (FIRST, SECOND):
        name = f"half-{node.name}"
        made_swarm.service(name, 1, HALF, f"--constraint=node.hostname=={node.name}")
        made_swarm.running(name, 1)
    made_swarm.service("train", 1, MORE)
    assert made_swarm.running("train", 1)[0].node == THIRD
    made_swarm.remove(f"half-{SECOND.name}")
    blocker = made_slurm.submit(GPUS, f"--nodelist={SECOND.name}")
    made_slurm.started(blocker, GPUS)
    job = made_slurm.submit(2, "--requeue")
    assert made_slurm.started(job, 2) <= set(nodes[THIRD])
    prometheus.wait("up", dict.fromkeys([*STAY, GONE], 1.0))
    THIRD.power_off()
    assert not THIRD.is_up()
    return Jobs(job, blocker)


def test_prometheus_fires_an_alert_for_a_lost_node(before: Jobs, prometheus: Prometheus) -> None:
    prometheus.wait("up", {**dict.fromkeys(STAY, 1.0), GONE: 0.0})
    prometheus.wait("count(gpuhook_gpu_info)", {"": 2.0 * GPUS})
    firing = 'ALERTS{alertname="GpuhookExporterDown", alertstate="firing"}'
    prometheus.wait(firing, {GONE: 1.0})


def test_a_task_of_a_lost_node_starts_where_gpus_are_free(
    before: Jobs, made_swarm: Swarm, nodes: dict[Node, list[str]]
) -> None:
    wait_until(
        lambda: THIRD not in {task.node for task in made_swarm.tasks("train")},
        "the manager misses the node",
        interval=0.2,
    )
    [task] = made_swarm.running("train", 1)
    assert task.node == SECOND
    assert task.assigned <= set(nodes[SECOND])


def test_slurm_marks_a_lost_node_down_and_restarts_its_job_elsewhere(
    before: Jobs, made_slurm: Slurm, nodes: dict[Node, list[str]]
) -> None:
    wait_until(lambda: made_slurm.states()[THIRD.name] == "down*", "it is down", interval=0.2)
    wait_until(lambda: made_slurm.job(before.job)["Restarts"] == "1", "it is back in the queue")
    assert made_slurm.job(before.job)["JobState"] == "PENDING"
    made_slurm.call("scancel", before.blocker).ok()
    assert made_slurm.started(before.job, 2) <= set(nodes[SECOND])
