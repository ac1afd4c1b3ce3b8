"""Docker containers with the configuration of GPUHOOK_CONFIG, in the places where it counts.

The variable counts in the environment of the program that starts gpu-py;
docs/engines/docker.md names that program.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from booted import BUSYBOX, CARRIED, REQUEST, call, restart_docker
from harness.commands import run, wait_until

DEFAULT, NAMED = Path("/etc/gpuhook/config.toml"), Path("/srv/named.toml")
LOG = Path("/run/named.log")  # written only with the named configuration
VARIABLE = f"GPUHOOK_CONFIG={NAMED}"
# A second dockerd in addition to the system's; it starts its own containerd.
SOCKET, OWN = "unix:///run/own.sock", "own-docker"
OWN_DOCKERD = (
    "dockerd", "--host", SOCKET, "--data-root=/var/lib/own", "--exec-root=/run/own",
    "--pidfile=/run/own.pid", "--bridge=none", "--iptables=false", "--ip6tables=false",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def named(docker: tuple[str]) -> Iterator[None]:
    """A configuration that only the variable refers to."""
    shutil.copy(DEFAULT, NAMED)
    call("gpuhook", "config", "set", "--config", NAMED, f"nvidia-container-cli.debug={LOG}")
    yield
    NAMED.unlink()


def counts(*docker: str) -> bool:
    """Tell whether a new container of an engine uses the named configuration."""
    LOG.unlink(missing_ok=True)
    words = ["run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST, BUSYBOX]
    said = call(*docker, *words, "busybox", "ls", "/dev")
    assert "nvidia2" in said.split()
    return LOG.exists()


def restart(*units: str) -> None:
    call("systemctl", "daemon-reload")
    restart_docker(*units)


@contextmanager
def variable_of(unit: str) -> Iterator[None]:
    """Set the variable as the page says, with the file that systemctl edit writes."""
    drop_in = Path(f"/etc/systemd/system/{unit}.service.d/override.conf")
    drop_in.parent.mkdir(parents=True)
    try:
        drop_in.write_text(f"[Service]\nEnvironment={VARIABLE}\n")
        restart(unit)
        yield
    finally:
        shutil.rmtree(drop_in.parent)
        restart(unit)


@pytest.mark.parametrize(("unit", "does"), [("containerd", True), ("docker", False)])
def test_the_variable_counts_only_in_the_unit_of_a_separate_containerd(
    unit: str, does: bool
) -> None:
    with variable_of(unit):
        assert counts("docker") == does
    assert not counts("docker")


def test_the_variable_of_dockerd_counts_for_its_own_containerd() -> None:
    """No containerd has the system's socket or is set by --containerd, so dockerd starts one."""
    own = ("docker", "--host", SOCKET)
    call("systemctl", "stop", "docker.socket", "docker", "containerd")
    try:
        Path("/run/containerd/containerd.sock").unlink(missing_ok=True)
        call("systemd-run", f"--unit={OWN}", f"--setenv={VARIABLE}", *OWN_DOCKERD)
        wait_until(lambda: run([*own, "info"]).status == 0, "it answers")
        call(*own, "load", "--input", CARRIED / "images.tar")
        assert counts(*own)
    finally:
        run(["systemctl", "stop", OWN])
        run(["rm", "-rf", "/var/lib/own"]).ok()
        restart("containerd", "docker.socket", "docker")
