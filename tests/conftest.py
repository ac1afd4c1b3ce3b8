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
# Before anything imports gRPC: its handlers would run in each child that a later test forks.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# The path of a socket has 107 characters at most (unix(7)), and pytest's own folders take 60.
if len(tempfile.gettempdir()) > 40:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
# A simulated driver takes four times as long with a compiler that remembers nothing.
COMPILER = str(Path(__file__).parent / "lib/compiler")
if os.environ["PATH"].partition(":")[0] != COMPILER:
    os.environ["PATH"] = f"{COMPILER}:{os.environ['PATH']}"
compiled = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpuhook/compiled")
with contextlib.suppress(OSError):  # a home that is read-only
    compiled.mkdir(0o700, parents=True, exist_ok=True)
os.environ["GPUHOOK_COMPILED"] = str(compiled)


def _to_another(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Have a function that sends signals know no process of a number like 0.

    To kill(2) that is our own group, so a test that has lost a process would end all of them.
    """

    def checked(pid: int, number: int) -> None:
        if pid <= 0:
            raise ProcessLookupError(errno.ESRCH, f"{pid} is the number of no process")
        send(pid, number)

    return checked


os.kill, os.killpg = _to_another(os.kill), _to_another(os.killpg)


def _free_no_garbage() -> None:
    """Let forked children free nothing that is garbage of gRPC's here.

    That would wait for threads, which a fork lacks. Others' functions run before ours in a child.
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
    """Run the unit tests that wait first: at the end the other workers have nothing else to do."""
    waiting = ("tests/unit/test_results.py", "tests/unit/vendors/")

    def turn(item: pytest.Item) -> tuple[bool, bool]:
        return item.nodeid.startswith("tests/unit/"), not item.nodeid.startswith(waiting)

    items.sort(key=turn)


def pytest_collection() -> None:
    """Look for no garbage while thousands of tests are collected, which are none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and never among the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI=true a skipped test is a failed one."""
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"with CI=true nothing may be skipped: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restore signal handlers: services that run in the test's own process install theirs."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
