"""Docker containers with gpu-py, which keep their GPUs when other programs write their cgroups."""

import json
from collections.abc import Iterator

import pytest
from booted import (
    ALLOWED,
    CONTROLLERS,
    DISTURBANCES,
    DRIVER,
    REQUEST,
    Container,
    call,
    disturb,
    forget_links,
    restart_docker,
    running,
    set_docker,
)
from harness.commands import run
from harness.images import image

LIBRARIES = f"LD_LIBRARY_PATH={DRIVER}/usr/lib/x86_64-linux-gnu"
HOOK = ("--gpus", '"device=0,2"')  # selects the same GPUs as REQUEST
DRIVERS = ("systemd", "cgroupfs")
# With cgroupfs, a container's cgroup isn't a systemd unit, so set-property can't be used.
CASES = [(name, what) for name in DRIVERS for what in DISTURBANCES]
CASES.remove(("cgroupfs", "set-property"))
EACH_CASE = pytest.mark.parametrize(
    ("cgroup_driver", "what"), CASES, indirect=["cgroup_driver"], scope="module"
)
# Cases in which a container that only the hook serves loses its GPUs. With cgroup v2 without
# controllers, docker update writes nothing.
LOST = {("systemd", what) for what in DISTURBANCES if what != "update" or CONTROLLERS is None}


@pytest.fixture(scope="module")
def cgroup_driver(docker: tuple[str], request: pytest.FixtureRequest) -> Iterator[str]:
    """A cgroup driver of Docker; Docker calls the hook for --gpus."""
    call("gpuhook", "install", "--engine", "docker", "--gpus")
    set_docker(**{"live-restore": True, "exec-opts": [f"native.cgroupdriver={request.param}"]})
    assert call("docker", "info", "--format={{.CgroupDriver}}").strip() == request.param
    yield request.param
    set_docker(**{"live-restore": False, "exec-opts": []})
    call("gpuhook", "install", "--engine", "docker", "--no-gpus")


@pytest.fixture
def container(cgroup_driver: str, docker: tuple[str]) -> Iterator[Container]:
    """A container with two GPUs that gpu-py provides."""
    forget_links()
    options = ["--runtime=gpu-py", "--cap-add=MKNOD", "--network=none"]
    with running(f"gpus-{cgroup_driver}", docker, options) as started:
        yield started


@pytest.fixture
def control(cgroup_driver: str, docker: tuple[str]) -> Iterator[Container]:
    """A container with two GPUs that only the hook provides."""
    with running(
        f"hook-{cgroup_driver}", docker, [*HOOK, "--network=none"], "NAME=value"
    ) as started:
        yield started


def test_the_installed_package_gives_requested_gpus_to_a_container(docker: tuple[str]) -> None:
    words = ["run", "--rm", "--runtime=gpu-py", "--env", REQUEST]
    said = call(*docker, *words, image("debian"), "nvidia-smi", "-L").splitlines()
    assert [line.split(":")[0] for line in said] == ["GPU 0", "GPU 1"]
    assert said == [
        line.replace("GPU 2", "GPU 1")
        for line in call("env", LIBRARIES, f"{DRIVER}/usr/bin/nvidia-smi", "-L").splitlines()
        if line.startswith(("GPU 0", "GPU 2"))
    ]


@EACH_CASE
def test_device_access_survives_cgroup_changes(
    cgroup_driver: str, what: str, container: Container
) -> None:
    assert disturb(container, what)


@EACH_CASE
def test_device_access_by_the_hook_alone_is_lost_where_expected(
    cgroup_driver: str, what: str, control: Container
) -> None:
    assert disturb(control, what) == ((cgroup_driver, what) not in LOST)


@pytest.mark.parametrize("cgroup_driver", ["systemd"], indirect=True, scope="module")
@pytest.mark.parametrize("what", ["daemon-reload", "set-property"])
def test_an_attached_device_survives_cgroup_changes(
    cgroup_driver: str, what: str, container: Container
) -> None:
    """Systemd writes the scope's rules again; a detached device stays denied."""
    call("gpuhook", "attach", container.name, "nvidia.com/gpu=1")
    for _ in range(2):
        opened = container.opens()
        assert [minor for minor in opened if opened[minor] == ALLOWED] == [0, 1, 2]
        DISTURBANCES[what](container)
    opened = container.opens()
    assert [minor for minor in opened if opened[minor] == ALLOWED] == [0, 1, 2]
    call("gpuhook", "detach", container.name, "nvidia.com/gpu=1")
    assert container.has_what_it_asked_for()
    DISTURBANCES[what](container)
    assert container.has_what_it_asked_for()


@pytest.mark.parametrize("cgroup_driver", DRIVERS, indirect=True, scope="module")
@pytest.mark.parametrize("unit", ["docker", "containerd"])
def test_device_access_survives_a_restart_of_the_engine(unit: str, container: Container) -> None:
    pid = container.property("{{.State.Pid}}")
    restart_docker(unit)
    assert container.has_what_it_asked_for()
    assert container.property("{{.State.Pid}}") == pid


def test_the_doctor_warns_about_missing_links_until_refresh_makes_them(docker: tuple[str]) -> None:
    call("gpuhook", "install", "--engine", "docker", "--cdi")
    for _ in range(10):  # a service of the package may have created the links again
        forget_links()
        is_warned = findings()["dev-char"] == "warning"
        told = call("gpuhook", "refresh", "--verbose").splitlines()
        created = [line for line in told if line.startswith("Created the link /dev/char/")]
        if is_warned and created:
            break
    assert is_warned
    assert told == [told[0], *created] != [told[0]]
    assert f"{len(created)} links created in /dev/char" in told[0]
    assert findings()["dev-char"] == "ok"
    call("gpuhook", "install", "--engine", "docker", "--no-cdi")


def findings() -> dict[str, str]:
    """Return the doctor's status for each check."""
    said = json.loads(run(["gpuhook", "doctor", "--format=json"]).stdout)
    return {each["check"]: each["status"] for each in said["findings"]}
