"""The NVML session for memory limits, next to the prefork server.

On cgroup v2, with a driver that takes two seconds to start.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.bundles import Bundle, Spec
from harness.commands import Result, wait_until
from harness.driver import Driver, simulate
from harness.images import CUDA_PROBE
from harness.installation import Installation
from harness.namespaces import Namespace
from harness.prefork import Site, is_running, open_files
from test_memory_limits import EIGHT, ONE, OPTIONS, told

LIMIT = "GPUHOOK_DEVICE_MEMORY=8GiB"
INIT_S = 2.0
GPUS = "--gpus=3"


@pytest.fixture(scope="module")
def slow(workspace: Path, installation: Installation) -> Driver:
    options = (GPUS, *OPTIONS[1:], f"--init-seconds={INIT_S:g}")
    return simulate(installation, workspace / "driver-615-slow", *options)


@pytest.fixture
def limited(
    bundle: Bundle,
    installation: Installation,
    slow: Driver,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> Iterator[Site]:
    """A site whose containers have a limit, and see their cgroups as Docker's containers do."""
    made = Site(bundle, installation, slow, low_level[0], tmp_path)

    def see_cgroups(spec: Spec) -> None:
        options = ["nosuid", "noexec", "nodev", "relatime", "ro"]
        mount = {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"}
        spec["mounts"].append({**mount, "options": options})
        spec["linux"]["namespaces"].append({"type": "cgroup"})

    bundle.change(see_cgroups)
    bundle.command("sh", "-c", f"{CUDA_PROBE} 9; true")
    made.plain = bundle.config.read_bytes()
    yield made
    made.clear()


def seconds(site: Site) -> float:
    """Run a container, check its limit, and return the time that this took."""
    begun = time.monotonic()
    done = site.run()
    taken = time.monotonic() - begun
    has_its_limit(done)
    return taken


def has_its_limit(done: Result) -> None:
    assert done.status == 0, done
    assert told(done) == EIGHT, done


def kept(site: Site) -> set[int]:
    """Return the processes in addition to the prefork server, its parent and the spare worker."""
    return site.processes - site.standing - {site.ahead}


def keep(site: Site) -> int:
    """Start containers until none waits for the driver; return the NVML session's pid.

    Each container has a memory limit.
    """
    site.asks(LIMIT)
    assert seconds(site) >= INIT_S, "nothing is ready for the first one"
    wait_until(lambda: seconds(site) < INIT_S, "a container is served by what is ready")
    [pid] = kept(site)
    return pid


@ONE
def test_no_container_waits_for_a_slow_driver(limited: Site) -> None:
    def nobody_waits() -> bool:
        keeper = keep(limited)
        times = [seconds(limited) for _ in range(5)]
        return max(times) < INIT_S and kept(limited) == {keeper}

    # On a busy machine, the server may not answer within a second, and isn't waited for any longer.
    # So one of three tries must succeed.
    assert any(nobody_waits() for _ in range(3))


@ONE
def test_no_nvml_session_is_kept_without_a_limit(limited: Site) -> None:
    for _ in range(3):
        assert limited.run().status == 0
    wait_until(limited.is_standing, "a prefork server runs, and nothing beside it")


@ONE
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_limit_is_set_although_the_session_is_killed_or_stopped(
    limited: Site, how: signal.Signals
) -> None:
    keeper = keep(limited)
    os.kill(keeper, how)
    seconds(limited)  # this start notices that the session isn't usable
    wait_until(lambda: not is_running(keeper), "it is gone")
    wait_until(lambda: seconds(limited) < INIT_S, "there is another")


@ONE
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nvml_session_ends_with_the_prefork_server(limited: Site, how: signal.Signals) -> None:
    keeper = keep(limited)
    os.kill(limited.server, how)
    wait_until(lambda: not is_running(keeper), "it is gone")
    seconds(limited)


@ONE
def test_nvml_session_holds_only_its_own_files(limited: Site) -> None:
    keeper = keep(limited)
    found = sorted(name.partition(":")[0] for name in open_files(keeper))
    assert found == ["/dev/null", "/dev/null", "/dev/null", "pipe", "socket"]
    status = dict(line.split(":\t", 1) for line in _read(f"/proc/{keeper}/status").splitlines())
    assert status["NoNewPrivs"] == "1"
    assert str(limited.bundle.path) not in _read(f"/proc/{keeper}/mountinfo")


def _read(path: str) -> str:
    return Path(path).read_text()
