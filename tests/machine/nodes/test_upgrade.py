"""An upgrade of the package, node by node, while a swarm's services run."""

from booted import packages
from clusters import Swarm
from nodes import NODES, Node

ONE = ("--generic-resource", "NVIDIA-GPU=1")
STARTS = (
    "while docker run --rm --network=none --env NVIDIA_VISIBLE_DEVICES=0 localhost/debian:test "
    "nvidia-smi -L; do :; done"
)


def upgrade(node: Node) -> None:
    """Install the packages as a next version while other processes start containers."""
    node.script("rm -rf /tmp/next && mkdir /tmp/next")
    for number, path in enumerate(packages()):
        node.script(
            "cd /tmp/next",
            f"dpkg-deb --raw-extract {path} {number}",
            rf"sed -i 's/^Version: .*/&.1/; s/(= [^)]*/&.1/g' {number}/DEBIAN/control",
            f"dpkg-deb -Znone --build {number} {number}.deb",
        )
    node.call("systemd-run", "--unit=starts", "sh", "-c", STARTS)
    node.call(
        "apt-get",
        "install",
        "--yes",
        *(f"/tmp/next/{number}.deb" for number in range(len(packages()))),
    )
    state = node.run("systemctl", "is-active", "starts").stdout
    said = node.run("journalctl", "--unit=starts", "--no-pager").stdout
    assert state == "active\n", said
    assert "UUID" in said
    node.call("systemctl", "stop", "starts")


def version(node: Node) -> str:
    return node.call("dpkg-query", "--show", "--showformat=${Version}", "gpuhook")


def test_running_services_continue_and_new_services_start_after_an_upgrade(swarm: Swarm) -> None:
    before = version(NODES[0])
    swarm.service("steady", 6, *ONE)
    steady = swarm.running("steady", 6)
    for node in NODES:
        upgrade(node)
        name = f"after-{node.name}"
        swarm.service(name, 1, *ONE, "--constraint", f"node.hostname=={node.name}")
        swarm.running(name, 1)
        again = swarm.running("steady", 6)
        assert sorted(again, key=lambda task: task.id) == sorted(steady, key=lambda task: task.id)
    assert [version(node) for node in NODES] == [f"{before}.1"] * 3
