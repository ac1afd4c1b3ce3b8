"""gpuhook explain for real containers and images: the devices that they got or would get."""

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.bundles import CGROUP_PARENT
from harness.commands import Result, run
from harness.containerd import Containerd
from harness.docker import Docker
from harness.driver import Driver, simulate
from harness.images import image
from harness.installation import Installation, write_config
from harness.podman import Podman

SLEEP = ("sleep", "1000")
FOR_PODMAN = (
    "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--pids-limit=-1",
    f"--cgroup-parent={CGROUP_PARENT}", "--stop-timeout=0",
)  # fmt: skip

Explain = Callable[..., Result]


@pytest.fixture
def explain(installation: Installation, configs: dict[str, Path]) -> Explain:
    """A function that runs gpuhook explain."""

    def explain(*words: str, **environment: str) -> Result:
        fixed = (installation.command, "explain", "--config", configs["runc"])
        return run([*fixed, *words], env=environment)

    return explain


def report(done: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.ok().stdout)
    return found


def facts(done: Result, title: str) -> list[str]:
    """Return the texts that gpuhook prints after a title."""
    lines = [line.partition(":") for line in done.ok().stdout.splitlines()]
    return [text.strip() for before, _, text in lines if before == title]


@contextmanager
def running(engine: Docker | Podman, *options: str) -> Iterator[tuple[str, str]]:
    """Start a container; yield its name and its id."""
    name = f"explain-{uuid.uuid4().hex[:8]}"
    more = () if isinstance(engine, Docker) else FOR_PODMAN
    words = ("run", "--detach", "--name", name, *more, *options, image("debian"), *SLEEP)
    try:
        yield name, engine.call(*words).ok().stdout.strip()
    finally:
        engine.call("rm", "--force", name)


@pytest.mark.parametrize("title", ["docker", "podman"])
def test_a_running_container_is_explained_with_its_gpus(
    title: str, request: pytest.FixtureRequest, explain: Explain, driver: Driver
) -> None:
    engine = request.getfixturevalue({"docker": "docker", "podman": "podman_runtime"}[title])
    options = ["--runtime=gpu-py"] if title == "docker" else []
    gpu = driver.gpus[3].uuid
    with running(engine, *options, "-e", "NVIDIA_VISIBLE_DEVICES=3") as (name, container):
        done = explain(name)
        [who] = facts(done, "Container")
        assert who.startswith(f"{title}:{name}, id {container[:12]}, process ")
        assert facts(done, "Was given") == [f"3 ({gpu}) of nvidia.com/gpu: its environment said 3"]
        [gets] = facts(done, "Gets")
        assert f"GPU 3 ({gpu})" in gets
        assert len(done.stdout.splitlines()) <= 30
        assert "in order:" in explain(name, "-v").ok().stdout
        for word in (container, container[:12]):
            found = report(explain(word, "--format=json"))
            assert found["container"]["engine_name"] == name
            assert [each["selected"] for each in found["container"]["given"]] == [[gpu]]
            assert (found["selected"], found["container"]["missing_nodes"]) == ([gpu], [])


def test_a_running_container_without_gpus_is_explained_with_the_reason(
    docker: Docker, explain: Explain
) -> None:
    """gpuhook reads the reason from config.json in the folder where the shim was started."""
    with running(docker, "--runtime=gpu-py") as (name, _):
        done = explain(name)
        assert facts(done, "Was given") == ["nothing"]
        assert facts(done, "Because") == ["NVIDIA_VISIBLE_DEVICES isn't set"]


def test_a_docker_container_not_started_by_gpu_py_is_explained(
    docker: Docker, explain: Explain
) -> None:
    with running(docker, "--runtime=runc", "-e", "NVIDIA_VISIBLE_DEVICES=3") as (name, _):
        done = explain(name)
        found = report(explain(name, "--format=json"))["container"]
    [who] = facts(done, "Started by")
    assert who == (
        "runc, not gpu-py, so it was given nothing: add --runtime=gpu-py, or make that the "
        "default: gpuhook install --engine docker --set-default"
    )
    assert facts(done, "Devices now") == []
    assert facts(done, "With gpu-py")[0].startswith("it would get the devices below (request in ")
    assert (found["engine"], found["runtime"], found["given"]) == ("docker", "runc", [])


