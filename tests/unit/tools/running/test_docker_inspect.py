"""Docker that answers late or wrongly, or whose containers have stopped in the meantime."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fabricated import Tree
from timeouts import in_time

from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
from gpuhook.monitor.containers.device_users import RunningContainer
from gpuhook.tools.running import docker_inspect

PATHS = [f"/dev/neuron{number}" for number in range(3)]
INVENTORY = Inventory(
    vendor="neuron",
    root="/",
    version="2.0",
    devices=tuple(
        Device(id=path, label=path[-1], names={"index": (path[-1],)}, nodes=(path,))
        for path in PATHS
    ),
    nodes=tuple(DeviceNode(path, 240, number) for number, path in enumerate(PATHS)),
)
EVERY = {(240, number) for number in range(3)}
PRIVILEGED = {
    "Id": "1" * 64,
    "State": {"Pid": os.getpid()},
    "HostConfig": {"Runtime": "runc", "Privileged": True, "DeviceRequests": None},
    "Config": {"Env": ["PATH=/bin"]},
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.toml").write_text("")
    return load(str(tmp_path / "config.toml"))


@pytest.fixture
def path(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Path where root's dockerd would listen, for an ordinary user."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("gpuhook.tools.engines.docker_api._ROOT", user)
    tree.root.mkdir(exist_ok=True)
    here = os.open(tree.root, os.O_PATH)  # a socket's path has at most 107 characters
    monkeypatch.setattr(
        docker_inspect, "docker_sockets", lambda: [f"/proc/self/fd/{here}/docker.sock"]
    )
    yield "/docker.sock"
    os.close(here)


def found(config: Config, *known: RunningContainer) -> list[RunningContainer]:
    return docker_inspect.asked(config, [INVENTORY], known)


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Description of the one container that Docker lists."""
    one: dict[str, Any] = {**PRIVILEGED}
    monkeypatch.setattr("gpuhook.tools.engines.docker_api.containers", lambda *_: [one])
    return one


def test_a_privileged_container_has_all_devices(
    tree: Tree, path: str, config: Config, entry: dict[str, Any]
) -> None:
    with tree.docker_answers(path, entry):
        [container] = found(config)
        assert (container.name, container.known_from) == (entry["Id"], "engine")
        assert container.nodes == EVERY
        assert found(config, container) == [], "it is known already"


@pytest.mark.parametrize(
    "changes",
    [{"HostConfig": {}}, {"State": {}}, {"State": None, "HostConfig": 1, "Mounts": [1, None]}],
)
def test_containers_without_devices_or_process_are_omitted(
    tree: Tree, path: str, config: Config, entry: dict[str, Any], changes: dict[str, Any]
) -> None:
    with tree.docker_answers(path, {**entry, **changes}):
        assert found(config) == []


@pytest.mark.parametrize(
    ("requests", "numbers"),
    [
        ([{"Driver": "cdi", "DeviceIDs": ["aws.amazon.com/neuron=2"]}], {2}),
        ([{"Driver": "cdi", "DeviceIDs": ["aws.amazon.com/neuron=all"]}], {0, 1, 2}),
        ([{"Driver": "cdi", "DeviceIDs": ["aws.amazon.com/neuron=9", "a/b=1"]}], None),
        ([{"Driver": "other", "DeviceIDs": ["0"]}, None], None),
    ],
)
def test_cdi_device_requests_are_resolved_to_devices(
    tree: Tree,
    path: str,
    config: Config,
    entry: dict[str, Any],
    requests: list[Any],
    numbers: set[int] | None,
) -> None:
    """Docker 28 describes --device aws.amazon.com/neuron=2 in this form."""
    entry["HostConfig"] = {"Runtime": "runc", "DeviceRequests": requests}
    with tree.docker_answers(path, entry):
        given = [{minor for _, minor in each.nodes} for each in found(config)]
    assert given == ([] if numbers is None else [numbers])


@pytest.mark.parametrize("answer", [{}, [], [1], None, "text", {"Id": 1}])
def test_malformed_docker_answers_are_ignored(
    tree: Tree, path: str, config: Config, answer: object
) -> None:
    with tree.docker_answers(path, answer):
        assert found(config) == []


def test_a_container_removed_before_its_inspection_is_omitted(
    tree: Tree, path: str, config: Config, entry: dict[str, Any]
) -> None:
    with tree.docker_answers(path, {"message": f"No such container: {entry['Id']}"}, "404 gone"):
        assert found(config) == []


@pytest.mark.protects(
    "docker-asked-in-time",
    "other users: all requests to Docker without root share a timeout of half a second",
    instead="left = 50.0",
)
def test_all_docker_requests_share_half_a_second(
    tree: Tree, path: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker may have many containers, and may answer slowly for each of them."""
    monkeypatch.setattr("gpuhook.tools.engines.docker_api.containers", lambda *_: [{}] * 10_000)

    def slowly(*_: object) -> dict[str, Any]:
        time.sleep(0.05)
        return PRIVILEGED

    monkeypatch.setattr("gpuhook.tools.engines.docker_api.container", slowly)
    start = time.monotonic()
    with in_time():
        assert 1 <= len(found(config)) < 15
    assert time.monotonic() - start < 300  # all answers would take 500 seconds


@pytest.mark.protects(
    "docker-asked-in-time",
    "other users: all requests to Docker without root share a timeout of half a second",
    instead="left = 50.0",
)
def test_a_docker_that_never_answers_times_out(tree: Tree, path: str, config: Config) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(tree.root, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}{path}")
        listener.listen()
        start = time.monotonic()
        with in_time():
            assert found(config) == []
        assert time.monotonic() - start < 40
        os.close(here)
