"""Limits that [gpuhook.containers] raises, as programs in real containers see them."""

import json
import resource
from pathlib import Path

import pytest
from harness.bundles import Bundle, Spec
from harness.cdi import generate, give
from harness.commands import Result
from harness.containerd import containerd
from harness.docker import dockerd
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace, may_raise_memlock
from harness.podman import podman

SETTINGS = '[gpuhook.containers]\nmemlock = "unlimited"\nstack = "64MiB"\nshm-size = "1GiB"\n'
LOOK = (
    "sh",
    "-c",
    """echo memlock $(ulimit -l); echo stack $(ulimit -s)
    echo shm $(df -k /dev/shm | tail -n 1 | tr -s ' ' | cut -d ' ' -f 2)""",
)
GPU = "NVIDIA_VISIBLE_DEVICES=0"


def memlock() -> str:
    """Return the memlock limit that root can set on this host."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    infinite = may_raise_memlock() or hard == resource.RLIM_INFINITY
    return "unlimited" if infinite else str(hard // 1024)


def limits(done: Result) -> dict[str, str]:
    return dict(line.split() for line in done.ok().stdout.splitlines())


def raised() -> dict[str, str]:
    return {"memlock": memlock(), "stack": str(64 << 10), "shm": str(1 << 20)}


def settings(folder: Path, driver: Driver, runtime: str, mode: str = "hook") -> Path:
    more = f'mode = "{mode}"\n{SETTINGS}'
    return write_config(folder, driver.root, [runtime], more)


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_a_container_with_devices_gets_the_raised_limits(
    bundle: Bundle,
    installation: Installation,
    low_level: tuple[str, Namespace],
    driver: Driver,
    mode: str,
) -> None:
    mount = {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"}
    options = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]

    def add(spec: Spec) -> None:
        others = [each for each in spec["mounts"] if each["destination"] != "/dev/shm"]
        spec["mounts"] = [*others, {**mount, "options": options}]

    bundle.change(add)
    config = settings(bundle.path / "etc", driver, low_level[0], mode)
    env = {"GPUHOOK_CONFIG": str(config)}
    bundle.command(*LOOK)
    before = limits(bundle.run(installation.runtime, env))
    assert before["shm"] == str(64 << 10), "it has no device"
    bundle.environ(GPU)
    words = ("explain", "--config", config, "--format", "json", "--bundle", bundle.path)
    explained = bundle.call(installation.command, *words).ok()
    operations = json.loads(explained.stdout)["operations"]
    assert limits(bundle.run(installation.runtime, env)) == raised()
    found = {each["limit"]: each["value"] for each in operations if each["kind"] == "raise-limit"}
    assert found["/dev/shm"] == "1GiB"
    assert found["RLIMIT_STACK"] == "64MiB"


def resizing(bundle: Bundle, driver: Driver, runtime: str) -> Path:
    """Return a config.toml that raises limits, and make the container print its own limits."""
    bundle.command(*LOOK)
    return settings(bundle.path / "etc", driver, runtime)


def test_the_hook_alone_resizes_only_dev_shm(
    bundle: Bundle, installation: Installation, low_level: tuple[str, Namespace], driver: Driver
) -> None:
    """The runtime sets the process's limits after the hook, so the hook only resizes /dev/shm."""
    config = resizing(bundle, driver, low_level[0])
    bundle.prestart(installation.hook, config)
    before = limits(bundle.run(low_level[0]))
    assert before["shm"] == str(64 << 10), "it has no device"
    bundle.environ(GPU)
    assert limits(bundle.run(low_level[0])) == {**before, "shm": raised()["shm"]}
    words = ("explain", "--config", config, "--hook-alone", "--format", "json", "--bundle")
    told = json.loads(bundle.call(installation.command, *words, bundle.path).ok().stdout)
    done, undone = (
        {each["limit"] for each in told[key] if each["kind"] == "raise-limit"}
        for key in ("operations", "undone")
    )
    assert done == {"/dev/shm"}
    assert "RLIMIT_STACK" in undone
    assert undone <= {"RLIMIT_MEMLOCK", "RLIMIT_STACK"}


def test_a_cdi_spec_alone_resizes_only_dev_shm(
    bundle: Bundle, installation: Installation, low_level: tuple[str, Namespace], driver: Driver
) -> None:
    config = resizing(bundle, driver, low_level[0])
    before = limits(bundle.run(low_level[0]))
    give(bundle, generate(installation, config, bundle.path / "cdi"), "0")
    assert limits(bundle.run(low_level[0])) == {**before, "shm": raised()["shm"]}


@pytest.mark.parametrize("size", ["32m", "1500m"])
def test_the_hook_leaves_a_dev_shm_of_another_size_unchanged(
    bundle: Bundle,
    installation: Installation,
    low_level: tuple[str, Namespace],
    driver: Driver,
    size: str,
) -> None:
    def change(spec: Spec) -> None:
        [mount] = [each for each in spec["mounts"] if each["destination"] == "/dev/shm"]
        mount["options"] = [f"size={size}" if "size" in each else each for each in mount["options"]]

    bundle.change(change)
    config = resizing(bundle, driver, low_level[0])
    bundle.prestart(installation.hook, config)
    bundle.environ(GPU)
    assert limits(bundle.run(low_level[0]))["shm"] == str(int(size[:-1]) << 10)


