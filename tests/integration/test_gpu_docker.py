"""gpu-docker in front of a real docker and a real dockerd."""

import shlex
from collections.abc import Callable

import pytest
from harness.commands import Result, run
from harness.docker import Docker
from harness.driver import Driver
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation

GpuDocker = Callable[..., Result]


@pytest.fixture
def gpu_docker(docker: Docker, installation: Installation) -> GpuDocker:
    """A function that calls gpu-docker with NV_ settings in its environment."""
    server = f"docker -H unix://{docker.folder}/docker.sock"
    common = {"NV_DOCKER": server, "DOCKER_CONFIG": str(docker.folder / "client")}

    def call(*words: str, **settings: str) -> Result:
        return run([installation.bin / "gpu-docker", *words], env={**common, **settings})

    return call


@pytest.mark.parametrize("gpus", ["0,2", "0 2", "UUIDS"])
@pytest.mark.parametrize("verb", [("run",), ("container", "run")])
def test_run_gives_the_gpus_that_nv_gpu_names(
    gpu_docker: GpuDocker, driver: Driver, gpus: str, verb: tuple[str, ...]
) -> None:
    chosen = driver.chosen(0, 2)
    setting = gpus.replace("UUIDS", " ".join(gpu.uuid for gpu in chosen))
    words = (*verb, "--rm", image("debian"), *look(driver.minors))
    inside = seen(gpu_docker(*words, NV_GPU=setting))
    assert inside.gpu_minors == {gpu.minor for gpu in chosen}


def test_a_created_container_gets_the_gpu_when_started(
    gpu_docker: GpuDocker, driver: Driver
) -> None:
    words = ("create", image("debian"), *look(driver.minors))
    name = gpu_docker(*words, NV_GPU=driver.gpus[4].uuid).ok().stdout.strip()
    try:
        inside = seen(gpu_docker("start", "--attach", name))
        assert inside.gpu_minors == {driver.gpus[4].minor}
    finally:
        gpu_docker("rm", "--force", name).ok()


def test_without_nv_gpu_the_image_selects_gpus(gpu_docker: GpuDocker, driver: Driver) -> None:
    inside = seen(gpu_docker("run", "--rm", image("debian"), *look(driver.minors)))
    assert inside.gpu_minors == set()


def test_explicit_docker_options_override_nv_gpu(gpu_docker: GpuDocker, driver: Driver) -> None:
    words = ("run", "--rm", "-e", "NVIDIA_VISIBLE_DEVICES=1", image("debian"))
    inside = seen(gpu_docker(*words, *look(driver.minors), NV_GPU="0"))
    assert inside.gpu_minors == {driver.gpus[1].minor}
    other = ("run", "--rm", "--runtime=runc", image("debian"))
    assert seen(gpu_docker(*other, *look(driver.minors), NV_GPU="0")).gpu_minors == set()


def test_arguments_are_passed_unchanged(gpu_docker: GpuDocker) -> None:
    odd = ["two words", "", "'\"$HOME`id`\\", "a\nb", "run"]
    script = 'for word do printf "%s|" "$word"; done'
    words = ("run", "--rm", image("debian"), "sh", "-c", script, "sh", *odd)
    assert gpu_docker(*words).ok().stdout == "".join(f"{word}|" for word in odd)


def test_an_unknown_gpu_is_refused_by_docker(gpu_docker: GpuDocker) -> None:
    done = gpu_docker("run", "--rm", image("debian"), "true", NV_GPU="99").failed()
    assert "99" in done.stderr


def test_other_commands_are_passed_to_docker_unchanged(
    gpu_docker: GpuDocker, docker: Docker
) -> None:
    for words in (("ps", "-a"), ("run", "--no-such-option"), ("no-such-command",), ("--help",)):
        through, direct = gpu_docker(*words), docker.call(*words)
        assert (through.status, through.stdout, through.stderr) == (
            direct.status,
            direct.stdout,
            direct.stderr,
        )


def test_a_context_called_run_is_not_taken_for_the_command(
    docker: Docker, installation: Installation
) -> None:
    env = {"DOCKER_CONFIG": str(docker.folder / "client-with-context"), "NV_DEBUG": "1"}
    host = f"host=unix://{docker.folder}/docker.sock"
    run(["docker", "context", "create", "run", "--docker", host], env=env).ok()
    program = str(installation.bin / "gpu-docker")
    done = run([program, "--context", "run", "ps", "--quiet"], env=env).ok()
    assert done.stderr == f"+ {shlex.join(['docker', '--context', 'run', 'ps', '--quiet'])}\n"
