"""A swarm of three nodes, where services get exactly the GPUs that the manager assigns."""

from clusters import Swarm
from nodes import NODES, SECOND, Node

TWO = ("--generic-resource", "NVIDIA-GPU=2")


def test_services_have_all_gpus_of_all_nodes_and_share_none(
    swarm: Swarm, nodes: dict[Node, list[str]]
) -> None:
    swarm.service("train", 7, *TWO)
    tasks = swarm.running("train", 6)
    given = [gpu for task in tasks for gpu in task.assigned]
    assert sorted(given) == sorted(gpu for gpus in nodes.values() for gpu in gpus)
    assert {task.node for task in tasks} == set(NODES)
    assert "no suitable node (insufficient resources on 3 nodes)" in swarm.history("train")


def test_a_service_constrained_to_a_node_gets_its_gpus_there(
    swarm: Swarm, nodes: dict[Node, list[str]]
) -> None:
    there = ("--constraint", f"node.hostname=={SECOND.name}")
    swarm.service("infer", 2, *TWO, *there)
    tasks = swarm.running("infer", 2)
    assert {gpu for task in tasks for gpu in task.assigned} == set(nodes[SECOND])


def test_a_service_without_a_request_has_no_gpu(swarm: Swarm) -> None:
    swarm.service("web", 3)
    tasks = swarm.running("web", 3)
    assert [task.assigned for task in tasks] == [frozenset()] * 3