def test_a_podman_container_not_started_by_gpu_py_is_explained(
    podman_runtime: Podman, explain: Explain
) -> None:
    alone = replace(podman_runtime, runtime=Path("/usr/sbin/runc"))
    with running(alone, "-e", "NVIDIA_VISIBLE_DEVICES=3") as (name, _):
        [who] = facts(explain(name), "Started by")
    assert who.startswith(
        "/usr/sbin/runc, not gpu-py, so it was given nothing: add --runtime=gpu-py"
    )
    assert who.endswith("gpuhook install --engine podman --set-default")


@pytest.mark.parametrize("ours", [True, False])
def test_a_containerd_container_is_explained_with_or_without_gpu_py(
    ours: bool, containerd_runc: Containerd, explain: Explain, driver: Driver
) -> None:
    name = f"explain-{uuid.uuid4().hex[:8]}"
    binary = [f"--runc-binary={containerd_runc.binary}"] if ours else []
    words = ("run", "--detach", *binary, "--env", "NVIDIA_VISIBLE_DEVICES=3", image("debian"), name)
    try:
        containerd_runc.call(*words, *SLEEP).ok()
        done = explain(name)
        found = report(explain(name, "--format=json"))["container"]
    finally:
        containerd_runc.call("task", "kill", "--signal=9", name)
        containerd_runc.call("task", "rm", "--force", name)
        containerd_runc.call("container", "rm", name)
    if ours:
        assert [each["selected"] for each in found["given"]] == [[driver.gpus[3].uuid]]
        assert facts(done, "Started by") == []
        return
    assert (found["engine"], found["runtime"], found["given"]) == ("containerd", "runc", [])
    [who] = facts(done, "Started by")
    assert who == (
        "runc, not gpu-py, so it was given nothing: add --runtime=gpu-py (nerdctl) or "
        "--runc-binary=gpu-py (ctr)"
    )


def test_a_stopped_container_is_refused(docker: Docker, explain: Explain) -> None:
    with running(docker) as (name, _):
        docker.call("kill", name).ok()
        docker.call("wait", name).ok()
        done = explain(name)
    assert done.status == 1
    assert f"Error (container): '{name}' isn't a running container" in done.stdout


SETS = "NVIDIA_VISIBLE_DEVICES=2"


def test_an_image_of_docker_is_explained_with_overriding_options(
    docker: Docker, explain: Explain, driver: Driver
) -> None:
    name = f"explain-{uuid.uuid4().hex[:8]}:1"
    with running(docker) as (container, _):
        docker.call("commit", "--change", f"ENV {SETS}", container, name).ok()
    try:
        of_image = report(explain("--image", name, "--format=json"))
        assert of_image["selected"] == [driver.gpus[2].uuid]
        changed = explain("--image", name, "-e", "NVIDIA_VISIBLE_DEVICES=5", "--format=json")
        assert report(changed)["selected"] == [driver.gpus[5].uuid]
        without = explain("--image", name, "-e", "NVIDIA_VISIBLE_DEVICES", "--format=json")
        assert report(without)["selected"] == []
        gpus = explain("--image", name, "--gpus", "1", "--format=json")
        assert report(gpus)["selected"] == [driver.gpus[0].uuid]
    finally:
        docker.call("rmi", name)


