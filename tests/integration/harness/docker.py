"""A dockerd for the tests, with gpu-py in its daemon.json."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.bundles import CGROUP_PARENT
from harness.commands import Result, daemon
from harness.containerd import containerd
from harness.engines import settings
from harness.namespaces import Namespace, host_cgroups

# A dockerd with --bridge=none removes an existing docker0, which may be the host's.
ALONE = ("unshare", "--net")


@dataclass(frozen=True)
class Docker:
    """A running dockerd; ``folder`` has all its files, ``pid`` is the daemon's process id.

    Its command line runs in ``namespace``.
    """

    folder: Path
    pid: int | None
    namespace: Namespace = field(default_factory=lambda: Namespace(host_cgroups()))

    @property
    def shows_errors_of_hooks(self) -> bool:
        """Return whether the user sees the messages of a failed hook."""
        return True

    def call(self, *words: str | Path) -> Result:
        """Run the docker command line against this daemon."""
        env = {"DOCKER_CONFIG": str(self.folder / "client")}
        argv = ("docker", "-H", f"unix://{self.folder}/docker.sock", *words)
        return self.namespace.run(*argv, env=env)

    def run(
        self,
        image: str,
        *command: str,
        env: Sequence[str] = (),
        options: Sequence[str] = (),
        runtime: str = "gpu-py",
    ) -> Result:
        """Run ``command`` in a container of ``image`` that is deleted afterwards."""
        words = ["run", "--rm", f"--runtime={runtime}", *settings("-e", env), *options]
        return self.call(*words, image, *command)


@contextmanager
def dockerd(
    folder: Path,
    namespace: Namespace,
    runtimes: Mapping[str, Path],
    images: Path,
    env: Mapping[str, str],
    more: Mapping[str, object] | None = None,
) -> Iterator[Docker]:
    """Start dockerd below ``folder`` and load ``images``, an archive as docker save writes.

    It uses a separate containerd, as Debian's service does. A containerd that dockerd starts
    itself would be busy when idle. ``runtimes`` are registered by name. ``env`` is added to
    the daemon's environment, and ``more`` to its daemon.json.
    """
    folder.mkdir()
    config = folder / "daemon.json"
    registered = {name: {"path": str(path)} for name, path in runtimes.items()}
    config.write_text(json.dumps({"runtimes": registered, **(more or {})}))
    client = Docker(folder, None, namespace)
    below = folder / "containerd"
    words = (*options(folder, config), f"--containerd={below}/containerd.sock")
    argv = namespace.enter(*ALONE, "dockerd", *words)
    with (
        containerd(below, namespace, Path("runc"), None, env, within=ALONE),
        daemon(argv, folder / "log", lambda: client.call("info").status == 0, env),
    ):
        pid = int((folder / "pid").read_text())
        client.call("load", "--input", images).ok()
        yield Docker(folder, pid, namespace)
        _remove_containers(client)


def options(folder: Path, config: Path) -> list[str]:
    """Return the options of a dockerd that has all its files below ``folder``."""
    return [
        f"--config-file={config}",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/pid",
        f"--host=unix://{folder}/docker.sock",
        f"--cgroup-parent={CGROUP_PARENT}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
        "--ip-masq=false",
    ]


def _remove_containers(client: Docker) -> None:
    left = client.call("ps", "--all", "--quiet").ok().stdout.split()
    if left:
        client.call("rm", "--force", *left).ok()
