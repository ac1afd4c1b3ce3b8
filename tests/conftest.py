"""Rules for all tests: short temporary names, one compiler, forks, signals, no skips in CI."""

import contextlib
import errno
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

pytest_plugins = ["recording"]
CI = os.environ.get("CI") == "true"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Set before anything imports gRPC, because gRPC's handlers would run in each child that a later
# test forks.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# The path of a socket has 107 characters at most (unix(7)), and pytest's own folders take 60.
if len(tempfile.gettempdir()) > 40:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
# Without a compiler that caches results, a simulated driver takes four times as long.
COMPILER = str(Path(__file__).parent / "lib/compiler")
if os.environ["PATH"].partition(":")[0] != COMPILER:
    os.environ["PATH"] = f"{COMPILER}:{os.environ['PATH']}"
compiled = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpuhook/compiled")
with contextlib.suppress(OSError):  # the home folder may be read-only
    compiled.mkdir(0o700, parents=True, exist_ok=True)
os.environ["GPUHOOK_COMPILED"] = str(compiled)


def _to_another(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Wrap a function that sends signals, so that it rejects process ids of 0 and below.

    For kill(2), process id 0 means the caller's own process group. A test that has lost a
    process would so kill all tests.
    """

    def checked(pid: int, number: int) -> None:
        if pid <= 0:
            raise ProcessLookupError(errno.ESRCH, f"{pid} is the number of no process")
        send(pid, number)

    return checked


os.kill, os.killpg = _to_another(os.kill), _to_another(os.killpg)


def _free_no_garbage() -> None:
    """Keep forked children from freeing this process' garbage of gRPC.

    Freeing it waits for threads, which a forked child lacks. Fork handlers of other modules
    run before ours in a child, so garbage collection is disabled before the fork.
    """
    was_enabled = True

    def before() -> None:
        nonlocal was_enabled
        was_enabled = gc.isenabled()
        gc.disable()

    def after() -> None:
        if was_enabled:
            gc.enable()

    def in_child() -> None:
        gc.freeze()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


_free_no_garbage()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: unit tests last, and among these, the tests that wait first.

    If the waiting tests ran at the end, the other workers would have nothing else to do.
    """
    waiting = ("tests/unit/test_results.py", "tests/unit/vendors/")

    def turn(item: pytest.Item) -> tuple[bool, bool]:
        return item.nodeid.startswith("tests/unit/"), not item.nodeid.startswith(waiting)

    items.sort(key=turn)


def pytest_collection() -> None:
    """Disable garbage collection while pytest collects tests.

    Collection creates thousands of tests, and none of them is garbage.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage seldom from now on, and never among the collected tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a skipped test as failed if the environment has CI=true."""
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"with CI=true nothing may be skipped: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Yield, and then restore the signal handlers that the test has changed.

    Services that run in the test's own process install their own handlers.
    """
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
