"""Uses of Docker in addition to docker run."""

import json

import pytest
from harness.docker import Docker
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.inside import look, seen
from harness.namespaces import privileged_options
from harness.snapshot import nothing_left

DEBIAN = image("debian")
TWO = ["NVIDIA_VISIBLE_DEVICES=0,2"]
DOCKERS = pytest.mark.parametrize("name", ["docker", "docker_v2"])


@pytest.fixture
def engine(request: pytest.FixtureRequest, name: str) -> Docker:
    found: Docker = request.getfixturevalue(name)
    return found


MEMORY = "--memory=64m"  # the only one of these options that cgroups know
OPTIONS = (
    "--read-only", "--cap-drop=ALL --cap-add=MKNOD", "--security-opt=no-new-privileges",
    "--security-opt=seccomp=unconfined", "--ipc=host", "--pid=host", "--network=host",
    "--tmpfs=/tmp", "--init", "--hostname=elsewhere --workdir=/var", MEMORY,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"), [*(("docker", each) for each in OPTIONS), ("docker_v2", MEMORY)]
)
def test_run_options_leave_the_chosen_gpus_unchanged(
    engine: Docker, driver: Driver, options: str
) -> None:
    with nothing_left(driver.root, pid=engine.pid):
        done = engine.run(DEBIAN, *look(driver.minors), env=TWO, options=options.split())
    inside = seen(done)
    minors = {gpu.minor for gpu in driver.chosen(0, 2)}
    assert inside.gpu_minors == minors
    assert {minor for minor, opened in inside.by_hand.items() if opened == "ENXIO"} == minors


@DOCKERS
def test_an_ordinary_user_can_use_the_gpus(engine: Docker, driver: Driver) -> None:
    options = ["--user=1000:1000"]
    script = "id -u; nvidia-smi -L; gpuhook-cuda-probe"
    done = engine.run(DEBIAN, "sh", "-c", script, env=TWO, options=options).ok()
    lines = done.stdout.splitlines()
    assert lines[0] == "1000"
    assert lines[1:3] == lines_of_nvidia_smi(driver.chosen(0, 2))
    assert lines[3] == "CUDA devices: 2"


@DOCKERS
def test_a_privileged_container_gets_only_the_requested_nodes(
    engine: Docker, driver: Driver
) -> None:
    """A privileged container may open any device, but only the requested nodes are in it."""
    inside = seen(engine.run(DEBIAN, *look(driver.minors), env=TWO, options=privileged_options()))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
    assert set(inside.by_hand.values()) == {"ENXIO"}


@DOCKERS
def test_a_container_keeps_its_gpus_across_exec_and_restart(engine: Docker, driver: Driver) -> None:
    options = ["--detach", "--runtime=gpu-py", "-e", TWO[0]]
    name = engine.call("run", *options, DEBIAN, "sleep", "1000").ok().stdout.strip()
    try:
        for action in (["exec", name, "true"], ["restart", "--time=0", name]):
            engine.call(*action).ok()
            done = engine.call("exec", name, *look(driver.minors))
            assert seen(done).gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
            done = engine.call("exec", name, "nvidia-smi", "-L").ok()
            assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
            engine.call("exec", name, "sh", "-c", "rm -f /dev/by-hand-*").ok()
    finally:
        engine.call("rm", "--force", name).ok()


@DOCKERS
def test_a_stopped_and_started_container_keeps_its_gpus(engine: Docker, driver: Driver) -> None:
    create = ["create", "--runtime=gpu-py", "-e", TWO[0], DEBIAN, "nvidia-smi", "-L"]
    name = engine.call(*create).ok().stdout.strip()
    try:
        for _ in range(3):
            done = engine.call("start", "--attach", name).ok()
            assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
    finally:
        engine.call("rm", "--force", name).ok()


@DOCKERS
def test_update_keeps_the_gpus(engine: Docker, driver: Driver) -> None:
    """docker update rewrites the device rules of config.json."""
    options = ["--detach", "--runtime=gpu-py", "-e", TWO[0]]
    name = engine.call("run", *options, DEBIAN, "sleep", "1000").ok().stdout.strip()
    try:
        engine.call("update", "--memory=128m", "--memory-swap=128m", name)
        nodes = [f"/dev/nvidia{gpu.minor}" for gpu in driver.chosen(0, 2)]
        done = engine.call("exec", name, "devopen", *nodes).ok()
        assert done.stdout.splitlines() == [f"{node} ENXIO" for node in nodes]
    finally:
        engine.call("rm", "--force", name).ok()


@DOCKERS
def test_run_options_override_the_images_variable(engine: Docker, driver: Driver) -> None:
    """CUDA's images set NVIDIA_VISIBLE_DEVICES=all; docker run -e has precedence."""
    create = ["create", DEBIAN, "true"]
    name = engine.call(*create).ok().stdout.strip()
    change = "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility"
    engine.call("commit", "--change", change, name, "localhost/asks:test").ok()
    engine.call("rm", name).ok()
    done = engine.run("localhost/asks:test", "nvidia-smi", "-L").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)
    done = engine.run("localhost/asks:test", "nvidia-smi", "-L", env=TWO).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
    done = engine.run("localhost/asks:test", "ls", "/dev", env=["NVIDIA_VISIBLE_DEVICES=void"]).ok()
    assert "nvidia" not in done.stdout


@DOCKERS
def test_eight_containers_at_once_get_their_own_gpus(engine: Docker, driver: Driver) -> None:
    names = []
    try:
        for gpu in driver.gpus:
            options = ["--runtime=gpu-py", "-e", f"NVIDIA_VISIBLE_DEVICES={gpu.uuid}"]
            create = engine.call("create", *options, DEBIAN, "nvidia-smi", "-L")
            names.append(create.ok().stdout.strip())
        engine.call("start", *names).ok()
        for gpu, name in zip(driver.gpus, names, strict=True):
            assert engine.call("wait", name).ok().stdout.strip() == "0"
            assert engine.call("logs", name).ok().stdout.splitlines() == lines_of_nvidia_smi([gpu])
    finally:
        engine.call("rm", "--force", *names).ok()


@DOCKERS
def test_container_without_gpu_is_the_same_with_and_without_gpu_py(engine: Docker) -> None:
    script = """
    busybox find /dev /etc /run /usr/lib /opt 2>/dev/null | sort
    busybox env | busybox grep -v HOSTNAME
    busybox awk '{print $5, $6}' /proc/self/mountinfo
    busybox grep -E 'Cap|NoNewPrivs|Seccomp' /proc/self/status
    """
    ours = engine.run(DEBIAN, "sh", "-c", script).ok()
    theirs = engine.run(DEBIAN, "sh", "-c", script, runtime="runc").ok()
    assert ours.stdout == theirs.stdout


@DOCKERS
def test_hook_that_docker_has_is_kept(engine: Docker) -> None:
    """Docker's prestart hook sets up the network, and without it ``inspect`` shows no network."""
    options = ["--detach", "--runtime=gpu-py", "-e", TWO[0], "--network=none"]
    name = engine.call("run", *options, DEBIAN, "sleep", "1000").ok().stdout.strip()
    try:
        [found] = json.loads(engine.call("inspect", name).ok().stdout)
        assert found["HostConfig"]["Runtime"] == "gpu-py"
        assert found["NetworkSettings"]["SandboxKey"]
        engine.call("exec", name, "true").ok()
    finally:
        engine.call("rm", "--force", name).ok()
