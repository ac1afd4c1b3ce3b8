"""Exclusive devices, with each way in which a container gets them."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.bundles import Bundle
from harness.commands import Result, run, wait_until
from harness.docker import Docker, dockerd
from harness.driver import Driver
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, open_kinds, write_config
from harness.namespaces import Namespace
from harness.podman import Podman, podman
from harness.prefork import ONE, RUNTIMES
from harness.ways import EXCLUSIVE, MODES, WAYS, Place

from gpuhook.core.cdi import apply, folders


@pytest.fixture
def place(place: Place) -> Place:
    """A configuration with exclusive GPUs."""
    place.configure(EXCLUSIVE)
    return place


def is_held(place: Place, done: Result, holder: Bundle, way: str) -> None:
    """Assert that a container was refused because another one has its device."""
    assert done.status != 0
    says = done.stderr if "in use by" in done.stderr else place.errors()
    assert f"in use by the container {holder.name}" in says
    if way in MODES:
        assert "in use by" in done.stderr, "gpu-py says so before it calls the low-level runtime"


@pytest.mark.parametrize("way", WAYS)
@RUNTIMES
def test_an_exclusive_device_is_refused_until_its_container_ends(place: Place, way: str) -> None:
    """A container holds the device from create until its process is gone, even if it was killed."""
    first, second = place.ask("1", way), place.ask("1", way)
    place.create(first, way).ok()
    is_held(place, place.create(second, way), first, way)
    assert [*place.records()] == [first.name]
    other = place.ask("2", way)
    place.create(other, way).ok()
    place.kill(first)
    place.delete(second)
    place.create(second, way).ok()
    assert set(place.records()) == {second.name, other.name}


@ONE
@pytest.mark.parametrize("theirs", WAYS)
def test_a_leased_device_is_refused_to_every_other_injection_way(place: Place, theirs: str) -> None:
    first = place.ask("1", theirs)
    place.create(first, theirs).ok()
    for ours in (way for way in WAYS if way != theirs):
        is_held(place, place.create(place.ask("1", ours), ours), first, ours)
    assert [*place.records()] == [first.name]
    place.kill(first)
    place.create(place.ask("1", ours), ours).ok()


@ONE
def test_a_request_for_all_is_refused_while_one_device_is_held(
    place: Place, driver: Driver
) -> None:
    first = place.ask("3")
    place.create(first).ok()
    is_held(place, place.create(place.ask("all")), first, "hook")
    place.kill(first)
    everything = place.ask("all")
    place.create(everything).ok()
    is_held(place, place.create(place.ask(driver.gpus[0].uuid)), everything, "hook")
    place.create(place.ask("none")).ok()


@ONE
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_a_restarted_container_gets_its_device_again(place: Place, mode: str) -> None:
    made = place.ask("1", mode)
    for _ in range(3):
        place.create(made, mode).ok()
        made.call(place.runtime, "start", made.name).ok()
        assert place.create(place.ask("1", mode), mode).status != 0
        place.delete(made).ok()


@ONE
def test_a_container_that_cannot_be_created_leaves_no_record(place: Place) -> None:
    """This is so if our own hook fails, and if a later hook fails."""
    made = place.ask("1")
    made.change(lambda spec: spec.update(hooks={"createRuntime": [{"path": "/bin/false"}]}))
    assert place.create(made).status != 0
    broken = place.ask("1")
    broken.call("sh", "-c", "rm -rf etc/ld.so.cache; mkdir etc/ld.so.cache", cwd=broken.root).ok()
    assert place.create(broken).status != 0
    wait_until(lambda: place.records() == {}, "no container has a record")
    place.create(place.ask("1")).ok()


@ONE
def test_list_and_explain_show_the_holder_of_a_device(place: Place) -> None:
    first = place.ask("1")
    place.create(first).ok()
    config = place.mode("hook")
    words: list[str | Path] = [place.installation.command, "list", "--config", config]
    [line] = [line for line in run(words).ok().stdout.splitlines() if line.startswith("1 ")]
    assert first.name in line
    words = [place.installation.command, "explain", "--config", config]
    done = run([*words, "-e", "NVIDIA_VISIBLE_DEVICES=1"])
    assert done.status == 1
    assert "Error (held): nvidia.com/gpu=GPU-" in done.stdout
    assert f"in use by the container {first.name}" in done.stdout
    run([*words, "-e", "NVIDIA_VISIBLE_DEVICES=2"]).ok()


@pytest.mark.protects(
    "unseen-told",
    "a container list warns that containers of other pid namespaces may be missing",
    instead='problems = (_LATE if not look.is_whole else "",)',
)
@ONE
def test_commands_in_another_pid_namespace_end_no_lease(place: Place) -> None:
    """A tool's container with the state folder, but without --pid=host, is such a case."""
    first = place.ask("1")
    place.create(first).ok()
    config = place.mode("hook")
    outside: list[str | Path] = ["unshare", "--pid", "--fork", "--mount-proc"]
    outside.append(place.installation.command)
    done = run([*outside, "list", "--config", config]).ok()
    assert "Containers outside of this pid namespace may have devices" in done.stderr
    done = run([*outside, "explain", "--config", config, "-e", "NVIDIA_VISIBLE_DEVICES=1"])
    assert done.status == 1
    assert f"in use by the container {first.name}" in done.stdout
    is_held(place, place.create(place.ask("1")), first, "hook")


