"""The demo on a typical host, where containerd runs and /tmp is mounted nodev."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Result, daemon
from harness.images import REPOSITORY
from harness.installation import Installation
from harness.namespaces import HOLD, Namespace, held

SOCKET = "/run/containerd/containerd.sock"  # where dockerd looks for a containerd
# This clone may be below /tmp, so the clone is mounted again on top of the new /tmp.
MACHINE = (
    f"cd '{REPOSITORY}' && mount -t tmpfs -o mode=755 tmpfs /run && "
    "mount -t tmpfs -o mode=1777,nodev tmpfs /tmp && mkdir /run/containerd && "
    f"mkdir -p '{REPOSITORY}' && mount --no-canonicalize --bind . '{REPOSITORY}' && {HOLD}"
)

# Acts like a containerd that dockerd finds too slow: a signal makes containerd write down its
# state into its TMPDIR.
SLOW = """#!/bin/sh
(sleep 1 && kill -USR1 $$) &
PATH=${PATH#*:} exec containerd "$@"
"""


@pytest.fixture
def machine(workspace: Path) -> Iterator[Namespace]:
    """A namespace with a separate /run and /tmp, and a containerd that runs like a service."""
    log = workspace / "containerd-of-machine.log"
    with held(["sh", "-c", MACHINE]) as entered:
        argv = entered.enter("containerd", "--config=/dev/null", "--root=/run/containerd-root")
        with daemon(argv, log, lambda: ctr(entered).status == 0):
            yield entered


def ctr(machine: Namespace) -> Result:
    """List the namespaces in the host's containerd; each engine has one."""
    return machine.run("ctr", "--address", SOCKET, "namespaces", "list", "--quiet")


def test_demo_leaves_the_machine_alone(machine: Namespace, installation: Installation) -> None:
    assert installation.command.exists()  # the demo uses the same installation
    slow = ("install", "-D", "--mode=755", "/dev/stdin", "/tmp/slow/containerd")
    machine.run(*slow, stdin=SLOW.encode()).ok()
    env = {"TMPDIR": "/tmp", "PATH": f"/tmp/slow:{os.environ['PATH']}"}
    before = machine.run("find", "/run", "/tmp", "-xdev").ok().stdout
    done = machine.run(REPOSITORY / "scripts/demo", env=env).ok()
    assert "ok: exactly the GPUs asked for" in done.stdout
    assert ctr(machine).ok().stdout == ""
    assert machine.run("find", "/run", "/tmp", "-xdev").ok().stdout == before
    assert not [*Path("/var/tmp").glob("gpuhook-demo.*")]
    assert not [*Path("/sys/fs/cgroup").glob("**/gpuhook-demo-*")]
