"""Containers that ask for any device: the choice in each mode, at once and after a restart."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.bundles import CGROUP_PARENT
from harness.commands import Result, path_of, run, wait_until
from harness.containerd import containerd
from harness.docker import dockerd
from harness.driver import Driver
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.podman import hooks_dir, podman
from harness.prefork import ONE, RUNTIMES, SERVED, Site
from harness.ways import EXCLUSIVE, Place
from harness.ways import MODES as GPU_PY

from gpuhook.core.records import records

MODES = (*GPU_PY, "alone")


@pytest.mark.parametrize("mode", MODES)
@RUNTIMES
def test_the_least_used_gpu_is_given(place: Place, mode: str) -> None:
    """In each mode, the container has the chosen GPU and no other."""
    first, second = place.ask("any", mode), place.ask("ANY", mode)
    place.create(first, mode).ok()
    place.create(second, mode).ok()
    assert (place.gpus(first), place.gpus(second)) == ([0], [1])
    third = place.ask("any:2", mode)
    third.command(*look(place.driver.minors))
    env = {"GPUHOOK_CONFIG": str(place.mode(mode))}
    program = place.runtime if mode == "alone" else place.installation.runtime
    chosen = {gpu.minor for gpu in place.driver.chosen(2, 3)}
    inside = seen(third.run(program, env))
    assert inside.gpu_minors == chosen
    assert {minor for minor, what in inside.by_hand.items() if what != "EPERM"} <= chosen


@pytest.mark.parametrize("mode", MODES)
@RUNTIMES
def test_sixteen_containers_at_once_share_eight_gpus_evenly(place: Place, mode: str) -> None:
    """Each GPU gets two containers, and two again after half of the containers were killed."""
    several = [place.ask("any", mode) for _ in range(16)]
    place.create_all(several, mode)
    there = Counter(gpu for made in several for gpu in place.gpus(made))
    assert there == dict.fromkeys(range(8), 2)
    killed = [made for made in several if place.gpus(made)[0] < 4]
    for made in killed:
        place.end(made)
    place.create_all(killed, mode)
    assert Counter(gpu for made in several for gpu in place.gpus(made)) == there


@pytest.mark.parametrize("mode", MODES)
@RUNTIMES
def test_sixteen_containers_at_once_get_eight_exclusive_gpus(place: Place, mode: str) -> None:
    """Eight containers get one GPU each; each other container's error names the current users."""
    place.configure(EXCLUSIVE)
    several = [place.ask("any", mode) for _ in range(16)]
    won = [
        made
        for made, done in zip(several, place.create_at_once(several, mode), strict=True)
        if done
    ]
    assert sorted(gpu for made in won for gpu in place.gpus(made)) == [*range(8)]
    lost = [made for made in several if made not in won]
    for made in lost:
        text = (made.path / "output").read_text()
        text = text if "in use by" in text else place.errors()
        assert "The container asks for any 1 GPU; 0 of 8 are free here" in text
        assert any(
            f"0 in use by the container {holder.name}, 1 in use by" in text for holder in won
        )
        assert "and 4 more. Stop one of these containers, or ask for fewer" in text
    place.end(won[3])
    made = lost[0]
    place.delete(made)
    place.create(made, mode).ok()


@pytest.mark.parametrize(
    ("mode", "is_new"),
    [("hook", True), ("spec", True), ("cdi", True), ("hook", False), ("spec", False)],
)
@RUNTIMES
def test_a_restarted_container_gets_its_own_gpu_if_free(
    place: Place, mode: str, is_new: bool
) -> None:
    """The container gets its GPU again if that is free, and otherwise another one.

    Engines write a new config.json for each start. In mode cdi an edited config.json asks for
    nothing.
    """
    place.configure(EXCLUSIVE)
    first, second = place.ask("any", mode), place.ask("any", mode)
    plain = second.config.read_bytes()
    place.create(first, mode).ok()
    place.create(second, mode).ok()
    assert place.gpus(second) == [1]
    place.end(first)
    for _ in range(2):
        place.end(second)
        if is_new:
            second.config.write_bytes(plain)
        place.create(second, mode).ok()
        assert place.gpus(second) == [1], "GPU 0 is free as well, and 1 was its own"
    place.end(second)
    other = place.ask("1", mode)
    place.create(other, mode).ok()
    if is_new:
        second.config.write_bytes(plain)
    second.command(*look(place.driver.minors))
    env = {"GPUHOOK_CONFIG": str(place.mode(mode))}
    inside = seen(second.run(place.installation.runtime, env))
    [gpu] = place.driver.chosen(0)
    assert inside.gpu_minors == {gpu.minor}
    assert {minor for minor, what in inside.by_hand.items() if what != "EPERM"} <= {gpu.minor}


