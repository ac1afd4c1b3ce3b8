"""One Prometheus that scrapes all nodes."""

from booted import GPUS
from clusters import Prometheus, Swarm
from nodes import NODES

INSTANCES = [f"{node.name}:9836" for node in NODES]


def test_metrics_count_the_gpus_of_all_nodes(prometheus: Prometheus) -> None:
    prometheus.wait("up", dict.fromkeys(INSTANCES, 1.0))
    prometheus.wait("count(gpuhook_gpu_info)", {"": float(len(NODES) * GPUS)})
    prometheus.wait("count by (instance) (gpuhook_gpu_info)", dict.fromkeys(INSTANCES, float(GPUS)))
    prometheus.wait("count(count by (uuid) (gpuhook_gpu_info))", {"": float(len(NODES) * GPUS)})


def test_metrics_show_the_gpus_of_a_service_on_each_node(
    prometheus: Prometheus, swarm: Swarm
) -> None:
    swarm.service("train", 3, "--generic-resource", "NVIDIA-GPU=3")
    swarm.running("train", 3)
    given = 'gpuhook_container_gpu_assigned{name=~"train[.].*"}'
    prometheus.wait(f"sum by (instance) ({given})", dict.fromkeys(INSTANCES, 3.0))
    prometheus.wait(f"sum({given})", {"": 9.0})
    swarm.remove()
    prometheus.wait(f"sum({given})", {})


def test_no_alert_fires_on_healthy_nodes(prometheus: Prometheus) -> None:
    prometheus.wait("up", dict.fromkeys(INSTANCES, 1.0))
    # This machine has a namespace of its own, below which processes of containers can't be
    # told apart.
    assert prometheus.ask('ALERTS{alertname!="GpuhookIncomplete"}') == {}
