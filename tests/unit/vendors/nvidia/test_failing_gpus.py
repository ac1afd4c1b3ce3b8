"""A GPU whose NVML queries fail, while the other GPUs are still found."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpuhook.vendors.nvidia import nvml

LOST = pynvml.NVML_ERROR_GPU_IS_LOST
RESET = getattr(pynvml, "NVML_ERROR_RESET_REQUIRED", 16)
UNKNOWN = pynvml.NVML_ERROR_UNKNOWN
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION


def library(errors: dict[int, int], at: str = "HandleByIndex", gpus: int = 3) -> SimpleNamespace:
    """Return an NVML with some GPUs; those in ``errors`` fail at one of its functions."""
    values: dict[str, Any] = {
        "HandleByIndex": lambda index: index,
        "CudaComputeCapability": lambda _: [9, 0],
        "Brand": lambda _: 14,
        "MigMode": lambda _: [0, 0],
        "MinorNumber": lambda index: index,
        "UUID": lambda index: f"GPU-{index}",
        "PciInfo": lambda index: SimpleNamespace(busId=f"00000000:0{index}:00.0"),
        "Name": lambda _: "NVIDIA H100",
        "MemoryInfo": lambda _: SimpleNamespace(total=80 << 30),
    }
    right = values[at]

    def fail(index: int) -> Any:
        if index in errors:
            raise pynvml.NVMLError(errors[index])
        return right(index)

    values[at] = fail
    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetCount=lambda: gpus,
        **{f"nvmlDeviceGet{name}": value for name, value in values.items()},
    )


@pytest.mark.parametrize("at", ["HandleByIndex", "UUID", "MemoryInfo"])
@pytest.mark.parametrize("error", [LOST, RESET, UNKNOWN])
def test_one_failing_gpu_is_lost_and_the_others_are_found(error: int, at: str) -> None:
    found = nvml._everything(library({1: error}, at))
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 2]
    assert found["lost"] == [1]


def test_all_gpus_lost() -> None:
    found = nvml._everything(library(dict.fromkeys(range(3), LOST)))
    assert found["gpus"] == []
    assert found["lost"] == [0, 1, 2]


@pytest.mark.parametrize(
    "errors", [dict.fromkeys(range(3), UNKNOWN), {0: LOST, 1: UNKNOWN, 2: LOST}, {1: NO_PERMISSION}]
)
def test_an_error_that_is_not_one_gpus_is_raised(errors: dict[int, int]) -> None:
    with pytest.raises(pynvml.NVMLError):
        nvml._everything(library(errors))
