"""The compute mode of GPUs and how much memory they have, by NVML in a child as root."""

from collections.abc import Mapping
from typing import Any

from gpuhook.ground.config.model import Config
from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.discover import library

EXCLUSIVE_PROCESS = 3  # nvmlComputeMode_t in nvml.h
DEFAULT = 0
_ROOT = "0"


def read(config: Config, root: str, uuids: list[str]) -> dict[str, tuple[int, int]]:
    """Return the compute mode and the memory in bytes of each GPU, by UUID; DriverError."""

    def question(pynvml: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for uuid in uuids:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            found[uuid] = [pynvml.nvmlDeviceGetComputeMode(handle), total]
        return found

    said = nvml.query(root, library(config), _ROOT, config.nvml_timeout, question)
    return {uuid: (mode, total) for uuid, (mode, total) in said.items()}


def write(config: Config, root: str, modes: Mapping[str, int], *, but_lost: bool = False) -> None:
    """Set compute modes by UUID, all that can be set; DriverError where one can't.

    A GPU that has the mode isn't asked: some refuse every one, also that which they have. With
    ``but_lost`` one that is lost is no failure: it comes back as new, by a reset or a reboot.
    """

    def question(pynvml: Any) -> dict[str, Any]:
        failures = []
        for uuid, mode in modes.items():
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
                # protects: mps-mode-there
                if pynvml.nvmlDeviceGetComputeMode(handle) != mode:
                    pynvml.nvmlDeviceSetComputeMode(handle, mode)
            except pynvml.NVMLError as error:  # protects: mps-each-mode
                if not but_lost or error.value != pynvml.NVML_ERROR_GPU_IS_LOST:
                    failures.append(error)
        if failures:
            raise failures[0]
        return {}

    if modes:
        nvml.query(root, library(config), _ROOT, config.nvml_timeout, question)
