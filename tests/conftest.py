"""With CI=true a skipped test is a failed one: nothing may be left out there."""

import os
from collections.abc import Generator

import pytest

pytest_plugins = ["recording"]
CI = os.environ.get("CI") == "true"
# Before anything imports gRPC: its handlers would run in each child that a later test forks.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"with CI=true nothing may be skipped: {report.longrepr}"
    return report
