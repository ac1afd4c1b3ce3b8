"""Memory limits of GPUs with complete engines, and after kills at any moment."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness.commands import Result, path_of
from harness.containerd import containerd
from harness.docker import Docker, dockerd
from harness.driver import Driver, simulate
from harness.engines import Engine
from harness.images import CUDA_PROBE, image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace, may_raise_memlock, namespace
from harness.podman import hooks_dir, podman
from test_memory_limits import EIGHT, NINE, ONE, OPTIONS, Place, limited, place, told

__all__ = ["limited", "place"]

KILLS = int(os.environ.get("GPUHOOK_TEST_KILLS", "50"))
DEBIAN = image("debian")
PROBE = (CUDA_PROBE, "9")
GPU = "NVIDIA_VISIBLE_DEVICES=0"
LIMIT = "GPUHOOK_DEVICE_MEMORY=8GiB"
# With cgroup v2, crun needs CAP_SYS_RESOURCE.
ENGINES = ["docker", "containerd", "podman", *(["podman-crun"] if may_raise_memlock() else [])]
# On a hybrid host, cgroup v2 has no cpu controller, which ctr needs for shares. ctr also doesn't
# mount cgroups in a container, and the simulated driver keeps its limits there.
CTR = ("--cpu-shares=0", "--mount=type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=ro")


@pytest.fixture(scope="module")
def entered() -> Iterator[Namespace]:
    with namespace("v2") as found:
        yield found


@pytest.fixture(scope="module")
def machine(workspace: Path, installation: Installation) -> Driver:
    return simulate(installation, workspace / "driver-615-engines", *OPTIONS)


@contextmanager
def engine_of(
    name: str,
    folder: Path,
    installation: Installation,
    driver: Driver,
    archive: Path,
    at: Namespace,
) -> Iterator[Engine]:
    """Start an engine whose containers get GPUs of a simulated machine with memory limits."""
    low_level = "crun" if name.endswith("crun") else "runc"
    config = write_config(folder.with_name(f"{folder.name}-etc"), driver.root, [low_level])
    env = {"GPUHOOK_CONFIG": str(config)}
    if name.startswith("docker"):
        with dockerd(folder, at, {"gpu-py": installation.runtime}, archive, env) as docker:
            yield docker
    elif name.startswith("containerd"):
        with containerd(folder, at, installation.runtime, archive, env) as found:
            yield found
    else:
        words = ("--config", str(config), "prestart")
        hooks = hooks_dir(folder.with_name(f"{folder.name}-hooks"), installation.hook, *words)
        with podman(folder, at, path_of(low_level), archive, hooks=hooks) as alone:
            yield alone


@pytest.mark.parametrize("name", ENGINES)
def test_a_limit_is_set_by_every_engine(
    name: str,
    workspace: Path,
    installation: Installation,
    machine: Driver,
    archive: Path,
    entered: Namespace,
) -> None:
    folder = workspace / f"limits-{name}"
    with engine_of(name, folder, installation, machine, archive, entered) as engine:
        options = CTR if name == "containerd" else ()
        done = engine.run(DEBIAN, *PROBE, env=[GPU, LIMIT], options=options)
        assert told(done) == EIGHT, done
        assert done.status != 0
        assert told(engine.run(DEBIAN, *PROBE, env=[GPU], options=options))[1:] == NINE
        nothing = [GPU, "GPUHOOK_DEVICE_MEMORY=0"]
        refused = engine.run(DEBIAN, "echo", "started", env=nothing, options=options)
        assert refused.status != 0
        assert "started" not in refused.stdout
        if isinstance(engine, Docker):
            stays(engine)


def test_an_image_for_which_podman_makes_cgroups_writable_is_refused(
    workspace: Path, installation: Installation, machine: Driver, archive: Path, entered: Namespace
) -> None:
    """podman also does so for a command /sbin/init, whatever program that is."""
    folder = workspace / "limits-writable"
    with engine_of("podman", folder, installation, machine, archive, entered) as engine:
        config = folder.with_name(f"{folder.name}-etc") / "config.toml"
        config.write_text(f'{config.read_text()}[gpuhook.limits]\nmost-device-memory = "8GiB"\n')
        assert told(engine.run(DEBIAN, *PROBE, env=[GPU])) == EIGHT
        away = 'mkdir /sys/fs/cgroup/away && echo $$ >/sys/fs/cgroup/away/cgroup.procs && exec "$@"'
        words = ("sh", "-c", away, "sh", *PROBE)
        refused = engine.run(DEBIAN, *words, env=[GPU], options=["--systemd=always"])
        assert refused.status != 0
        assert told(refused) == []
        assert "may write to cgroups, which are mounted at" in refused.stderr, refused


def stays(engine: Docker) -> None:
    """Check that a limit persists after docker update and a restart."""
    words = ("--detach", "--runtime=gpu-py", "-e", GPU, "-e", LIMIT, DEBIAN, "sleep", "999")
    name = engine.call("run", *words).ok().stdout.strip()
    for action in (("update", "--memory=512m", "--memory-swap=-1"), ("restart", "--time=0")):
        engine.call(*action, name).ok()
        assert told(engine.call("exec", name, *PROBE)) == EIGHT, action


@ONE
@pytest.mark.parametrize("helper", ["", "helper = false\n"], ids=["helper", "alone"])
def test_kills_leave_no_container_without_its_limit(place: Place, helper: str) -> None:
    config = place.configured(own=helper)
    env = {**os.environ, "GPUHOOK_CONFIG": str(config)}
    chance = random.Random(615)  # noqa: S311 - so that it is the same every time
    made = place.made(GPU, LIMIT)
    words = (place.installation.runtime, "run", "--bundle", made.path, made.name)
    command = made.namespace.enter(*words, cwd=made.path)

    def wrote(name: str) -> list[str]:
        """Return the output of a container's program, which is in the upper layer."""
        path = made.path / "upper" / name
        return told(Result((), 0, path.read_text() if path.exists() else "", ""))

    made.command("sh", "-c", f"{CUDA_PROBE} 9 >/seen 2>&1")
    begun = time.monotonic()
    subprocess.run(command, env=env, cwd=made.path, check=False, capture_output=True)
    whole = time.monotonic() - begun
    assert wrote("seen") == EIGHT
    ran = 0
    for number in range(KILLS):
        made.command("sh", "-c", f"{CUDA_PROBE} 9 >/seen-{number} 2>&1")
        process = subprocess.Popen(
            command, env=env, cwd=made.path, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(chance.uniform(0, whole))
        victims = of_session(process.pid)
        if victims:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(victims), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        place.namespace.run(place.runtime, "delete", "--force", made.name)
        process.wait(5)
        found = wrote(f"seen-{number}")
        ran += bool(found)
        assert found == EIGHT[: len(found)], "a program that was killed may have said less"
    assert 0 < ran < KILLS, "some were killed before the program ran, and some after"


def of_session(leader: int) -> list[int]:
    """Return the processes of a session.

    The container's own process belongs to the session until it starts another one.
    """
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                if os.getsid(int(name)) == leader:
                    found.append(int(name))
    return found
