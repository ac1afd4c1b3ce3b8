"""Docker's containers keep their GPUs, whatever writes their cgroups, and never open another."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from booted import DRIVER, GIVEN, Container, call, running, set_config, wait_for_docker
from harness.images import image

LIBRARIES = f"LD_LIBRARY_PATH={DRIVER}/usr/lib/x86_64-linux-gnu"


@pytest.fixture(scope="module", params=["runc", "crun"])
def container(docker: tuple[str], request: pytest.FixtureRequest) -> Iterator[Container]:
    """A container with two GPUs that the low-level runtime of that name has made."""
    set_config(f"nvidia-container-runtime.runtimes={request.param}")
    settings = Path("/etc/docker/daemon.json")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "live-restore": True}))
    call("systemctl", "reload", "docker")
    with running(f"gpus-{request.param}", docker, ["--runtime=gpu-py"]) as started:
        yield started


def test_from_the_package_to_a_container(docker: tuple[str]) -> None:
    words = ["run", "--rm", "--runtime=gpu-py", "--env=NVIDIA_VISIBLE_DEVICES=0,2"]
    said = call(*docker, *words, image("debian"), "nvidia-smi", "-L").splitlines()
    assert [line.split(":")[0] for line in said] == ["GPU 0", "GPU 1"]
    assert said == [
        line.replace("GPU 2", "GPU 1")
        for line in call("env", LIBRARIES, f"{DRIVER}/usr/bin/nvidia-smi", "-L").splitlines()
        if line.startswith(("GPU 0", "GPU 2"))
    ]


def test_it_has_the_gpus_that_it_asked_for_in_dockers_own_profile(container: Container) -> None:
    assert container.has_what_it_asked_for()
    confined = container.exec("busybox", "cat", "/proc/1/attr/current").ok().stdout
    assert confined == "docker-default (enforce)\n"


def test_what_crun_tells_systemd_is_wider_than_what_it_allows(container: Container) -> None:
    """For a node of minor 0 crun has systemd allow the major; its own program refuses the rest."""
    rules = call("systemctl", "show", "--property=DeviceAllow", "--value", container.scope())
    assert ("char-195 rw" in rules) == container.name.endswith("crun"), rules
    assert container.has_what_it_asked_for()


def restart(unit: str) -> None:
    call("systemctl", "restart", unit)
    wait_for_docker()


DISTURBANCES: dict[str, Callable[[Container], object]] = {
    "daemon-reload": lambda _: call("systemctl", "daemon-reload"),
    "set-property": lambda one: call("systemctl", "set-property", one.scope(), "CPUWeight=50"),
    "docker update": lambda one: call("docker", "update", "--cpu-shares=512", one.name),
    "dockerd restarted": lambda _: restart("docker"),
    "containerd restarted": lambda _: restart("containerd"),
}


@pytest.mark.parametrize("what", DISTURBANCES)
def test_access_outlives(what: str, container: Container) -> None:
    pid = container.property("{{.State.Pid}}")
    DISTURBANCES[what](container)
    assert container.has_what_it_asked_for()
    assert container.property("{{.State.Pid}}") == pid


def test_the_control_loses_it_and_gets_it_back(container: Container) -> None:
    """Rules that systemd alone knows: without gpu-py's in config.json all this proves nothing."""
    rules = ("DeviceAllow=", "DevicePolicy=strict")
    call("systemctl", "set-property", "--runtime", container.scope(), *rules)
    assert not container.has_what_it_asked_for()
    assert f"{len(GIVEN)}" in call("gpuhook", "repair", container.name)
    assert container.has_what_it_asked_for()


def test_nothing_was_denied_by_apparmor(container: Container) -> None:
    messages = call("journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat")
    assert [line for line in messages.splitlines() if 'apparmor="DENIED"' in line] == []