@ONE
def test_a_device_described_only_by_a_cdi_spec_is_exclusive(place: Place) -> None:
    document = {
        "cdiVersion": "0.5.0",
        "kind": "maker.example/card",
        "devices": [
            {"name": name, "containerEdits": {"env": [f"MAKER_{name.upper()}=1"]}} for name in "ab"
        ],
    }
    (place.documents / "maker.json").write_text(json.dumps(document))
    text = place.config.read_text().replace("nvidia.com/gpu", "maker.example/card")
    place.config.write_text(text)
    open_kinds(place.config, "maker.example/card")
    first = place.ask("maker.example/card=a")
    place.create(first).ok()
    is_held(place, place.create(place.ask("0,maker.example/card=a")), first, "hook")
    place.create(place.ask("0,maker.example/card=b")).ok()
    config = place.mode("hook")
    shown = run([place.installation.command, "list", "--config", config]).ok().stdout
    assert re.search(rf"^maker.example/card=a +{first.name}$", shown, re.MULTILINE)
    place.kill(first)
    place.create(place.ask("maker.example/card=a")).ok()


FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "node": lambda path: {"deviceNodes": [{"path": "/dev/nvidia1", "hostPath": path}]},
    "renamed": lambda path: {"deviceNodes": [{"path": "/dev/card", "hostPath": path, "type": "c"}]},
    "unbuffered": lambda path: {
        "deviceNodes": [{"path": "/dev/card", "type": "u", **numbers(path)}]
    },
    "mounted": lambda path: {
        "mounts": [{"hostPath": path, "containerPath": "/dev/card", "options": ["bind"]}]
    },
}


