"""Containers that share GPUs by MPS, served by the prefork server.

The server has loaded only the configuration and the inventory. It reads the state of MPS for
each container.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.bundles import Bundle
from harness.commands import Result, run, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation
from harness.mps import PLACE, SETTINGS
from harness.namespaces import Namespace
from harness.prefork import ONE, Site

VERSIONS = {"575.51": 2, "615.10": 3}
SAYS = f'echo "$CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"; ls {PLACE}'


@pytest.fixture(scope="module", params=[*VERSIONS])
def machine(request: pytest.FixtureRequest, workspace: Path, installation: Installation) -> Driver:
    options = ("--gpus=3", f"--driver-version={request.param}")
    return simulate(installation, workspace / f"mps-ready-{request.param}", *options)


@pytest.fixture
def clients(
    bundle: Bundle,
    installation: Installation,
    machine: Driver,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> Iterator[Site]:
    """A site whose containers are clients of MPS, and print their settings."""
    made = Site(bundle, installation, machine, low_level[0], tmp_path)
    state = Path(f"/run/gpuhook-mps-ready-{os.getpid()}")  # /run, which only root can change
    text = made.config.read_text().replace(str(tmp_path / "etc/state"), str(state))
    made.config.write_text(text + SETTINGS.replace('"0,1"', '"0,2"'))
    made.settle()
    bundle.command("sh", "-c", SAYS)
    made.plain = bundle.config.read_bytes()
    yield made
    mps(made, "stop")
    made.clear()
    shutil.rmtree(state, ignore_errors=True)


def mps(site: Site, verb: str) -> Result:
    return run([site.installation.command, "mps", verb, "--config", site.config])


def is_client(done: Result, threads: int = 40) -> bool:
    """Return whether a container has everything that a client needs."""
    assert done.status == 0, done
    lines = done.stdout.splitlines()
    return lines[0] == f"{PLACE} {threads}" and "control" in lines


def stand(site: Site) -> None:
    """Start clients until the prefork server serves them."""

    def is_served() -> bool:
        assert is_client(site.run())
        return site.served

    wait_until(is_served, "a container is served")


@ONE
def test_an_mps_client_is_served_by_the_prefork_server(clients: Site) -> None:
    mps(clients, "start").ok()
    stand(clients)
    before = clients.server
    for _ in range(3):
        assert is_client(clients.run())
        assert clients.served
    assert clients.server == before


@ONE
def test_a_stopped_or_restarted_daemon_is_noticed(clients: Site) -> None:
    mps(clients, "start").ok()
    stand(clients)
    before = clients.server
    mps(clients, "stop").ok()
    refused = clients.run()
    assert refused.status != 0
    assert "no control daemon of MPS is running" in refused.stdout
    mps(clients, "start").ok()
    assert is_client(clients.run())
    assert clients.served
    assert clients.server == before, "nothing that it had loaded has changed"


@ONE
def test_changed_settings_apply_from_the_next_start_of_the_daemon(clients: Site) -> None:
    mps(clients, "start").ok()
    stand(clients)
    before = clients.processes
    text = clients.config.read_text()
    clients.config.write_text(text.replace("percentage = 40", "percentage = 30"))
    clients.settle()
    mps(clients, "start").ok()
    assert is_client(clients.run(), threads=30)

    def is_served() -> bool:
        assert is_client(clients.run(), threads=30)
        return clients.served

    wait_until(is_served, "another process serves", interval=0.3)
    assert not before & clients.processes
