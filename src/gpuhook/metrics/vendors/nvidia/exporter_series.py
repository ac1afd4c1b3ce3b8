"""The series of NVIDIA's own exporter (DCGM's) that NVML provides, for existing dashboards.

The names are exactly the same, also those of counters, which don't end in _total.
"""

import re
from collections.abc import Iterator

from gpuhook.metrics.model import Accelerator, Container, Snapshot
from gpuhook.metrics.vendor_parts import Sample, Series
from gpuhook.vendors.nvidia.names import NAME

_COMPUTE = re.compile(r"^[0-9]+c\.")
_MIB = 1 << 20
_PERCENT = 100
_SERIES = (
    ("SM_CLOCK", "gauge", "SM clock frequency (in MHz)."),
    ("MEM_CLOCK", "gauge", "Memory clock frequency (in MHz)."),
    ("GPU_TEMP", "gauge", "GPU temperature (in C)."),
    ("MEMORY_TEMP", "gauge", "Memory temperature (in C)."),
    ("POWER_USAGE", "gauge", "Power draw (in W)."),
    ("TOTAL_ENERGY_CONSUMPTION", "counter", "Energy since the driver was loaded (in mJ)."),
    ("PCIE_REPLAY_COUNTER", "counter", "Total number of PCIe retries."),
    ("GPU_UTIL", "gauge", "GPU utilization (in %)."),
    ("MEM_COPY_UTIL", "gauge", "Memory utilization (in %)."),
    ("ENC_UTIL", "gauge", "Encoder utilization (in %)."),
    ("DEC_UTIL", "gauge", "Decoder utilization (in %)."),
    ("XID_ERRORS", "gauge", "Value of the last XID error encountered."),
    ("FB_FREE", "gauge", "Framebuffer memory free (in MiB)."),
    ("FB_USED", "gauge", "Framebuffer memory used (in MiB)."),
    ("FB_RESERVED", "gauge", "Framebuffer memory reserved (in MiB)."),
    ("UNCORRECTABLE_REMAPPED_ROWS", "counter", "Rows remapped for uncorrectable errors."),
    ("CORRECTABLE_REMAPPED_ROWS", "counter", "Rows remapped for correctable errors."),
    ("ROW_REMAP_FAILURE", "gauge", "1 if row remapping has failed."),
    ("ECC_SBE_VOL_TOTAL", "counter", "Corrected errors of memory since the driver was loaded."),
    ("ECC_DBE_VOL_TOTAL", "counter", "Uncorrected errors of memory since the driver was loaded."),
    ("ECC_SBE_AGG_TOTAL", "counter", "Corrected errors of memory, ever."),
    ("ECC_DBE_AGG_TOTAL", "counter", "Uncorrected errors of memory, ever."),
    ("NVLINK_BANDWIDTH_TOTAL", "counter", "Data sent and received on all NVLinks (in KiB)."),
    ("VGPU_LICENSE_STATUS", "gauge", "vGPU License status"),
    ("CLOCKS_EVENT_REASONS", "gauge", "Reasons for the current clocks (bits)."),
    ("GET_GPU_RECOVERY_ACTION", "gauge", "Recovery action for the GPU, by the driver."),
    ("PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the graphics engine is active."),
    ("PROF_PIPE_TENSOR_ACTIVE", "gauge", "Ratio of cycles the tensor pipe is active."),
    ("PROF_DRAM_ACTIVE", "gauge", "Ratio of cycles the memory interface is active."),
    ("PROF_PCIE_TX_BYTES", "gauge", "Data sent over PCI Express (in bytes per second)."),
    ("PROF_PCIE_RX_BYTES", "gauge", "Data received over PCI Express (in bytes per second)."),
)
_LABELS = (
    "gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID",
    "DCGM_FI_DRIVER_VERSION", "container", "namespace", "pod", "pod_uid",
    "hpc_job",
)  # fmt: skip


