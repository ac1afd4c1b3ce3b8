"""Three machines with gpuhook's package and their own GPUs, and the schedulers that use them."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from booted import CARRIED, DRIVER, GPUS, packages
from clusters import BUNDLE, DEBIAN, USER_ID, Prometheus, Slurm, Swarm
from harness.commands import wait_until
from harness.images import REPOSITORY
from nodes import FIRST, NODES, SECOND, THIRD, Node

WORKERS = (SECOND, THIRD)  # Slurm's
SLURM_CONF = """\
ClusterName=gpus
SlurmctldHost=node1
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
Prolog=/usr/libexec/gpuhook/slurm/prolog
Epilog=/usr/libexec/gpuhook/slurm/epilog
MpiDefault=none
# A node that doesn't answer is down, and its jobs start elsewhere, as soon as may be.
MessageTimeout=4
SlurmdTimeout=12
AuthInfo=cred_expire=5
SchedulerParameters=sched_interval=1,bf_interval=1
# More processors than the machines have: GPUs are what is short.
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[2-3] CPUs=16 {gres}
PartitionName=all Nodes=ALL Default=YES
"""
SCRAPED = """\
global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}
rule_files: [/etc/prometheus/gpuhook.rules.yml]
scrape_configs:
  - job_name: gpuhook
    static_configs: [{targets: ["node1:9836", "node2:9836", "node3:9836"]}]
