"""Fixtures of the doctor's tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fabricated import Tree


@pytest.fixture
def docker(tree: Tree) -> Iterator[Callable[..., None]]:
    """A function that starts a simulated dockerd, which reports the given runtimes."""
    listeners = []

    def run(
        runtimes: dict[str, str], socket_path: str = "/var/run/docker.sock", **more: Any
    ) -> None:
        loaded = {name: {"path": path} for name, path in runtimes.items()}
        answer = {"Runtimes": loaded, "DefaultRuntime": "runc", "CgroupDriver": "systemd"}
        listeners.append(tree.docker_answers(socket_path, {**answer, **more}))

    yield run
    for listener in listeners:
        listener.close()