def series(snapshot: Snapshot) -> Iterator[Series]:
    """Yield the series, with a sample for each pod that has the device and each job that uses it.

    Without either, a device has one sample. Values of MIG devices replace those of their GPU, as in
    DCGM's exporter: a sum over both would count each twice.
    """
    jobs = _jobs(snapshot)
    rows = [
        (device, [*_labels(device, snapshot), *_words(each)], _values(device))
        for device in snapshot.devices
        if device.vendor == NAME
        for each in [*_pods(device, snapshot), *jobs.get(device.id, ())] or [Container("")]
    ]
    for name, kind, about in _SERIES:
        found: list[Sample] = []
        divided = {device.parent for device, _, values in rows if values.get(name) is not None}
        for device, labels, values in rows:
            if device.id not in divided and (value := values.get(name)) is not None:
                pairs = zip(_LABELS, labels, strict=True)
                found.append(({key: word for key, word in pairs if word}, value))
        group = "" if name.startswith("PROF_") else "DEV_"
        yield Series(f"DCGM_FI_{group}{name}", kind, about, found)


def _words(it: Container) -> list[str]:
    return [it.container, it.namespace, it.pod, it.pod_uid, it.slurm_job]


def _jobs(snapshot: Snapshot) -> dict[str, list[Container]]:
    """Return the Slurm jobs that have or use each device, one container of each."""
    every = {each.id: each for each in snapshot.containers if each.slurm_job and not each.pod}
    found: dict[str, dict[str, Container]] = {}
    pairs = [(device, each) for each in every.values() for device in each.devices]
    pairs += [(use.device, every[use.container]) for use in snapshot.usages
              if use.container in every and use.processes]  # fmt: skip
    for device, each in pairs:
        found.setdefault(device, {})[each.slurm_job] = each
    return {device: [*jobs.values()] for device, jobs in found.items()}


def _pods(device: Accelerator, snapshot: Snapshot) -> list[Container]:
    return [each for each in snapshot.containers if each.pod and device.id in each.devices]


def _labels(device: Accelerator, snapshot: Snapshot) -> list[str]:
    gpu = device.label.partition(":")[0]
    node = "" if device.minor is None else f"nvidia{device.minor}"
    instance = "" if device.gpu_instance is None else str(device.gpu_instance)
    domain, _, rest = device.bus_id.upper().partition(":")
    bus_id = f"{domain:0>8}:{rest}" if rest else ""
    parents = {each.id: each for each in snapshot.devices}
    whole = parents.get(device.parent, device)
    driver = snapshot.drivers.get(device.vendor, "")
    words = [gpu, whole.id, bus_id, node, whole.model]
    # Several compute instances (1c.3g.40gb) form one GPU instance, which DCGM's exporter reports.
    profile = _COMPUTE.sub("", device.mig_profile)
    return [*words, profile, instance, driver]


def _values(device: Accelerator) -> dict[str, float | None]:
    total, used = device.memory_total_bytes, device.memory_used_bytes
    reserved, energy = device.memory_reserved_bytes, device.energy_joules
    share = device.utilization
    free = None if total is None or used is None else total - used - (reserved or 0)
    last = None if device.xids is None or device.parent else ([0, *device.xids][-1])
    return {
        **device.readings,
        "GPU_TEMP": device.temperature_celsius,
        "POWER_USAGE": device.power_watts,
        "TOTAL_ENERGY_CONSUMPTION": None if energy is None else energy * 1000,
        "MEMORY_TEMP": device.memory_temperature_celsius,
        "ECC_SBE_VOL_TOTAL": device.ecc_corrected,
        "ECC_DBE_VOL_TOTAL": device.ecc_uncorrected,
        # As in DCGM, not for MIG devices.
        "GPU_UTIL": None if share is None or device.parent else round(share * _PERCENT),
        "XID_ERRORS": last,
        "FB_FREE": None if free is None else free // _MIB,
        "FB_USED": None if used is None else used // _MIB,
        "FB_RESERVED": None if reserved is None else reserved // _MIB,
    }