def numbers(path: str) -> dict[str, int]:
    status = os.stat(path)
    return {"major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}


@pytest.fixture
def second(place: Place, driver: Driver, request: pytest.FixtureRequest) -> str:
    """A CDI spec of another kind, which every image may name, with the node of GPU 1."""
    path = driver.root / f"dev/nvidia{driver.gpus[1].minor}"
    device = {"name": "x", "containerEdits": FORMS[request.param](str(path))}
    document = {"cdiVersion": "0.5.0", "kind": "other.example/nic", "devices": [device]}
    (place.documents / "other.json").write_text(json.dumps(document))
    open_kinds(place.config, "other.example/nic")
    return "other.example/nic=x"


@pytest.mark.protects(
    "claims",
    "a container with a node of an exclusive device holds it, however the node was added",
    instead="for kind in ():",
    only="second_document_with and renamed and spec",
)
@ONE
@pytest.mark.parametrize(
    ("second", "way"),
    [*((form, "hook") for form in FORMS), ("renamed", "spec"), ("renamed", "cdi")],
    indirect=["second"],
)
def test_a_second_document_with_the_same_node_is_refused(
    place: Place, second: str, way: str
) -> None:
    gpu, other = place.ask("1", way), place.ask(second, way)
    place.create(gpu, way).ok()
    is_held(place, place.create(other, way), gpu, way)
    place.kill(gpu)
    place.create(other, way).ok()
    is_held(place, place.create(place.ask("1", way), way), other, way)
    is_held(place, place.create(place.ask("1", "engine"), "engine"), other, "engine")
    place.create(place.ask("2", way), way).ok()


@pytest.mark.protects(
    "engines-lease",
    "a container also holds exclusive devices that the engine itself has added",
    instead="edited = spec",
    only="engine_carries_out and node",
)
@ONE
@pytest.mark.parametrize("second", FORMS, indirect=True)
def test_a_second_document_that_the_engine_carries_out_is_refused(
    place: Place, second: str
) -> None:
    """With our CDI spec, its hook checks all nodes; without it, gpu-py checks them at the start."""
    edits = folders.read_folders([str(place.documents)]).devices[second].edits
    first = place.ask("1")
    place.create(first).ok()
    beside = place.ask("3", "engine")
    beside.change(lambda spec: spec.update(apply.apply(spec, edits)))
    is_held(place, place.create(beside, "engine"), first, "engine")
    alone = place.ask("void")
    alone.change(lambda spec: spec.update(apply.apply(spec, edits)))
    is_held(place, place.create(alone), first, "hook")
    place.kill(first)
    place.create(alone).ok()
    is_held(place, place.create(place.ask("1")), alone, "hook")


@ONE
def test_without_the_setting_devices_are_shared(place: Place) -> None:
    place.config.write_text(place.config.read_text().replace(EXCLUSIVE, ""))
    for _ in range(2):
        place.create(place.ask("1")).ok()
    made = place.ask("1", "spec")
    place.create(made, "spec").ok()
    assert "hooks" not in made.spec()


@ONE
def test_the_lease_hook_of_spec_mode_keeps_the_devices_usable(place: Place, driver: Driver) -> None:
    """In mode spec, the hook that takes the lease must not remove any device."""
    made = place.ask("4", "spec")
    made.command(*look(driver.minors))
    env = {"GPUHOOK_CONFIG": str(place.mode("spec"))}
    for _ in range(2):
        assert seen(made.run(place.installation.runtime, env)).gpu_minors == {driver.gpus[4].minor}
    assert len(made.spec()["hooks"]["prestart"]) == 1
    env = {"GPUHOOK_CONFIG": str(place.mode("hook"))}
    assert seen(made.run(place.installation.runtime, env)).gpu_minors == {driver.gpus[4].minor}


@ONE
def test_a_hundred_containers_at_once_get_eight_exclusive_gpus(place: Place) -> None:
    """Eight of the hundred containers get a GPU, and each GPU belongs to one of them."""
    count, gpus = 100, 8
    asking = [place.ask(str(number % gpus)) for number in range(count)]
    created = place.create_at_once(asking)
    won = [number for number, is_created in enumerate(created) if is_created]
    assert sorted(number % gpus for number in won) == list(range(gpus))
    names = {asking[number].name for number in won}
    assert set(place.records()) == names
    for number in sorted(set(range(count)) - set(won)):
        text = (asking[number].path / "output").read_text()
        assert any(f"in use by the container {name}" in text for name in names), text


@pytest.fixture(scope="module")
def exclusive(workspace: Path, driver: Driver) -> Path:
    """A configuration for engines with exclusive GPUs."""
    config = write_config(workspace / "leases-etc", driver.root, ["runc"])
    config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{EXCLUSIVE}"))
    return config


@pytest.fixture(scope="module")
def of_docker(
    workspace: Path, host: Namespace, installation: Installation, archive: Path, exclusive: Path
) -> Iterator[Docker]:
    env = {"GPUHOOK_CONFIG": str(exclusive)}
    folder, runtimes = workspace / "leases-d", {"gpu-py": installation.runtime}
    with dockerd(folder, host, runtimes, archive, env) as engine:
        yield engine


@pytest.fixture(scope="module")
def of_podman(
    workspace: Path, host: Namespace, installation: Installation, archive: Path, exclusive: Path
) -> Iterator[Podman]:
    program = workspace / "leases-gpu-py"
    start = f"GPUHOOK_CONFIG={exclusive} exec {installation.runtime}"
    program.write_text(f'#!/bin/sh\n{start} "$@"\n')
    program.chmod(0o755)
    with podman(workspace / "leases-p", host, program, archive) as engine:
        yield engine


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_refusal_names_the_holder_as_list_does(
    engine: str, request: pytest.FixtureRequest, installation: Installation, exclusive: Path
) -> None:
    one: Docker | Podman = request.getfixturevalue(f"of_{engine}")
    name = f"holder-{engine}"
    env, words = ["NVIDIA_VISIBLE_DEVICES=3"], [f"--name={name}", "--detach"]
    one.run(image("debian"), "sleep", "1000", env=env, options=words).ok()
    try:
        refused = one.run(image("debian"), "true", env=env).failed().stderr
        assert (
            f"is in use by {engine}'s container {name}, and nvidia.com/gpu is exclusive" in refused
        )
        listed = run([installation.command, "list", "--config", exclusive]).ok().stdout
        assert f"{engine}:{name}" in listed
    finally:
        one.call("rm", "--force", name)
