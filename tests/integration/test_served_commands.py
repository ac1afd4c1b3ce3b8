"""Commands that a pre-imported worker runs, with the same effects as started programs."""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import commands
from harness.commands import run
from harness.forked import PROGRAM, Child
from harness.installation import Installation
from harness.namespaces import Namespace


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--version"], 0),
        (["explain", "--config=config.toml", "-e", "NVIDIA_VISIBLE_DEVICES=1"], 0),
        (["explain", "-e", "NVIDIA_VISIBLE_DEVICES=99"], 1),
        (["list", "--config=config.toml", "--format=json"], 0),
        (["cdi", "generate", "--config=none.toml"], 1),
        (["mps", "status"], 1),
        (["nonsense"], 2),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("of_tests", [False, True])
def test_a_served_command_has_the_same_effects_as_a_started_one(
    installation: Installation,
    configs: dict[str, Path],
    v1: Namespace,
    words: Sequence[str],
    status: int,
    elsewhere: bool,
    of_tests: bool,
) -> None:
    argv = [str(installation.command), *words]
    if of_tests:
        argv = [sys.executable, "-c", PROGRAM, *argv]
    folder, env = configs["runc"].parent, {"GPUHOOK_CONFIG": str(configs["runc"])}
    if elsewhere:
        argv = v1.enter(*argv, cwd=folder)
    assert commands._servers is not None
    assert commands._servers.can_run(argv, {**os.environ, **env})
    served, started = (run(argv, env, folder, start=start) for start in (False, True))
    assert served == started
    assert served.status == status


def test_a_signal_to_a_child_whose_status_is_on_its_way_is_no_error() -> None:
    """The worker has waited for the child, but hasn't sent its status: its process id is free."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        os._exit(3)
    status = os.waitpid(child, 0)[1]
    process = Child(child, ours)
    process.send_signal(signal.SIGTERM)
    with theirs:
        theirs.send(str(status).encode())
        assert process.wait(9.0) == 3
