"""GPU memory limits that persist whatever writes the cgroup.

The cgroup is written by systemd, engines and low-level runtimes. The machine's own cgroup v2
is used, with its controllers. The driver is simulated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from booted import (
    CRUN_IS_OLD,
    DISTURBANCES,
    DRIVER,
    REQUEST,
    Container,
    call,
    set_config,
    survived_by,
)
from harness.commands import run
from harness.images import CUDA_PROBE, image

LIMITED = Path("/srv/gpus-615")
LIMIT = "GPUHOOK_DEVICE_MEMORY=8GiB"
OPTIONS = ("--gpus=3", "--model=H100", "--set=driver-version=615.10.01")
PODMAN = ("--network=none", "--runtime=gpu-py")
# Each engine with a low-level runtime, and the way its containers see their cgroups.
KINDS = {
    "docker, runc": ("docker", "runc", ("--runtime=gpu-py",)),
    "docker, crun": ("docker", "crun", ("--runtime=gpu-py",)),
    "docker, crun, the host's cgroups": (
        "docker", "crun", ("--runtime=gpu-py", "--cgroupns=host"),
    ),
    "podman, crun": ("podman", "crun", (*PODMAN, "--cgroupns=private")),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def machine(docker: tuple[str], podman: tuple[str]) -> Iterator[None]:
    """A machine whose driver enforces memory limits."""
    call("gpuhook", "simulate", LIMITED, *OPTIONS)
    set_config(f"nvidia-container-cli.root={LIMITED}")
    yield
    set_config(f"nvidia-container-cli.root={DRIVER}", "nvidia-container-runtime.runtimes=runc,crun")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, str, tuple[str, ...]]:
    return KINDS[request.param]


@pytest.fixture
def limited(kind: tuple[str, str, tuple[str, ...]]) -> Iterator[Container]:
    """A container with two GPUs and a limit of 8 GiB for each, which it must not remove."""
    engine, runtime, options = kind
    set_config(f"nvidia-container-runtime.runtimes={runtime}", "gpuhook.limits.required=true")
    try:
        with sleeping(engine, *options, "--env", LIMIT) as started:
            yield started
    finally:
        set_config("gpuhook.limits.required=false")


@contextmanager
def sleeping(engine: str, *options: str) -> Iterator[Container]:
    started = Container((engine,), f"limits-{engine}")
    words = [engine, "run", "--detach", "--name", started.name, "--env", REQUEST, *options]
    try:
        call(*words, image("debian"), "sleep", "100000")
        yield started
    finally:
        at_once = ("--time=0",) if engine == "podman" else ()
        run([engine, "rm", "--force", *at_once, started.name])


def allocates(container: Container) -> list[str]:
    """Return the probe's lines on visible GPU memory and on the result of allocating 9 GiB."""
    lines = container.exec(CUDA_PROBE, "9").stdout.splitlines()
    return [line for line in lines if "memory" in line or "allocated" in line]


def has_no_room(container: Container) -> bool:
    """Tell whether cgroups can't be created below a container's own cgroup."""
    pid = container.property("{{.State.Pid}}")
    path = Path(f"/proc/{pid}/cgroup").read_text().partition("::")[2].strip()
    return Path(f"/sys/fs/cgroup{path}/cgroup.max.descendants").read_text() == "0\n"


EIGHT = ["CUDA memory: 8192 MiB of 8192 MiB", "CUDA allocated: 8 GiB of 9 GiB"]


def restart(container: Container) -> None:
    """Have the engine restart a container."""
    call(*container.engine, "restart", "--time=0", container.name)


CHANGES: dict[str, Callable[[Container], None]] = {**DISTURBANCES, "restart": restart}


def test_a_memory_limit_survives_cgroup_changes_and_restarts(
    kind: tuple[str, str, tuple[str, ...]], limited: Container
) -> None:
    assert allocates(limited) == EIGHT
    for name in [*survived_by(*kind[:2]), "restart"]:
        for _ in range(2):
            CHANGES[name](limited)
        if name == "update" and kind[0] == "podman" and not CRUN_IS_OLD:
            # At podman update, crun removes access to the GPUs (test_podman.py), but keeps the
            # memory limit. If the limit was lost, repair would report it.
            said = call("gpuhook", "repair", limited.name)
            assert "is given back" in said
            assert "the memory limit" not in said
        assert allocates(limited) == EIGHT, name
        assert has_no_room(limited), name


def test_root_in_a_user_namespace_cannot_make_a_cgroup(docker: tuple[str]) -> None:
    """A container without seccomp and AppArmor may mount; systemd mounts v2 with nsdelegate.

    A further mount without nsdelegate removes that option (cgroup_apply_root_flags in the
    kernel), as crun does for a container with the host's cgroups.
    """
    call("mount", "-o", "remount,nsdelegate", "/sys/fs/cgroup")
    set_config("gpuhook.limits.required=true")
    free = ("--security-opt=seccomp=unconfined", "--security-opt=apparmor=unconfined")
    try:
        with sleeping("docker", "--runtime=gpu-py", "--env", LIMIT, *free) as container:
            done = container.exec("owncgroup").ok()
    finally:
        set_config("gpuhook.limits.required=false")
    assert done.stdout.endswith("mount OK\nbelow EAGAIN\nspace EPERM\n"), done


def test_a_container_without_a_memory_limit_can_use_all_memory(docker: tuple[str]) -> None:
    """This control with the same driver proves that 9 GiB are available without a limit."""
    with sleeping("docker", "--runtime=gpu-py") as container:
        assert allocates(container)[1:] == ["CUDA allocated: 9 GiB of 9 GiB"]