def test_doctor_names_containers_with_the_default_dev_shm_size(
    bundle: Bundle, installation: Installation, low_level: tuple[str, Namespace], driver: Driver
) -> None:
    def add(spec: Spec) -> None:
        others = [each for each in spec["mounts"] if each["destination"] != "/dev/shm"]
        mount = {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"}
        spec["mounts"] = [*others, {**mount, "options": ["nosuid", "size=65536k"]}]

    bundle.change(add)
    config = write_config(bundle.path / "etc", driver.root, [low_level[0]])
    words = (installation.command, "doctor", "--config", config, "--format", "json")

    def found() -> list[str]:
        every = json.loads(bundle.call(*words).stdout)["findings"]
        return [each["message"] for each in every if each["check"] == "shared-memory"]

    bundle.command("sleep", "999")
    bundle.environ(GPU)
    assert found() == []
    bundle.detach(installation.runtime, config)
    [message] = found()
    assert message.startswith("One container with devices has only 64 MiB of /dev/shm")
    assert bundle.name[:12] in message


@pytest.mark.protects(
    "shm-of-engines",
    "only an engine's own tmpfs for /dev/shm is resized",
    instead="return mount is not None",
)
@pytest.mark.parametrize("options", ["size=32m", "size=64m"])
def test_a_tmpfs_volume_at_dev_shm_is_unchanged(
    bundle: Bundle,
    installation: Installation,
    low_level: tuple[str, Namespace],
    driver: Driver,
    options: str,
) -> None:
    """A user's volume may have any size, and only an engine's own tmpfs has the name shm."""
    folder = bundle.path / "volume"
    folder.mkdir()
    name = "other" if options == "size=64m" else "shm"
    bundle.call("mount", "-t", "tmpfs", "-o", options, name, folder).ok()
    try:
        mount = {"destination": "/dev/shm", "type": "bind", "source": str(folder)}

        def add(spec: Spec) -> None:
            others = [each for each in spec["mounts"] if each["destination"] != "/dev/shm"]
            spec["mounts"] = [*others, {**mount, "options": ["rbind"]}]

        bundle.change(add)
        config = settings(bundle.path / "etc", driver, low_level[0])
        bundle.command(*LOOK)
        bundle.environ(GPU)
        done = limits(bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)}))
    finally:
        bundle.call("umount", folder)
    assert int(done["shm"]) * 1024 == int(options[5:-1]) << 20


def wrapper(folder: Path, installation: Installation, config: Path) -> Path:
    """Return a runtime script that sets the environment for engines that pass none on."""
    folder.mkdir(exist_ok=True)
    runtime = folder / "runtime"
    runtime.write_text(
        f'#!/bin/sh\nexport GPUHOOK_CONFIG={config}\nexec {installation.runtime} "$@"\n'
    )
    runtime.chmod(0o755)
    return runtime


def test_podman_containers_with_devices_get_the_raised_limits(
    workspace: Path, host: Namespace, installation: Installation, archive: Path, driver: Driver
) -> None:
    """podman mounts a tmpfs on the host, and then at /dev/shm; all containers of a pod share it."""
    folder = workspace / "raised-podman"
    config = settings(workspace / "raised-podman-etc", driver, "runc")
    runtime = wrapper(workspace / "raised-podman-bin", installation, config)
    debian = image("debian")
    with podman(folder, host, runtime, archive) as engine:
        found = limits(engine.run(debian, *LOOK, env=(GPU,)))
        assert found["shm"] == raised()["shm"]
        assert found["stack"] == raised()["stack"]
        assert limits(engine.run(debian, *LOOK))["shm"] != raised()["shm"], "no device"
        larger = limits(engine.run(debian, *LOOK, env=(GPU,), options=("--shm-size=2g",)))
        assert larger["shm"] == str(2 << 20)
        volume = ("--volume=/srv:/dev/shm",)
        other = limits(engine.run(debian, *LOOK, env=(GPU,), options=volume))
        assert other["shm"] != raised()["shm"]


@pytest.mark.parametrize("ipc", ["private", "shareable"])
def test_docker_containers_with_devices_get_the_raised_limits(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    driver: Driver,
    ipc: str,
) -> None:
    config = settings(workspace / f"raised-docker-{ipc}", driver, "runc")
    runtimes, env = {"gpu-py": installation.runtime}, {"GPUHOOK_CONFIG": str(config)}
    with dockerd(workspace / f"raised-{ipc}", host, runtimes, archive, env) as engine:
        debian, options = image("debian"), (f"--ipc={ipc}",)
        found = limits(engine.run(debian, *LOOK, env=(GPU,), options=options))
        assert (found["shm"], found["stack"]) == (raised()["shm"], raised()["stack"])
        assert limits(engine.run(debian, *LOOK, options=options))["shm"] == str(64 << 10)


def test_containerd_containers_with_devices_get_the_raised_limits(
    workspace: Path, host: Namespace, installation: Installation, archive: Path, driver: Driver
) -> None:
    config = settings(workspace / "raised-containerd-etc", driver, "runc")
    env = {"GPUHOOK_CONFIG": str(config)}
    folder = workspace / "raised-containerd"
    with containerd(folder, host, installation.runtime, archive, env) as engine:
        found = limits(engine.run(image("debian"), *LOOK, env=(GPU,)))
    assert (found["shm"], found["stack"]) == (raised()["shm"], raised()["stack"])
