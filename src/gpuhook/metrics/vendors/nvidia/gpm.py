"""Metrics of NVML's GPU performance monitoring (GPM) between two samples of a device.

Hopper and newer have it, with driver 520 and later, for a GPU and for each of its GPU instances.
The driver takes samples, and computes metrics between two. Names are NVML's NVML_GPM_METRIC_...
"""

from gpuhook.metrics.vendors.nvidia.asking import ask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GRAPHICS, TENSOR, DRAM = 1, 5, 10  # percent of time, of cycles, of bandwidth
PCIE_SENT, PCIE_RECEIVED = 20, 21  # MiB/s
_ALL = (GRAPHICS, TENSOR, DRAM, PCIE_SENT, PCIE_RECEIVED)


class GpmSamples:
    """The last sample of each device, by its UUID."""

    def __init__(self, pynvml: "Any") -> None:
        self._nvml = pynvml
        self._last: dict[str, tuple[Any, Any]] = {}  # with a buffer for the next one
        self._supports: dict[str, bool] = {}

    def has(self, uuid: str) -> bool:
        """Tell whether there is an earlier sample of a device."""
        return uuid in self._last

    def forget(self, uuid: str) -> None:
        """Drop a device's samples; its next sample is the first one again."""
        for each in self._last.pop(uuid, ()):
            ask(self._nvml, "nvmlGpmSampleFree", each)

    def between(
        self, uuid: str, gpu: str, handle: "Any", instance: int | None
    ) -> "dict[int, float]":
        """Take a sample, and return the metrics since the previous one; none the first time.

        ``gpu`` and ``handle`` belong to the whole GPU; ``instance`` is the GPU instance, None for
        the whole GPU.
        """
        if not self._can(gpu, handle):
            return {}
        before, fresh = self._last.get(uuid, (None, None))
        if fresh is None:
            fresh = ask(self._nvml, "nvmlGpmSampleAlloc")
        if instance is None:
            taken = ask(self._nvml, "nvmlGpmSampleGet", handle, fresh)
        else:
            taken = ask(self._nvml, "nvmlGpmMigSampleGet", handle, instance, fresh)
        if taken is None:
            return {}
        self._last[uuid] = (fresh, before)
        return {} if before is None else self._metrics(before, fresh)

    def _can(self, gpu: str, handle: "Any") -> bool:
        if gpu not in self._supports:
            said = ask(self._nvml, "nvmlGpmQueryDeviceSupport", handle)
            self._supports[gpu] = bool(said and said.isSupportedDevice)
        return self._supports[gpu]

    def _metrics(self, before: "Any", after: "Any") -> dict[int, float]:
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics, asked.sample1, asked.sample2 = len(_ALL), before, after
        for place, metric in enumerate(_ALL):
            asked.metrics[place].metricId = metric
        if ask(self._nvml, "nvmlGpmMetricsGet", asked) is None:
            return {}
        return {
            each.metricId: float(each.value)
            for each in asked.metrics[: len(_ALL)]
            if each.nvmlReturn == self._nvml.NVML_SUCCESS
        }