def test_an_image_with_musl_gets_a_hint(docker: Docker, explain: Explain, tmp_path: Path) -> None:
    """The driver's programs are in the container, but they can't start without glibc."""
    name = f"explain-{uuid.uuid4().hex[:8]}:1"
    folder = tmp_path / "image/lib"
    folder.mkdir(parents=True)
    (folder / f"ld-musl-{os.uname().machine}.so.1").touch()
    run(["tar", "-C", folder.parent, "-cf", tmp_path / "image.tar", "."]).ok()
    docker.call("import", tmp_path / "image.tar", name).ok()
    try:
        asks = ("-e", "NVIDIA_VISIBLE_DEVICES=0")
        [hint] = facts(explain("--image", name, *asks), "Hint")
        assert hint.startswith("The image has musl and no glibc")
        assert report(explain("--image", name, *asks, "--format=json"))["hints"] == [hint]
        assert facts(explain("--image", image("debian"), *asks), "Hint") == []
        none = ("-e", "NVIDIA_VISIBLE_DEVICES=void")
        assert facts(explain("--image", name, *none), "Hint") == []
    finally:
        docker.call("rmi", name)


def test_an_image_for_another_architecture_gets_a_warning(
    docker: Docker, explain: Explain, tmp_path: Path
) -> None:
    """The name of the architecture comes from the engine, or from a program in the image."""
    name = f"explain-{uuid.uuid4().hex[:8]}:1"
    other, number = {"x86_64": ("aarch64", 183), "aarch64": ("x86_64", 62)}[os.uname().machine]
    program = tmp_path / "image/bin/sh"
    program.parent.mkdir(parents=True)
    head = b"\x7fELF\2\1\1" + bytes(9) + b"\2\0" + number.to_bytes(2, "little")
    program.write_bytes(head.ljust(64, b"\0"))
    run(["tar", "-C", tmp_path / "image", "-cf", tmp_path / "image.tar", "."]).ok()
    docker.call("import", tmp_path / "image.tar", name).ok()
    try:
        asks = ("-e", "NVIDIA_VISIBLE_DEVICES=0")
        said = report(explain("--image", name, *asks, "--format=json"))["warnings"]
        [warning] = [text for text in said if text.startswith(f"The image is for {other} and ")]
        assert warning in facts(explain("--image", name, *asks), "Warning")
        plain = report(explain("--image", image("debian"), *asks, "--format=json"))["warnings"]
        assert [text for text in plain if text.startswith("The image is for ")] == []
    finally:
        docker.call("rmi", name)


def test_an_image_of_podman_is_explained_from_its_store(
    podman_runtime: Podman, explain: Explain, driver: Driver, tmp_path: Path
) -> None:
    """gpuhook uses the store that podman's own settings name."""
    folder = podman_runtime.folder
    info = json.loads(podman_runtime.call("info", "--format=json").ok().stdout)
    settings = tmp_path / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "{info["store"]["graphDriverName"]}"\n'
        f'graphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
    )
    name = f"localhost/explain-{uuid.uuid4().hex[:8]}:1"
    with running(podman_runtime) as (container, _):
        podman_runtime.call("commit", "--change", f"ENV {SETS}", container, name).ok()
    try:
        words = ("--image", name, "--format=json")
        done = explain(*words, CONTAINERS_STORAGE_CONF=str(settings))
        assert report(done)["selected"] == [driver.gpus[2].uuid]
    finally:
        podman_runtime.call("rmi", "--force", name)


def test_an_unknown_image_is_reported(explain: Explain) -> None:
    done = explain("--image", "example.com/no/such:1")
    assert done.status == 1
    assert "Neither Docker nor podman on this host has the image" in done.stdout


def test_lost_gpus_and_a_missing_library_are_reported(
    installation: Installation, tmp_path: Path
) -> None:
    made = simulate(installation, tmp_path / "driver", "--gpus=4", "--lost=1,2")
    for library in made.root.rglob("libnvidia-encode.so*"):
        library.unlink()
    run(["ldconfig", "-r", made.root]).ok()
    config = write_config(tmp_path / "etc", made.root, ["runc"])
    words: list[str | Path] = [installation.command, "explain", "--config", config, "--gpus"]
    done = run([*words, '"device=0","capabilities=video"'])
    assert facts(done, "Lost") == ["GPUs 1, 2 have fallen off the bus (lost)"]
    assert facts(done, "Warning") == ["video lacks libnvidia-encode"]
    refused = run([*words, "device=1"])
    assert refused.status == 1
    assert "Error (lost-device): GPU 1 has fallen off the bus (lost)" in refused.stdout
