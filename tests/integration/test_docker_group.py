"""Lists of the containers' GPUs, for a user who may call Docker and isn't root."""

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.commands import Result, run
from harness.docker import Docker, dockerd
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, harden, write_config
from harness.namespaces import Namespace, privileged_options
from harness.strangers import AS_STRANGER, UID

GROUP = 65432  # the group to which dockerd gives its socket
IN_GROUP = ("setpriv", f"--reuid={UID}", f"--regid={UID}", f"--groups={GROUP}")
ASKED = "NVIDIA_VISIBLE_DEVICES=2"
PATIENCE = 1.0  # seconds that a daemon may add: half to list what runs, half to look up names


@pytest.fixture(scope="module")
def docker(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    configs: dict[str, Path],
) -> Iterator[Docker]:
    runtimes = {"gpu-py": installation.runtime}
    hooks = workspace / "docker-group-hooks"  # has NVIDIA's name, which --gpus looks for
    hooks.mkdir()
    (hooks / "nvidia-container-runtime-hook").symlink_to(installation.hook)
    env = {"GPUHOOK_CONFIG": str(configs["runc"]), "PATH": f"{hooks}:{os.environ['PATH']}"}
    more = {"group": str(GROUP)}
    with dockerd(workspace / "docker-group", host, runtimes, archive, env, more) as engine:
        status = (engine.folder / "docker.sock").stat()
        assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (GROUP, 0o660)
        yield engine


@contextmanager
def running(docker: Docker, name: str, *options: str) -> Iterator[str]:
    """Run a container during the block; yield its id."""
    words = ["run", "--detach", "--name", name, *options]
    container = docker.call(*words, image("debian"), "sleep", "1000").ok().stdout.strip()
    try:
        yield container
    finally:
        docker.call("rm", "--force", name).ok()


class User:
    """gpuhook, run by a user who is or isn't in Docker's group."""

    def __init__(self, command: Path, config: Path) -> None:
        self._command = command
        self._config = config

    def call(self, *words: str, way: tuple[str, ...] = IN_GROUP) -> Result:
        return run([*way, self._command, *words, "--config", self._config]).ok()

    def indices(self, name: str) -> list[int]:
        """Return the indices of a container's GPUs in the output of gpuhook list."""
        answer = json.loads(self.call("list", "--format=json").stdout)
        assert answer["complete"] is False
        return [each["index"] for each in answer["gpus"] if name in each["containers"]]

    def row(self, uuid: str, **more: Any) -> str:
        lines = self.call("list", **more).stdout.splitlines()
        return next(line for line in lines if uuid in line)


@pytest.fixture
def user(reachable: Path, configs: dict[str, Path]) -> User:
    return User(reachable / "gpuhook", configs["runc"])


def test_a_docker_group_user_sees_the_container_of_a_gpu(
    docker: Docker, user: User, driver: Driver
) -> None:
    ours, free = driver.gpus[2].uuid, driver.gpus[3].uuid
    with running(docker, "asking", "--runtime=gpu-py", "-e", ASKED) as container:
        assert user.indices(container) == [2]
        text = user.call("list").stdout
        assert "From the options that Docker reports for them: docker:asking" in text
        assert user.row(ours).endswith("docker:asking")
        assert user.row(free).endswith("?")
        assert user.row(ours, way=AS_STRANGER).endswith("?"), "who may not ask isn't answered"
        look = json.loads(user.call("stats", "--no-stream", "--format=json").stdout)
        [found] = [each for each in look["containers"] if each["id"] == container]
        assert [(each["index"], each["assigned"]) for each in found["devices"]] == [(2, True)]
    assert user.row(ours).endswith("?")


@pytest.mark.parametrize(
    ("options", "indices"),
    [
        (["--runtime=runc", "-e", "NVIDIA_VISIBLE_DEVICES=all"], []),
        (["--runtime=gpu-py"], []),
        (["--runtime=gpu-py", "-e", "NVIDIA_VISIBLE_DEVICES=1,4"], [1, 4]),
        (["--runtime=runc", "--gpus=2"], [0, 1]),
        (
            ["--runtime=gpu-py", "--gpus", '"device=3,5"', "-e", "NVIDIA_VISIBLE_DEVICES=all"],
            [3, 5],
        ),
        (["--runtime=runc", "--gpus=all"], [*range(8)]),
    ],
)
def test_docker_start_options_determine_the_gpus_shown(
    docker: Docker, user: User, options: list[str], indices: list[int]
) -> None:
    with running(docker, "started", *options) as container:
        assert user.indices(container) == indices


@pytest.mark.parametrize(("more", "indices"), [([], []), (privileged_options(), [6])])
def test_settings_refuse_the_environment_of_an_unprivileged_container(
    docker: Docker, reachable: Path, workspace: Path, driver: Driver, more: list[str], indices: Any
) -> None:
    """The list applies today's settings, as gpu-py would; earlier settings are unknown."""
    folder = workspace / f"hardened-{len(more)}"  # every user may enter this folder
    hardened = harden(write_config(folder, driver.root, ["runc"]))
    options = ["--runtime=gpu-py", "-e", "NVIDIA_VISIBLE_DEVICES=6", *more]
    with running(docker, "hardened", *options) as container:
        assert User(reachable / "gpuhook", hardened).indices(container) == indices


def test_a_device_given_by_path_is_listed(docker: Docker, user: User, driver: Driver) -> None:
    minor = driver.gpus[5].minor
    node = f"--device={driver.root}/dev/nvidia{minor}:/dev/nvidia{minor}"
    with running(docker, "by-path", "--runtime=runc", node) as container:
        assert user.indices(container) == [5]


def test_an_unresponsive_daemon_is_listed_as_a_question_mark(
    docker: Docker, user: User, driver: Driver
) -> None:
    assert docker.pid is not None
    with running(docker, "unheard", "--runtime=gpu-py", "-e", ASKED):
        start = time.monotonic()
        user.call("list")
        usual = time.monotonic() - start
        os.kill(docker.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            row = user.row(driver.gpus[2].uuid)
            took = time.monotonic() - start
        finally:
            os.kill(docker.pid, signal.SIGCONT)
        assert row.endswith("?")
        assert took < 2 * usual + PATIENCE
