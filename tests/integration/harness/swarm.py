"""A Docker swarm of one node, with a separate dockerd in a separate network namespace."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.commands import Result, daemon, wait_until
from harness.docker import ALONE, Docker, options
from harness.images import image
from harness.inside import Inside, look, seen
from harness.namespaces import Namespace

_ADDRESS = "127.0.0.1"
_START = 'ip link set lo up && exec "$@"'
_SERVICE = "com.docker.swarm.service.name"


class Swarm:
    """A running swarm; ``folder`` holds all files of dockerd, including its daemon.json."""

    def __init__(self, folder: Path, namespace: Namespace, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.docker = Docker(folder, None, namespace)
        self._env = env
        self._running = ExitStack()

    def start(self) -> None:
        """Start dockerd; a swarm that it was in starts all its services again."""
        argv = ["dockerd", *options(self.folder, self.folder / "daemon.json")]
        words = self.docker.namespace.enter(*ALONE, "sh", "-c", _START, "sh", *argv)
        log = self.folder / "log"
        self._running.enter_context(daemon(words, log, self._answers, self._env))

    def stop(self) -> None:
        """Stop dockerd and all its containers."""
        self._running.close()

    def _answers(self) -> bool:
        return self.docker.call("info").status == 0

    def init(self) -> None:
        """Make the node a swarm manager."""
        words = ("--advertise-addr", _ADDRESS, "--listen-addr", f"{_ADDRESS}:2377")
        self.docker.call("swarm", "init", *words).ok()

    def service(self, name: str, *words: str, kind: str = "debian") -> None:
        """Create a service of one task that runs for ever; ``words`` are more Docker options."""
        create = ("service", "create", "--detach", "--no-resolve-image", "--name", name)
        quick = ("--restart-delay", "200ms", "--stop-grace-period", "200ms")
        self.docker.call(*create, *quick, *words, image(kind), "sleep", "100000").ok()

    def remove(self, *names: str) -> None:
        """Remove services, and wait until their containers are gone."""
        self.docker.call("service", "rm", *names).ok()
        wait_until(lambda: not any(map(self.containers, names)), f"{names} are gone")

    def services(self) -> list[str]:
        """Return the names of all services."""
        return self.docker.call("service", "ls", "--format", "{{.Name}}").ok().stdout.split()

    def containers(self, name: str) -> list[str]:
        """Return the running containers of a service."""
        words = ("ps", "--quiet", "--filter", f"label={_SERVICE}={name}")
        return self.docker.call(*words).ok().stdout.split()

    def state(self, name: str) -> tuple[str, str]:
        """Return the state of a service's newest task, and the error that Docker reports for it."""
        words = ("service", "ps", "--no-trunc", "--format", "{{.CurrentState}}\t{{.Error}}", name)
        newest = self.docker.call(*words).ok().stdout.splitlines()[0]
        state, _, error = newest.partition("\t")
        return state.split()[0], error

    def history(self, name: str) -> str:
        """Return Docker's table of a service's tasks."""
        return self.docker.call("service", "ps", "--no-trunc", name).ok().stdout

    def running(self, name: str) -> str:
        """Wait until a service runs; return its container."""
        self.wait(name, lambda: self.state(name)[0] == "Running" and bool(self.containers(name)))
        [container] = self.containers(name)
        return container

    def replaced(self, name: str, container: str) -> None:
        """Wait until a service has a different container from this one."""
        self.wait(name, lambda: self.containers(name) not in ([], [container]))

    def wait(self, name: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition of a service holds.

        On a timeout, raise AssertionError with Docker's table of the service's tasks.
        """
        try:
            wait_until(condition, f"{name} is as it should be", interval=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.history(name)}") from None

    def look(self, name: str, *minors: int) -> Inside:
        """Wait until a service runs, and look at the GPUs from inside its container."""
        return seen(self.execute(name, *look(minors)))

    def execute(self, name: str, *command: str) -> Result:
        """Run a command in a service's container."""
        return self.docker.call("exec", self.running(name), *command)


@contextmanager
def swarm(
    folder: Path, namespace: Namespace, settings: object, images: Path, env: Mapping[str, str]
) -> Iterator[Swarm]:
    """Start a swarm of one node below ``folder``; ``settings`` go into its daemon.json."""
    folder.mkdir(exist_ok=True)
    (folder / "daemon.json").write_text(json.dumps(settings))
    made = Swarm(folder, namespace, env)
    try:
        made.start()
        made.docker.call("load", "--input", images).ok()
        made.init()
        yield made
    finally:
        made.stop()
