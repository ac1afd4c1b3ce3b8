"""Schedulers on the three machines of ``nodes``: Docker Swarm and Slurm, and one Prometheus."""

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import ran
from booted import ALLOWED, DENIED, GPUS
from harness.commands import Result, wait_until
from harness.images import image
from harness.inside import GPU_MAJOR
from nodes import FIRST, NODES, Node

DEBIAN = image("debian")
BUNDLE = "/srv/bundle"  # on each node that runs Slurm
USER_ID = 4401  # the user id of the user who starts jobs
_UUID = re.compile(r"UUID: (GPU-[^)]*)\)")
_OPEN_ALL = (
    f"for m in $(seq 0 {GPUS - 1}); do\n"
    f"rm -f /tmp/n$m; mknod /tmp/n$m c {GPU_MAJOR} $m; devopen /tmp/n$m\n"
    "done"
)


def uuids(text: str) -> set[str]:
    """Return the UUIDs of the GPUs that ``nvidia-smi -L`` has printed."""
    return set(_UUID.findall(text))


@dataclass(frozen=True)
class Task:
    """A running task of a service, and the GPUs that the manager reports for it."""

    id: str
    node: Node
    container: str
    assigned: frozenset[str]


class Swarm:
    """The swarm; ``gpus`` are the UUIDs of each node in the order of their minors."""

    def __init__(self, gpus: Mapping[Node, Sequence[str]]) -> None:
        self._gpus = gpus
        ids = FIRST.call("docker", "node", "ls", "--format", "{{.Hostname}} {{.ID}}").split()
        self._ids = dict(zip(ids[1::2], ids[::2], strict=True))

    def service(self, name: str, replicas: int, *options: str) -> None:
        """Create a service whose tasks run for ever."""
        FIRST.call(
            *("docker", "service", "create", "--detach", "--no-resolve-image", "--name", name),
            *("--restart-delay=200ms", "--stop-grace-period=200ms", f"--replicas={replicas}"),
            *(*options, DEBIAN, "sleep", "100000"),
        )

    def remove(self, *names: str) -> None:
        """Remove these services, or all if none is named, and wait until no container is left."""
        every = FIRST.call("docker", "service", "ls", "--format={{.Name}}").split()
        for name in names or every:
            FIRST.call("docker", "service", "rm", name)
            wait_until(partial(self._is_gone, name), f"{name} is gone", interval=0.2)

    @staticmethod
    def _is_gone(name: str) -> bool:
        label = f"label=com.docker.swarm.service.name={name}"
        return not any(node.call("docker", "ps", "--quiet", "--filter", label) for node in NODES)

    def history(self, name: str) -> str:
        """Return the manager's report on all tasks of a service."""
        return FIRST.call("docker", "service", "ps", "--no-trunc", name)

    def tasks(self, name: str) -> list[Task]:
        """Return the running tasks of a service."""
        words = ("docker", "service", "ps", "--quiet", "--no-trunc", "--filter")
        ids = FIRST.call(*words, "desired-state=running", name).split()
        found = []
        for each in json.loads(FIRST.call("docker", "inspect", "--type=task", *ids)) if ids else []:
            if each["Status"]["State"] == "running":
                [node] = [node for node in NODES if node.name == self._ids[each["NodeID"]]]
                resources = each.get("GenericResources") or []
                values = frozenset(one["NamedResourceSpec"]["Value"] for one in resources)
                container = each["Status"]["ContainerStatus"]["ContainerID"]
                found.append(Task(each["ID"], node, container, values))
        return found

    def running(self, name: str, count: int, timeout: float = 60.0) -> list[Task]:
        """Wait until that many tasks of a service run, and check that each has its GPUs."""
        wait_until(
            lambda: len(self.tasks(name)) == count,
            f"{count} tasks of {name} run",
            timeout,
            interval=0.2,
            shown=lambda: self.history(name),
        )
        tasks = self.tasks(name)
        for task in tasks:
            assert self.seen(task) == task.assigned, task
        return tasks

    def seen(self, task: Task) -> set[str]:
        """Return the GPUs that a task can open; its container must see the same GPUs."""
        inside = ("docker", "exec", task.container, "sh", "-c")
        lines = task.node.call(*inside, _OPEN_ALL).split()[1::2]
        assert set(lines) <= {ALLOWED, DENIED}
        assert len(lines) == GPUS
        opened = {
            uuid for uuid, said in zip(self._gpus[task.node], lines, strict=True) if said == ALLOWED
        }
        listed = task.node.call(*inside, "nvidia-smi -L || true") if opened else ""
        assert uuids(listed) == opened
        return opened


class Slurm:
    """Jobs of an ordinary user, who submits them on node1."""

    def call(self, *words: str, stdin: str = "") -> Result:
        """Run a Slurm command as that user."""
        ids = (f"--reuid={USER_ID}", f"--regid={USER_ID}", "--clear-groups")
        return FIRST.run("setpriv", *ids, *words, stdin=stdin)

    def submit(self, gpus: int, *options: str) -> str:
        """Submit a job whose container prints its GPUs and runs for ever; return its number."""
        script = f"#!/bin/sh\nsrun --container={BUNDLE} sh -c 'nvidia-smi -L; sleep 100000'\n"
        words = ("sbatch", "--parsable", f"--gres=gpu:{gpus}", "--output=/tmp/job.%j", "--chdir=/")
        return self.call(*words, *options, stdin=script).ok().stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that the controller reports for a job."""
        line = FIRST.call("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def node_of(self, number: str) -> Node:
        [node] = [node for node in NODES if node.name == self.job(number)["NodeList"]]
        return node

    def started(self, number: str, gpus: int) -> set[str]:
        """Wait until a job's container has printed that many GPUs; return them."""

        def printed() -> set[str]:
            if self.job(number)["JobState"] != "RUNNING":
                return set()
            return uuids(self.node_of(number).run("cat", f"/tmp/job.{number}").stdout)

        wait_until(
            lambda: len(printed()) == gpus,
            f"job {number} has {gpus} GPUs",
            interval=0.2,
            shown=lambda: str(self.job(number)),
        )
        return printed()

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until they have ended."""
        FIRST.call("scancel", f"--user={USER_ID}")
        wait_until(lambda: not FIRST.call("squeue", "--noheader"), "no job is left", interval=0.2)

    def states(self) -> dict[str, str]:
        """Return each node's state as the controller reports it; ``*`` marks a silent node."""
        words = FIRST.call("sinfo", "--noheader", "--Node", "--format=%N %T").split()
        return dict(zip(words[::2], words[1::2], strict=True))


class Prometheus:
    """The Prometheus server on node1."""

    def __init__(self) -> None:
        self._version = FIRST.call("prometheus", "--version").split()[2]

    def ask(self, expression: str) -> dict[str, float]:
        """Return the values of a query by ``instance``.

        A sum has only one value, and its instance is an empty text.
        """
        ran.add("Prometheus", self._version, ran.distribution())
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:9090/api/v1/query?{words}") as answer:
            found = json.load(answer)["data"]["result"]
        values = {each["metric"].get("instance", ""): float(each["value"][1]) for each in found}
        assert len(values) == len(found), found
        return values

    def wait(self, expression: str, expected: Mapping[str, float], timeout: float = 60.0) -> None:
        """Wait until a query has these values."""
        wait_until(
            lambda: self.ask(expression) == expected,
            f"{expression} is {expected}",
            timeout,
            interval=0.2,
            shown=lambda: str(self.ask(expression)),
        )
