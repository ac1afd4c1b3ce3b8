"""A node of a cluster with its own processes and folders, where podman runs a pod's containers.

Its PID namespace has the engine that an installer restarts, and no other engine of this host.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bundles import CGROUP_PARENT
from harness.commands import Result, path_of, wait_until
from harness.manifests import (
    IMAGE,
    Document,
    arguments,
    containers,
    folders_made,
    pod_of,
    podman_options,
)
from harness.namespaces import Namespace, host_cgroups
from harness.podman import Podman

# Folders of the node that gpuhook's pods change.
FOLDERS = tuple(
    map(
        Path,
        (
            "/opt",
            "/etc/containerd",
            "/etc/gpuhook",
            "/etc/systemd/system",
            "/var/lib/gpuhook",
            "/var/lib/kubelet",
            "/var/lib/rancher",
            "/run/k3s",
            "/run/cdi",  # not /var/run, which is a link to the host's /run
        ),
    )
)
CONFIG = Path("/etc/containerd/config.toml")
# The folder of the node's containerd. A dockerd that found it on this host would use this
# containerd as its own. Its mode is the one that it has if a shim made it before containerd.
STATE = Path("/run/containerd")
_HOLD = "mount --make-rshared / && echo ready && { sleep infinity & wait; }"


@dataclass(frozen=True)
class Processes(Namespace):
    """A mount namespace that is entered together with its PID namespace."""

    def enter(self, *argv: str | Path, cwd: Path | None = None) -> list[str]:
        """Return the command line that runs ``argv`` in both namespaces."""
        words = super().enter(*argv, cwd=cwd)
        return [*words[:3], "-p", *words[3:]]


class Node:
    """A node; ``podman`` has the image, and commands run in ``space``."""

    def __init__(self, space: Namespace, podman: Podman) -> None:
        self.space = space
        self.podman = podman

    def path(self, path: str | Path) -> Path:
        """Return the path at which this process finds a path of the node."""
        return Path(f"/proc/{self.space.pid}/root/{str(path).lstrip('/')}")

    def pod(
        self,
        document: Document,
        name: str,
        *words: str,
        host: Mapping[str, str] | None = None,
        image: str = IMAGE,
        options: tuple[str, ...] = (),
    ) -> Result:
        """Run one container of a DaemonSet's pod; ``words`` replace its arguments."""
        pod = pod_of(document)
        container = containers(pod)[name]
        for folder in folders_made(pod):
            self.path(folder).mkdir(parents=True, exist_ok=True)
        given = podman_options(pod, container, host or {})
        parent = f"--cgroup-parent={CGROUP_PARENT}"
        return self.podman.call(
            "run", *options, parent, *given, image, *(words or arguments(container))
        )

    def begin(
        self, document: Document, name: str, *words: str, host: Mapping[str, str] | None = None
    ) -> str:
        """Start a container as ``pod`` does, without waiting for it; return its id."""
        done = self.pod(document, name, *words, host=host, options=("--detach",))
        return done.ok().stdout.strip()

    def is_running(self, container: str) -> bool:
        """Return whether a started container still runs."""
        words = ("inspect", "--format={{.State.Running}}", container)
        return self.podman.call(*words).ok().stdout.strip() == "true"

    def end(self, container: str) -> Result:
        """Wait until a container has exited, and remove it; return its status and its log."""
        status = int(self.podman.call("wait", container).ok().stdout)
        log = self.podman.call("logs", container).ok()
        self.podman.call("rm", container).ok()
        return replace(log, status=status)

    @contextmanager
    def service(self, program: str, env: Mapping[str, str], command: str = "") -> Iterator[None]:
        """Keep a program running, as a service manager does for Restart=always.

        ``command`` starts the program, if that takes more than its name.
        """
        cgroups = Path("/sys/fs/cgroup") / ("" if host_cgroups() == "v2" else "pids")
        folder = cgroups / CGROUP_PARENT.strip("/") / f"{program}.service"
        again = f"while :; do {command or program}; sleep 0.2; done"
        script = f"mkdir -p {folder} && echo $$ >{folder}/cgroup.procs && {again}"
        with Path(f"{self.podman.folder}/{program}.log").open("wb") as log:
            manager = subprocess.Popen(
                self.space.enter("setpriv", "--pdeathsig", "KILL", "sh", "-c", script),
                env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            yield
        finally:
            manager.kill()
            manager.wait()
            self.space.run("pkill", "-KILL", "-x", program)  # in the node's PID namespace

    def pids(self, program: str) -> set[str]:
        """Return the ids of the node's processes that run a program."""
        return set(self.space.run("pgrep", "-x", program).stdout.split())


@contextmanager
def node(folder: Path, archive: Path) -> Iterator[Node]:
    """Yield a node whose podman has the image of ``archive``; ``folder`` is new."""
    folder.mkdir()
    # If a doctor on this host found a kubelet's folder, it would take the host for a node of a
    # cluster.
    lacking = [each for each in (*FOLDERS, STATE) if not each.exists()]
    mounts = [f"mkdir -p {each} && mount -t tmpfs -o mode=755 tmpfs {each}" for each in FOLDERS]
    mounts.append(f"mkdir -p {STATE} && mount -t tmpfs -o mode=600 tmpfs {STATE}")
    script = " && ".join([*mounts, _HOLD])
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *words, "sh", "-c", script], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        first = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
        space = Processes(host_cgroups(), first, Path("/"))
        podman = Podman(folder, space, path_of("runc"), None)
        podman.call("load", "--input", archive).ok()
        yield Node(space, podman)
        podman.call("rm", "--all", "--force", "--time=0")
        podman.call("system", "reset", "--force")
    finally:
        holder.kill()  # this also ends everything that runs on the node
        holder.wait()
        holder.stdout.close() if holder.stdout else None
        wait_until(lambda: not os.path.exists(f"/proc/{first}"), "the node's processes have ended")
        for each in lacking:
            with suppress(FileNotFoundError):
                each.rmdir()