"""


def install(node: Node) -> list[str]:
    """Install the package and a driver on a node; return the UUIDs of its GPUs."""
    wait_until(node.is_up, f"{node.name} has booted")
    node.script(
        f"apt-get install --yes {' '.join(map(str, packages()))}",
        f"gpuhook simulate {DRIVER} --gpus {GPUS} --model H100 --seed {node.name}",
        f"gpuhook config set nvidia-container-cli.root={DRIVER}",
        f"docker load --input {CARRIED}/images.tar",
    )
    gpus = json.loads(node.call("gpuhook", "info", "--format", "json"))["gpus"]
    return [gpu["uuid"] for gpu in gpus]


@pytest.fixture(scope="session")
def nodes() -> Iterator[dict[Node, list[str]]]:
    """The machines, each with the package, a simulated driver and the UUIDs of its GPUs."""
    with ThreadPoolExecutor() as threads:
        found = dict(zip(NODES, threads.map(install, NODES), strict=True))
    assert len({gpu for gpus in found.values() for gpu in gpus}) == len(NODES) * GPUS
    yield found
    for node in NODES:
        if node.is_up():
            journal = node.run("journalctl", "--boot", "--no-pager", "--output=short-monotonic")
            Path("/results", f"{node.name}.journal").write_text(journal.stdout)


@pytest.fixture(scope="session")
def made_swarm(nodes: dict[Node, list[str]]) -> Swarm:
    """A swarm of all nodes, set up as the page says and managed by node1."""
    for node in NODES:
        said = node.call("gpuhook", "install", "--engine", "docker", "--swarm")
        [setting] = re.findall(r"gpuhook (config set swarm-resource=\S+)", said)
        node.call("gpuhook", *setting.split())
        node.call("systemctl", "restart", "docker")
    FIRST.call("docker", "swarm", "init", "--advertise-addr", FIRST.address)
    token = FIRST.call("docker", "swarm", "join-token", "--quiet", "worker").strip()
    for node in WORKERS:
        node.call("docker", "swarm", "join", "--token", token, f"{FIRST.address}:2377")
    return Swarm(nodes)


@pytest.fixture
def swarm(made_swarm: Swarm) -> Iterator[Swarm]:
    """The swarm, without services before and after a test."""
    yield made_swarm
    made_swarm.remove()


@pytest.fixture(scope="session")
def made_slurm(nodes: dict[Node, list[str]]) -> Slurm:
    """Slurm, set up as the page says: node1 is the controller, and jobs run on the others."""
    page = Path(REPOSITORY, "docs/schedulers/slurm.md").read_text()
    oci_conf = "\n".join(re.findall(r"^ +(RunTime\w+=.*)$", page, re.MULTILINE)) + "\n"
    assert oci_conf.count("\n") == 4
    library = "/usr/local/lib/v2_alone.so"
    for node in WORKERS:
        node.call("gpuhook", "slurm", "gres", "--output", "/etc/slurm/gres.conf")
    written = SECOND.call("cat", "/etc/slurm/gres.conf")
    [gres] = re.findall(r"^# .* (Gres=.*)$", written, re.MULTILINE)
    for node in NODES:
        node.write("/etc/slurm/slurm.conf", SLURM_CONF.format(gres=gres))
        node.script(
            f"useradd --uid {USER_ID} --create-home ada",
            "install -d -o munge -m 700 /var/log/munge",
            "systemctl start munge",
        )
    FIRST.call("systemctl", "start", "slurmctld")
    for node in WORKERS:
        node.write("/etc/slurm/cgroup.conf", "ConstrainDevices=yes\n")
        node.call("gpuhook", "slurm", "oci", "--output", "/etc/slurm/oci.conf")
        assert node.call("cat", "/etc/slurm/oci.conf") == oci_conf
        make_bundle(node)
        source = Path(__file__).with_name("v2_alone.c")
        node.call("gcc", "-shared", "-fPIC", "-O1", "-o", library, source)
        unit = "/etc/systemd/system/slurmd.service.d/v2.conf"
        node.write(unit, f"[Service]\nEnvironment=LD_PRELOAD={library}\n")
        node.script("systemctl daemon-reload", "systemctl start slurmd")
    return Slurm()


def make_bundle(node: Node) -> None:
    """Make a bundle as ``runc spec --rootless`` does, from an image that requests all GPUs."""
    node.script(
        f"mkdir -p {BUNDLE}/rootfs && cd {BUNDLE}",
        f"docker create --name bundle {DEBIAN}",
        "docker export bundle | tar -C rootfs -x",
        "docker rm bundle",
        "runc spec --rootless",
    )
    spec = json.loads(node.call("cat", f"{BUNDLE}/config.json"))
    for kind in ("uidMappings", "gidMappings"):
        spec["linux"][kind] = [{"containerID": 0, "hostID": USER_ID, "size": 1}]
    spec["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=all")
    spec["root"]["readonly"] = False
    node.write(f"{BUNDLE}/config.json", json.dumps(spec))
    node.call("chown", "--recursive", f"{USER_ID}:{USER_ID}", BUNDLE)


@pytest.fixture
def slurm(made_slurm: Slurm) -> Iterator[Slurm]:
    """Slurm with all its nodes idle; gpuhook treats containers there as those of ordinary users."""
    for node in WORKERS:
        node.call("gpuhook", "config", "set", "nvidia-container-runtime.mode=spec")
    states = {node.name: "idle" for node in WORKERS}
    wait_until(lambda: made_slurm.states() == states, "all nodes are idle", interval=0.2)
    yield made_slurm
    made_slurm.cancel_all()
    for node in WORKERS:
        node.call("gpuhook", "config", "set", "nvidia-container-runtime.mode=auto")


@pytest.fixture(scope="session")
def prometheus(nodes: dict[Node, list[str]]) -> Prometheus:
    """One Prometheus on node1 that scrapes all nodes, with alerts that fire without long delays."""
    unit = "/etc/systemd/system/gpuhook-metrics.service.d/listen.conf"
    command = "/usr/bin/gpuhook metrics --listen 0.0.0.0:9836"
    for node in NODES:
        node.write(unit, f"[Service]\nExecStart=\nExecStart={command}\n")
        node.script("systemctl daemon-reload", "systemctl enable --now gpuhook-metrics")
    rules = Path(REPOSITORY, "packaging/prometheus/gpuhook.rules.yml").read_text()
    FIRST.write("/etc/prometheus/gpuhook.rules.yml", re.sub(r"for: \d+[mh]", "for: 1s", rules))
    FIRST.write("/etc/prometheus/prometheus.yml", SCRAPED)
    FIRST.script("install -d -o prometheus /var/lib/prometheus", "systemctl start prometheus")
    found = Prometheus()
    wait_until(lambda: FIRST.run("promtool", "check", "ready").status == 0, "Prometheus is ready")
    return found
