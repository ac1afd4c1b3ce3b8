"""The first command of the README, from a clone, on a machine whose own Docker runs."""

import os

from booted import call
from harness.commands import run
from harness.images import REPOSITORY


def test_the_demo_works_and_leaves_dockers_network_alone() -> None:
    interfaces = set(os.listdir("/sys/class/net"))
    assert "docker0" in interfaces
    done = run(["./scripts/demo"], cwd=REPOSITORY, timeout=600.0).ok()
    assert "All is as it should be" in done.stdout
    assert set(os.listdir("/sys/class/net")) == interfaces
    assert call("systemctl", "is-active", "docker", "containerd").split() == ["active"] * 2
