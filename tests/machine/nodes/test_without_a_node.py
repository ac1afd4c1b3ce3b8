"""One node loses its power: the others go on, and know. It is off for good: these come last."""

from dataclasses import dataclass

import pytest
from booted import GPUS
from clusters import Prometheus, Slurm, Swarm
from harness.commands import wait_until
from nodes import FIRST, SECOND, THIRD, Node

GONE, STAY = f"{THIRD.name}:9836", [f"{FIRST.name}:9836", f"{SECOND.name}:9836"]
SERVICE = "train"


@dataclass
class Before:
    """What ran on the node."""

    tasks: int
    job: str
    blocker: str


@pytest.fixture(scope="module")
def before(
    made_swarm: Swarm, made_slurm: Slurm, prometheus: Prometheus, nodes: dict[Node, list[str]]
) -> Before:
    """A service and a job had GPUs of node3 when that went off."""
    for node in (SECOND, THIRD):
        node.call("gpuhook", "config", "set", "nvidia-container-runtime.mode=spec")
    made_swarm.service(SERVICE, 4, "--generic-resource", "NVIDIA-GPU=2")
    tasks = made_swarm.running(SERVICE, 4)
    blocker = made_slurm.submit(GPUS, f"--nodelist={SECOND.name}")
    made_slurm.started(blocker, GPUS)
    job = made_slurm.submit(2, "--requeue")
    assert made_slurm.started(job, 2) <= set(nodes[THIRD])
    prometheus.wait("up", dict.fromkeys([*STAY, GONE], 1.0))
    THIRD.power_off()
    assert not THIRD.is_up()
    return Before(len([task for task in tasks if task.node == THIRD]), job, blocker)


def test_prometheus_counts_what_is_left_and_fires(before: Before, prometheus: Prometheus) -> None:
    prometheus.wait("up", {**dict.fromkeys(STAY, 1.0), GONE: 0.0})
    prometheus.wait("count(gpuhook_gpu_info)", {"": 2.0 * GPUS})
    firing = 'ALERTS{alertname="GpuhookExporterDown", alertstate="firing"}'
    prometheus.wait(firing, {GONE: 1.0})


def test_the_swarm_starts_its_tasks_where_gpus_are_free(
    before: Before, made_swarm: Swarm, nodes: dict[Node, list[str]]
) -> None:
    assert before.tasks > 0
    wait_until(
        lambda: THIRD not in {task.node for task in made_swarm.tasks(SERVICE)},
        "the manager misses the node",
        interval=0.2,
    )
    tasks = made_swarm.running(SERVICE, 4)
    given = [gpu for task in tasks for gpu in task.assigned]
    assert sorted(given) == sorted([*nodes[FIRST], *nodes[SECOND]])


def test_slurm_marks_it_down_and_starts_its_job_elsewhere(
    before: Before, made_slurm: Slurm, nodes: dict[Node, list[str]]
) -> None:
    wait_until(lambda: made_slurm.states()[THIRD.name] == "down*", "it is down", interval=0.2)
    wait_until(lambda: made_slurm.job(before.job)["Restarts"] == "1", "it is back in the queue")
    assert made_slurm.job(before.job)["JobState"] == "PENDING"
    made_slurm.call("scancel", before.blocker).ok()
    assert made_slurm.started(before.job, 2) <= set(nodes[SECOND])