@ONE
def test_a_failed_start_leaves_no_record(place: Place) -> None:
    place.configure(EXCLUSIVE)
    made = place.ask("any:8")
    made.change(lambda spec: spec.update(hooks={"createRuntime": [{"path": "/bin/false"}]}))
    assert place.create(made).status != 0
    wait_until(lambda: place.records() == {}, "it has no record")
    place.create(place.ask("any:8")).ok()


@ONE
def test_any_requests_and_exclusive_named_requests_respect_each_other(place: Place) -> None:
    place.configure(EXCLUSIVE)
    named = place.ask("0")
    place.create(named).ok()
    made = place.ask("any:7")
    place.create(made).ok()
    assert place.gpus(made) == [*range(1, 8)]
    refused = place.create(place.ask("3"))
    assert f"in use by the container {made.name}" in refused.stderr
    place.end(named)
    refused = place.create(place.ask("any:2"))
    assert "asks for any 2 GPUs; 1 of 8 is free here, and nvidia.com/gpu is" in refused.stderr


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("any,0", "asks for 'any' and for '0' of NVIDIA's devices, and any can't be combined"),
        ("any,any:2", "asks for 'any' and for 'any:2' of NVIDIA's devices"),
        ("any:0", "'any:0' isn't a number of devices"),
        ("any:02", "'any:02' isn't a number of devices"),
        ("any:", "'any:' isn't a number of devices"),
        ("any:x", "'any:x' isn't a number of devices"),
        ("any:9", "asks for any 9 GPUs, and this host has 8 that can be used"),
    ],
)
@pytest.mark.parametrize("mode", ["hook", "cdi"])
@ONE
def test_an_invalid_any_request_is_refused(place: Place, word: str, says: str, mode: str) -> None:
    refused = place.create(place.ask(word, mode), mode)
    assert refused.status != 0
    assert says in refused.stderr


@ONE
def test_explain_and_list_show_choices_for_any_without_reserving(place: Place) -> None:
    """explain shows what a container would get if it started now, and reserves nothing."""
    place.configure(EXCLUSIVE)
    first = place.ask("any")
    place.create(first).ok()
    config = place.mode("hook")
    words: list[str | Path] = [place.installation.command, "explain", "--config", config]
    for _ in range(2):
        done = run([*words, "-e", "NVIDIA_VISIBLE_DEVICES=any:2", "--format", "json"]).ok()
        found = json.loads(done.stdout)
        assert found["selected"] == [gpu.uuid for gpu in place.driver.chosen(1, 2)]
    text = run([*words, "-e", "NVIDIA_VISIBLE_DEVICES=any:2"]).ok().stdout
    assert "Devices for any are chosen when a container starts" in text
    done = run([*words, "-e", "NVIDIA_VISIBLE_DEVICES=any:8"])
    assert done.status == 1
    assert f"0 in use by the container {first.name}" in done.stdout
    words = [place.installation.command, "list", "--config", config]
    [line] = [line for line in run(words).ok().stdout.splitlines() if line.startswith("0 ")]
    assert first.name in line


@RUNTIMES
def test_a_prefork_server_chooses_the_least_used_gpus(site: Site) -> None:
    site.stand()
    site.asks("NVIDIA_VISIBLE_DEVICES=any:2")
    inside = seen(site.run())
    assert site.served
    chosen = {gpu.minor for gpu in site.driver.chosen(0, 1)}
    assert inside.gpu_minors == chosen
    assert {minor for minor, what in inside.by_hand.items() if what != "EPERM"} == chosen


