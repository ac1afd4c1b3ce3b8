"""Messages for each failure of the child that queries NVML."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvml_program import LIBRARY_DIR

from gpuhook.base.errors import DriverError
from gpuhook.vendors.nvidia import nvml
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine

ME = f"{os.getuid()}:{os.getgid()}"  # a test's folders belong to the user who runs it


@pytest.fixture
def library(make_root: Callable[..., tuple[Path, SimulatedMachine]]) -> str:
    return f"{make_root(gpus=1)[0]}{LIBRARY_DIR}/libnvidia-ml.so.1"


def raising(error: Exception) -> Callable[[Any], dict[str, Any]]:
    def question(_: Any) -> dict[str, Any]:
        raise error

    return question


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'x'"), "ModuleNotFoundError: No module named 'x'"),
        (AttributeError("nvmlNew"), "AttributeError: nvmlNew"),
        (PermissionError(1, "Operation not permitted"), r"PermissionError: \[Errno 1\] Operation"),
        (ValueError("no"), "ValueError: no"),
    ],
)
def test_exceptions_in_an_nvml_query_become_driver_errors(
    library: str, error: Exception, reason: str
) -> None:
    with pytest.raises(DriverError, match=f"^NVML failed: {reason}"):
        nvml.query("/", library, ME, 30, raising(error))


def test_nvml_results_are_returned_and_nvml_errors_raised(library: str) -> None:
    question = lambda it: {"count": it.nvmlDeviceGetCount()}  # noqa: E731
    assert nvml.query("/", library, ME, 30, question) == {"count": 1}
    with pytest.raises(DriverError, match=r"^NVML failed: Invalid Argument"):
        nvml.query("/", library, ME, 30, lambda it: it.nvmlDeviceGetHandleByIndex(7))
