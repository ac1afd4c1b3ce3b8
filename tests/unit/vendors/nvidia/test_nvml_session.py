"""An NVML session that is kept open: its actions, and the requests that it ignores."""

import os
import select
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from limiting_nvml import FOLDER, GIB, limiter

from gpuhook.vendors.nvidia import nvml_limiter, nvml_session
from gpuhook.vendors.nvidia.nvml_limiter import NvmlLimiter
from gpuhook.vendors.nvidia.nvml_session import NvmlSession

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="NVML lets root alone set limits")


class Standing:
    """An NVML session as a prefork server uses it."""

    def __init__(self, nvml: NvmlLimiter) -> None:
        self.poll = select.poll()
        self.ready = NvmlSession(self.poll)
        self.key = nvml._root, nvml._library
        self.wanted = dict.fromkeys(nvml.memory, 8 * GIB)

    def start(self) -> None:
        self.ready._key = self.key
        self.ready._until = time.monotonic() + 60
        self.ready._start(10)
        self.poll.register(self.ready._news, select.POLLIN)
        self.hear()

    def hear(self) -> None:
        """Wait for a message of the session, and process it."""
        [(descriptor, _)] = self.poll.poll(20_000)
        assert self.ready.hear(descriptor)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            if self.ready._pid:
                os.kill(self.ready._pid, nvml_limiter.SIGKILL)
                self.hear()


@pytest.fixture
def standing(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Standing]:
    """An open session; the test's parameters choose the library's behaviour."""
    made = Standing(limiter(tmp_path, **getattr(request, "param", {})))
    made.start()
    yield made
    made.end()
    assert nvml_limiter.kept is None


@ROOT
def test_an_nvml_session_sets_limits_repeatedly(standing: Standing) -> None:
    assert nvml_limiter.kept is not None
    assert all(nvml_limiter.kept(standing.key, FOLDER, standing.wanted) for _ in range(3))
    assert not nvml_limiter.kept(standing.key, "/sys/fs/cgroup/another", standing.wanted)
    assert not nvml_limiter.kept(standing.key, FOLDER, {"no GPU": GIB})
    assert nvml_limiter.kept(standing.key, FOLDER, standing.wanted), "it goes on"


@pytest.mark.protects(
    "ready-driver", "an NVML session sets memory limits only for GPUs of its own driver"
)
@ROOT
def test_an_nvml_session_serves_only_its_own_driver(standing: Standing) -> None:
    root, library = standing.key
    for key in (("/run/nvidia/driver", library), (root, f"{library}.1")):
        assert not standing.ready.ask(key, FOLDER, standing.wanted)


@pytest.mark.protects(
    "ready-yes",
    "a memory limit counts as set only if the NVML session confirms it",
    instead="return True",
)
@ROOT
@pytest.mark.parametrize(
    "standing",
    [{"set_": ""}, {"set_": "return 3"}, {"set_": "_exit(0)"}, {"set_": "abort()"}],
    ids=str,
    indirect=True,
)
def test_a_limit_counts_as_set_only_when_nvml_confirms_it(standing: Standing) -> None:
    assert not standing.ready.ask(standing.key, FOLDER, standing.wanted)


@ROOT
@pytest.mark.parametrize("standing", [{"set_": "sleep(3600)"}], indirect=True)
def test_a_hanging_nvml_session_is_ended_and_not_waited_for(standing: Standing) -> None:
    begun = time.monotonic()
    assert not standing.ready.ask(standing.key, FOLDER, standing.wanted)
    standing.hear()  # the kernel ends the hanging process
    assert time.monotonic() - begun < 600
    assert nvml_limiter.kept is None


@pytest.mark.protects(
    "ready-yes",
    "a memory limit counts as set only if the NVML session confirms it",
    instead="return True",
)
@ROOT
def test_a_killed_nvml_session_sets_no_limits_and_is_closed(standing: Standing) -> None:
    os.kill(standing.ready._pid, nvml_limiter.SIGKILL)
    assert not standing.ready.ask(standing.key, FOLDER, standing.wanted)
    standing.hear()
    assert standing.ready.descriptors() == ()
    assert not standing.ready.ask(standing.key, FOLDER, standing.wanted)


@ROOT
def test_an_idle_nvml_session_is_ended(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    standing.ready.end_in_time()
    assert nvml_limiter.kept is not None
    later = time.monotonic() + nvml_session._KEPT + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    standing.ready.end_in_time()
    assert nvml_limiter.kept is None
    standing.hear()


@ROOT
def test_an_nvml_process_that_fails_to_start_is_not_kept(tmp_path: Path) -> None:
    made = Standing(limiter(tmp_path, init="return 9"))
    made.ready._key = made.key
    made.ready._start(10)
    made.poll.register(made.ready._news, select.POLLIN)
    made.hear()
    assert nvml_limiter.kept is None
    assert made.ready.descriptors() == ()