@ONE
def test_sixteen_containers_at_once_share_gpus_with_a_prefork_server(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and ordinary Python processes choose by the same records."""
    past = time.time() - 10
    config = place.mode("hook")
    for path in (config, config.parent):
        os.utime(path, (past, past))
    monkeypatch.setattr(place, "mode", lambda _: config)

    def is_served() -> bool:
        made = place.ask("any")
        place.create(made).ok()
        place.end(made)
        return re.search(SERVED, made.config.read_text()) is not None

    wait_until(is_served, "a prefork server serves containers")
    several = [place.ask("any") for _ in range(16)]
    place.create_all(several)
    there = Counter(gpu for made in several for gpu in place.gpus(made))
    assert there == dict.fromkeys(range(8), 2)
    assert any(re.search(SERVED, made.config.read_text()) for made in several)


# Engines ------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """Docker, podman or containerd, and its containers that ask for any of eight exclusive GPUs."""

    start: Callable[[str], Result]
    id_of: Callable[[str], str]
    kill: Callable[[str], object]
    again: Callable[[str], Result]
    remove: Callable[[str], object]


@pytest.fixture(scope="module")
def exclusive(workspace: Path, driver: Driver) -> Path:
    config = write_config(workspace / "any-etc", driver.root, ["runc"])
    config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{EXCLUSIVE}"))
    return config


def of_docker(
    stack: ExitStack,
    folder: Path,
    host: Namespace,
    runtime: Path,
    archive: Path,
    env: dict[str, str],
) -> Engine:
    one = stack.enter_context(dockerd(folder, host, {"gpu-py": runtime}, archive, env))
    words = ["run", "--detach", "--runtime=gpu-py", "--env=NVIDIA_VISIBLE_DEVICES=any"]

    def wait_and_kill(name: str) -> None:
        one.call("kill", name).ok()
        one.call("wait", name).ok()

    return Engine(
        lambda name: one.call(*words, f"--name={name}", image("debian"), "sleep", "1000"),
        lambda name: one.call("inspect", "--format={{.Id}}", name).ok().stdout.strip(),
        wait_and_kill,
        lambda name: one.call("start", name),
        lambda name: one.call("rm", "--force", name),
    )


def of_podman(
    stack: ExitStack,
    folder: Path,
    host: Namespace,
    runtime: Path,
    archive: Path,
    hooks: Path | None,
) -> Engine:
    one = stack.enter_context(podman(folder, host, runtime, archive, hooks=hooks))
    words = ["run", "--detach", "--network=none", "--pids-limit=0"]
    words += ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    words += [f"--cgroup-parent={CGROUP_PARENT}", "--env=NVIDIA_VISIBLE_DEVICES=any"]

    def wait_and_kill(name: str) -> None:
        one.call("kill", name).ok()
        one.call("wait", name).ok()

    return Engine(
        lambda name: one.call(*words, f"--name={name}", image("debian"), "sleep", "1000"),
        lambda name: one.call("inspect", "--format={{.Id}}", name).ok().stdout.strip(),
        wait_and_kill,
        lambda name: one.call("start", name),
        lambda name: one.call("rm", "--force", "--time=0", name),
    )


def of_containerd(
    stack: ExitStack,
    folder: Path,
    host: Namespace,
    runtime: Path,
    archive: Path,
    env: dict[str, str],
) -> Engine:
    one = stack.enter_context(containerd(folder, host, runtime, archive, env))
    words: list[str | Path] = ["run", "--detach", f"--runc-binary={runtime}"]
    words += ["--env=NVIDIA_VISIBLE_DEVICES=any", image("debian")]

    def end(name: str) -> None:
        one.call("tasks", "kill", "--signal=9", name)
        wait_until(lambda: one.call("tasks", "delete", name).status == 0, "its task is gone")

    def remove(name: str) -> None:
        one.call("tasks", "delete", "--force", name)
        one.call("containers", "delete", name)

    return Engine(
        lambda name: one.call(*words, name, "sleep", "1000"),
        lambda name: name,
        end,
        lambda name: one.call("tasks", "start", "--detach", name),
        remove,
    )


@pytest.fixture(
    params=[
        "docker", "podman", "podman-crun", "podman-hook", "podman-hook-crun", "podman-precreate",
        "containerd", "containerd-crun",
    ]
)  # fmt: skip
def exclusive_engine(
    request: pytest.FixtureRequest,
    workspace: Path,
    host: Namespace,
    v1: Namespace,
    installation: Installation,
    archive: Path,
    exclusive: Path,
    tmp_path: Path,
) -> Iterator[Engine]:
    folder, runtime = workspace / f"any-{request.param}", installation.runtime
    name = request.param.removesuffix("-crun")
    space, low_level = (host, "runc") if name == request.param else (v1, "crun")
    env = {"GPUHOOK_CONFIG": str(exclusive)}
    with ExitStack() as stack:
        stack.callback(exclusive.write_text, exclusive.read_text())
        exclusive.write_text(exclusive.read_text().replace('"runc"', f'"{low_level}"'))
        if name == "docker":
            yield of_docker(stack, folder, space, runtime, archive, env)
        elif name == "containerd":
            yield of_containerd(stack, folder, space, runtime, archive, env)
        elif name == "podman":
            program = tmp_path / "gpu-py"
            program.write_text(f'#!/bin/sh\nGPUHOOK_CONFIG={exclusive} exec {runtime} "$@"\n')
            program.chmod(0o755)
            yield of_podman(stack, folder, space, program, archive, None)
        else:
            stage = name.partition("-")[2].replace("hook", "prestart")
            args = ("--config", str(exclusive), stage)
            hooks = hooks_dir(tmp_path / "hooks", installation.hook, *args, stage=stage)
            yield of_podman(stack, folder, space, path_of(low_level), archive, hooks)


def test_engine_containers_get_exclusive_gpus_and_keep_them_on_restart(
    exclusive_engine: Engine, exclusive: Path, driver: Driver
) -> None:
    """Sixteen containers start at once; a killed one gets its GPU again, or another one."""
    engine, state = exclusive_engine, str(exclusive.parent / "state")
    names = [f"any{number}-{os.urandom(4).hex()}" for number in range(16)]

    def errors() -> str:
        """Return the saved errors, because crun doesn't show the output of hooks."""
        saved = exclusive.parent / "state/errors.log"
        return saved.read_text() if saved.exists() else ""

    def gpus() -> dict[str, str]:
        found = {each["id"]: each for each in records.read_all(state)}
        ids = {name: engine.id_of(name) for name in started}
        return {name: found[ids[name]]["given"][0]["selected"][0] for name in started}

    try:
        with ThreadPoolExecutor(len(names)) as pool:
            done = dict(zip(names, pool.map(engine.start, names), strict=True))
        started = [name for name, result in done.items() if result.status == 0]
        assert len(started) == 8, {name: str(result) for name, result in done.items()}
        assert sorted(gpus().values()) == sorted(gpu.uuid for gpu in driver.gpus)
        for name in [name for name in names if name not in started]:
            assert "any 1 GPU; 0 of 8 are free here" in done[name].stderr + errors()
        before = gpus()
        for name in (started[5], started[2]):
            engine.kill(name)
        for name in (started[2], started[5]):
            engine.again(name).ok()
        assert gpus() == before
        engine.kill(started[0])
        another = f"any-{os.urandom(4).hex()}"
        names.append(another)
        engine.start(another).ok()
        started.append(another)
        assert engine.again(started[0]).status != 0, "its own has another container now"
        engine.kill(started[1])
        engine.again(started[0]).ok()
        own, other = started.pop(0), started.pop(0)
        started.append(own)
        after = gpus()
        assert (after[another], after[own]) == (before[own], before[other])
    finally:
        for name in names:
            engine.remove(name)
        wait_until(lambda: records.read_all(state) == [], "no container is left")
