"""Shared parts of tests on a booted machine: copied files, and containers with GPUs."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.commands import Result, run, wait_until
from harness.images import image
from harness.inside import GPU_MAJOR

CARRIED = Path("/carried")
DRIVER = Path("/srv/gpus")
GPUS = 4
USER = "ada"  # an unprivileged user
REQUEST = "NVIDIA_VISIBLE_DEVICES=0,2"
GIVEN, REFUSED = (0, 2), (1, 3)
OURS = ("gpuhook", "gpu-py", "gpu-docker", "nvidia", "/cdi")
BUSYBOX = image("busybox")  # the smallest image that has devopen
# Results of open(): the node's driver doesn't exist, or the cgroup denies access to the node.
ALLOWED, DENIED = "ENXIO", "EPERM"
# The controllers of cgroup v2: empty if v1 has them, and None if there is no cgroup v2.
_CONTROLLERS = Path("/sys/fs/cgroup/cgroup.controllers")
CONTROLLERS = _CONTROLLERS.read_text().split() if _CONTROLLERS.exists() else None
DAEMON_JSON = Path("/etc/docker/daemon.json")
# Debian 12's crun passes no device rules to systemd. Later versions do, and they write cgroup v2's
# rules again at an update.
CRUN_IS_OLD = run(["crun", "--version"]).stdout.startswith("crun version 1.8.")


def call(*words: str | Path) -> str:
    """Run a command, which must work; return what it printed."""
    return run(words, timeout=300.0).ok().stdout


def wait_for_docker() -> None:
    """Wait until Docker starts containers.

    Docker responds before it has its containerd again.
    """
    words = ["docker", "run", "--rm", "--network=none", BUSYBOX, "busybox", "true"]
    wait_until(lambda: run(words).status == 0, "Docker starts containers")


def restart_docker(*units: str) -> None:
    """Restart Docker's units, without a limit on the number of restarts."""
    call("systemctl", "reset-failed", "docker", "docker.socket", "containerd")
    call("systemctl", "restart", *units)
    wait_for_docker()


def set_docker(**settings: object) -> None:
    """Change Docker's settings, and restart Docker."""
    before = json.loads(DAEMON_JSON.read_text()) if DAEMON_JSON.exists() else {}
    DAEMON_JSON.write_text(json.dumps({**before, **settings}))
    restart_docker("docker")


def package() -> Path:
    """Return the Debian package of the tree that is tested."""
    architecture = call("dpkg", "--print-architecture").strip()
    [found] = CARRIED.glob(f"dist/gpuhook_*_{architecture}.deb")
    return found


def packages() -> list[Path]:
    """Return all Debian packages of the tree that is tested: gpuhook, and its additions."""
    return [package(), *sorted(CARRIED.glob("dist/gpuhook-*_all.deb"))]


def traces() -> set[str]:
    """Return each path with a name of gpuhook or of devices, where a package could leave one."""
    found = set[str]()
    for top in ("/etc", "/usr", "/var/lib", "/run"):
        for folder, folders, names in os.walk(top):
            if folder.startswith(("/var/lib/dpkg", "/var/lib/containers", "/var/lib/docker")):
                folders.clear()
            found |= {os.path.join(folder, name) for name in [*folders, *names]}
    return {path for path in found if any(each in path for each in OURS)}


def set_config(*settings: str) -> None:
    """Change /etc/gpuhook/config.toml with the command that the documentation names."""
    call("gpuhook", "config", "set", *settings)


@dataclass(frozen=True)
class Container:
    """A container that goes on running; ``engine`` begins each command line about it."""

    engine: tuple[str, ...]
    name: str

    def exec(self, *words: str) -> Result:
        """Run a command inside the container."""
        return run([*self.engine, "exec", self.name, *words])

    def opens(self) -> dict[int, str]:
        """Return the result of open() inside the container for each GPU's minor.

        GPUs that weren't requested have no nodes here. This makes them, as root in a container
        can.
        """
        script = "\n".join(
            f"p=/dev/nvidia{minor}; [ -e $p ] || p=/tmp/nvidia{minor}\n"
            f"[ -e $p ] || busybox mknod $p c {GPU_MAJOR} {minor}\n"
            f"devopen $p"
            for minor in range(GPUS)
        )
        lines = self.exec("sh", "-c", script).ok().stdout.split()[1::2]
        return dict(enumerate(lines))

    def has_what_it_asked_for(self) -> bool:
        """Return whether the container can open its GPUs; AssertionError if it can open another."""
        opened = self.opens()
        assert all(opened[minor] == DENIED for minor in REFUSED), opened
        return all(opened[minor] == ALLOWED for minor in GIVEN)

    def property(self, field: str) -> str:
        """Return a value that the engine's inspect command prints for a template."""
        return call(*self.engine, "inspect", "--format", field, self.name).strip()

    def scope(self) -> str:
        """Return the name of the systemd unit that is the container's cgroup."""
        pid = self.property("{{.State.Pid}}")
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()  # v1 has several lines
        return next(part for part in "/".join(lines).split("/") if part.endswith(".scope"))


def daemon_reload(_: Container) -> None:
    """Make systemd read its units again, and wait until the queued work is done."""
    call("systemctl", "daemon-reload")
    call("systemd-run", "--wait", "--quiet", "true")


def set_property(container: Container) -> None:
    """Make systemd write one of the cgroup's properties, and its other settings of the cgroup."""
    call("systemctl", "set-property", "--runtime", container.scope(), "CPUWeight=50")


def update(container: Container) -> None:
    """Make the engine and its low-level runtime write the cgroup's settings."""
    call(*container.engine, "update", "--cpu-shares=512", container.name)


# Actions that make the device rules of a container's cgroup be written again.
DISTURBANCES: Mapping[str, Callable[[Container], None]] = {
    "daemon-reload": daemon_reload,
    "set-property": set_property,
    "update": update,
}


def survived_by(engine: str, runtime: str) -> list[str]:
    """Return the names of DISTURBANCES that a container of this runtime survives.

    With crun 1.8 on cgroup v2, docker update fails, and the kernel ends the container because
    memory is short. This also happens if Docker itself calls crun.
    """
    fatal = CRUN_IS_OLD and (engine, runtime) == ("docker", "crun")
    return [name for name in DISTURBANCES if not (fatal and name == "update")]


def disturb(container: Container, what: str) -> bool:
    """Do one of DISTURBANCES twice; return whether the GPUs can still be opened.

    If not, check that ``gpuhook repair`` restores the access.
    """
    assert container.has_what_it_asked_for()
    for _ in range(2):
        DISTURBANCES[what](container)
    kept = container.has_what_it_asked_for()
    if not kept:
        said = call("gpuhook", "repair", container.name)
        assert "is given back" in said
        assert container.has_what_it_asked_for()
    return kept


def forget_links() -> None:
    """Remove the links in /dev/char to the driver's nodes.

    /dev itself has none of these nodes.
    """
    for link in Path("/dev/char").iterdir():
        if link.readlink().is_relative_to(DRIVER):
            link.unlink()


@contextmanager
def running(
    name: str, engine: Sequence[str], options: Sequence[str] = (), env: str = REQUEST
) -> Iterator[Container]:
    """Run a container that asks for GPUs and sleeps, until the end of the block."""
    started = Container(tuple(engine), name)
    words = [*engine, "run", "--detach", "--name", name, "--env", env, *options]
    try:
        call(*words, BUSYBOX, "busybox", "sleep", "100000")
        yield started
    finally:
        at_once = ("--time=0",) if engine[-1] == "podman" else ()
        run([*engine, "rm", "--force", *at_once, name])
