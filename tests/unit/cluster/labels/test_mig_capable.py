"""The label mig.capable, from an NVML that reports a GPU's MIG mode but none of its profiles."""

from types import SimpleNamespace
from typing import Any

import pytest

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendors.nvidia import instances, labels
from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory


class NotSupportedError(Exception):
    """A stand-in for NVML's error."""


def unsupported(*_arguments: Any) -> Any:
    raise NotSupportedError


def nvml(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=NotSupportedError,
        NVML_GPU_INSTANCE_PROFILE_COUNT=2,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda _handle: SimpleNamespace(total=80 << 30),
        nvmlDeviceGetGpuInstanceProfileInfo=unsupported,
        **functions,
    )


@pytest.mark.parametrize(
    ("mode", "capable"),
    [(lambda _handle: [0, 0], "true"), (lambda _handle: [1, 1], "true"), (unsupported, "false")],
)
def test_mig_capable_follows_the_mig_mode(
    mode: Any, capable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "library", lambda _config: "")
    answer = nvml(nvmlDeviceGetMigMode=mode)
    monkeypatch.setattr("gpuhook.vendors.nvidia.nvml.query", lambda *given: given[-1](answer))
    gpu = Gpu(0, 0, "GPU-0", "", "NVIDIA H100", "9.0", "Nvidia", mig_enabled=False, mig=())
    inventory = NvidiaInventory("/", "580.65.06", "13.0", (gpu,), nodes=(), files=())
    with Rootfs("/") as root:
        found = labels.labels(Config(), inventory, root, None, {})
    assert found["nvidia.com/mig.capable"] == capable
