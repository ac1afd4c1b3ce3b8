"""Conversion of a snapshot to Prometheus metric families, as prometheus_client's classes.

Unknown values have no series. Container ids are labels, process ids aren't.
"""

import platform
from collections.abc import Callable, Iterable, Iterator

from gpuhook import __version__
from gpuhook.base.errors import MetricsError, shown
from gpuhook.base.host import files
from gpuhook.metrics import vendor_parts
from gpuhook.metrics.model import Accelerator, Container, SeriesOptions, Snapshot, Usage
from gpuhook.vendors.registry import BUILT_IN

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    from gpuhook.metrics.text import Family, encode
except ImportError as error:
    raise MetricsError(
        "The Python package prometheus_client isn't installed, and metrics need it",
        "Install it: pip install prometheus_client, with the pip next to gpuhook, or the package "
        "python3-prometheus-client",
    ) from error

_MODE = 0o644  # node_exporter is another user
_PERCENT = 100
_MHZ = 1e6
_BUILD = ("version", "python_version")
_DEVICE = ("vendor", "uuid", "index")
_CONTAINER = (
    "vendor", "uuid", "index", "container_id", "engine", "name", "pod", "namespace", "container",
    "slurm_job",
)  # fmt: skip
# Family, help text, and a device's value.
_GAUGES: tuple[tuple[str, str, Callable[[Accelerator], float | None]], ...] = (
    ("memory_total_bytes", "Memory of the device.", lambda it: it.memory_total_bytes),
    ("memory_used_bytes", "Memory in use on the device.", lambda it: it.memory_used_bytes),
    (
        "memory_reserved_bytes",
        "Memory reserved by the driver.",
        lambda it: it.memory_reserved_bytes,
    ),
    ("utilization_ratio", "Share of the time in which it was busy.", lambda it: it.utilization),
    ("temperature_celsius", "Temperature of the device.", lambda it: it.temperature_celsius),
    (
        "memory_temperature_celsius",
        "Temperature of the device's memory.",
        lambda it: it.memory_temperature_celsius,
    ),
    ("power_watts", "Power draw of the device.", lambda it: it.power_watts),
    ("power_limit_watts", "Power limit of the device.", lambda it: it.power_limit_watts),
    (
        "clock_hertz",
        "Compute clock of the device.",
        lambda it: it.clock_mhz and it.clock_mhz * _MHZ,
    ),
)


def families(snapshot: Snapshot, options: SeriesOptions, seconds: float) -> Iterator[Family]:
    """Yield the families of a snapshot that took ``seconds``."""
    yield from _of_devices(snapshot)
    yield from _of_containers(snapshot)
    if options.cadvisor:
        yield from _of_cadvisor(snapshot)
    if options.dcgm:
        yield from _of_vendors(snapshot)
    yield from _of_ourselves(snapshot, seconds)


def text(snapshot: Snapshot, options: SeriesOptions, seconds: float, *, openmetrics: bool) -> bytes:
    """Return the series, as OpenMetrics or in text format 0.0.4."""
    return encode(families(snapshot, options, seconds), openmetrics=openmetrics)


def write(snapshot: Snapshot, options: SeriesOptions, seconds: float, path: str) -> None:
    """Write the series atomically into a file for node_exporter; MetricsError if that fails."""
    data = text(snapshot, options, seconds, openmetrics=False)
    try:
        files.replace(path, data, _MODE)
    except OSError as error:
        raise MetricsError(
            f"{shown(path)} can't be written: {error.strerror or error}",
            "Name a file in a writable folder, for node_exporter its textfile folder",
        ) from None


def _gauge(name: str, about: str, labels: Iterable[str]) -> Family:
    return GaugeMetricFamily(name, about, labels=[*labels])


def _of_devices(snapshot: Snapshot) -> Iterator[Family]:
    info = _gauge(
        "gpuhook_gpu_info",
        "A device, or a part of one (parent), with its constant properties.",
        (*_DEVICE, "minor", "bus_id", "model", "driver", "parent", "mig_profile"),
    )
    for each in snapshot.devices:
        minor = "" if each.minor is None else str(each.minor)
        driver = snapshot.drivers.get(each.vendor, "")
        labels = [minor, each.bus_id, each.model, driver, each.parent, each.mig_profile]
        info.add_metric([*_device_labels(each), *labels], 1)
    yield info
    for name, about, value_of in _GAUGES:
        family = _gauge(f"gpuhook_gpu_{name}", about, _DEVICE)
        for each in snapshot.devices:
            value = value_of(each)
            if value is not None:
                family.add_metric(_device_labels(each), value)
        yield family
    yield from _of_energy_and_errors(snapshot)
    yield from _of_states(snapshot)


def _of_energy_and_errors(snapshot: Snapshot) -> Iterator[Family]:
    """Yield the counters."""
    energy = CounterMetricFamily(
        "gpuhook_gpu_energy_joules", "Energy since the driver was loaded.", labels=[*_DEVICE]
    )
    xids = CounterMetricFamily(
        "gpuhook_gpu_xid_errors",
        "Errors (XIDs) of the device since this was started.",
        labels=[*_DEVICE, "xid"],
    )
    memory = CounterMetricFamily(
        "gpuhook_gpu_ecc_errors",
        "Errors of the device's memory since the driver was loaded, corrected or not.",
        labels=[*_DEVICE, "kind"],
    )
    for each in snapshot.devices:
        labels = _device_labels(each)
        if each.energy_joules is not None:
            energy.add_metric(labels, each.energy_joules)
        for number, count in sorted((each.xids or {}).items()):
            xids.add_metric([*labels, str(number)], count)
        kinds = {"corrected": each.ecc_corrected, "uncorrected": each.ecc_uncorrected}
        for kind, errors in kinds.items():
            if errors is not None:
                memory.add_metric([*labels, kind], errors)
    yield from (energy, xids, memory)


def _of_states(snapshot: Snapshot) -> Iterator[Family]:
    """Yield the states of devices: 1 for each current state, and no sample for the others."""
    reasons = _gauge(
        "gpuhook_gpu_clock_reason",
        "1 for each reason why the clocks aren't the highest.",
        (*_DEVICE, "reason"),
    )
    recovery = _gauge(
        "gpuhook_gpu_recovery_action",
        "1 for the recovery action that the driver recommends.",
        (*_DEVICE, "action"),
    )
    for each in snapshot.devices:
        for reason in each.clock_reasons or ():
            reasons.add_metric([*_device_labels(each), reason], 1)
        if each.recovery:
            recovery.add_metric([*_device_labels(each), each.recovery], 1)
    yield from (reasons, recovery)


def _device_labels(device: Accelerator) -> list[str]:
    return [device.vendor, device.id, device.label]


def _container_labels(device: Accelerator, container: Container) -> list[str]:
    return [
        *_device_labels(device),
        container.id,
        container.engine,
        container.name,
        container.pod,
        container.namespace,
        container.container,
        container.slurm_job,
    ]


def _of_containers(snapshot: Snapshot) -> Iterator[Family]:
    assigned = _gauge(
        "gpuhook_container_gpu_assigned",
        "1 for each device allocated to a container, in use or not.",
        _CONTAINER,
    )
    for container, device in _pairs(snapshot):
        assigned.add_metric(_container_labels(device, container), 1)
    yield assigned
    memory = _gauge(
        "gpuhook_container_gpu_memory_used_bytes",
        "Device memory of a container's processes; container_id is empty outside of containers.",
        _CONTAINER,
    )
    share = _gauge(
        "gpuhook_container_gpu_sm_utilization_ratio",
        "Share of the device's multiprocessors that a container's processes used.",
        _CONTAINER,
    )
    count = _gauge(
        "gpuhook_container_gpu_processes", "A container's processes on the device.", _CONTAINER
    )
    limit = _gauge(
        "gpuhook_container_gpu_memory_limit_bytes",
        "A container's device memory limit; source is what enforces it and reports the use.",
        (*_CONTAINER, "source"),
    )
    for usage, labels in _usages(snapshot):
        if usage.memory_limit_bytes is not None:
            limit.add_metric([*labels, usage.memory_source], usage.memory_limit_bytes)
        if usage.memory_bytes is not None:
            memory.add_metric(labels, usage.memory_bytes)
        if usage.sm_utilization is not None:
            share.add_metric(labels, usage.sm_utilization)
        if usage.processes is not None:
            count.add_metric(labels, usage.processes)
    yield from (memory, limit, share, count)


def _usages(snapshot: Snapshot) -> Iterator[tuple[Usage, list[str]]]:
    devices = {device.id: device for device in snapshot.devices}
    containers = {each.id: each for each in snapshot.containers if each.id}
    for usage in snapshot.usages:
        device = devices.get(usage.device)
        if device is not None:
            container = containers.get(usage.container, Container(usage.container))
            yield usage, _container_labels(device, container)


def _pairs(snapshot: Snapshot) -> Iterator[tuple[Container, Accelerator]]:
    """Yield each container with each of its allocated devices."""
    devices = {device.id: device for device in snapshot.devices}
    for container in snapshot.containers:
        for name in container.devices:
            if name in devices:
                yield container, devices[name]


# Names of other exporters ---------------------------------------------------------------------


def _of_cadvisor(snapshot: Snapshot) -> Iterator[Family]:
    """Yield cAdvisor's three series: of the device, one for each container that has it."""
    labels = (
        "make", "model", "acc_id", "id", "name", "image", "container", "pod", "namespace",
    )  # fmt: skip
    families: tuple[tuple[str, str, Callable[[Accelerator], float | None]], ...] = (
        ("memory_total_bytes", "Total accelerator memory.", lambda it: it.memory_total_bytes),
        ("memory_used_bytes", "Total accelerator memory allocated.",
         lambda it: it.memory_used_bytes),
        ("duty_cycle", "Percent of time in which the accelerator was actively processing.",
         lambda it: None if it.utilization is None else it.utilization * _PERCENT),
    )  # fmt: skip
    for name, about, value_of in families:
        family = _gauge(f"container_accelerator_{name}", about, labels)
        for each, device in _pairs(snapshot):
            value = value_of(device)
            if value is not None:
                given = [each.id, each.name or each.id, each.image, each.container, each.pod]
                words = [device.vendor, device.model, device.id, *given, each.namespace]
                family.add_metric(words, value)
        yield family


def _of_vendors(snapshot: Snapshot) -> Iterator[Family]:
    """Yield the series of the vendors' own exporters, under their names."""
    for names in BUILT_IN.values():
        module = vendor_parts.exporter_series(names)
        for each in module.series(snapshot) if module is not None else ():
            family = Metric(each.name, each.about, each.kind)
            for labels, value in each.samples:
                family.add_sample(each.name, labels, value)
            yield family


def _of_ourselves(snapshot: Snapshot, seconds: float) -> Iterator[Family]:
    errors = CounterMetricFamily(
        "gpuhook_metrics_errors", "Failures since the start, by kind.", labels=["kind"]
    )
    for kind, count in sorted(snapshot.errors.items()):
        errors.add_metric([kind], count)
    yield errors
    yield GaugeMetricFamily(
        "gpuhook_metrics_scrape_duration_seconds", "Duration of this scrape.", value=seconds
    )
    steps = _gauge(
        "gpuhook_metrics_step_duration_seconds", "Duration of the scrape's steps.", ["step"]
    )
    for step, took in snapshot.durations.items():
        steps.add_metric([step], took)
    yield steps
    build = _gauge("gpuhook_build_info", "Versions of gpuhook and Python.", _BUILD)
    build.add_metric([__version__, platform.python_version()], 1)
    yield build
    daemon = _gauge(
        "gpuhook_mps_up",
        "1 if the MPS control daemon is running, else 0; absent if no GPU is shared by MPS.",
        [],
    )
    if snapshot.mps is not None:
        daemon.add_metric([], float(snapshot.mps))
    yield daemon
    yield GaugeMetricFamily(
        "gpuhook_metrics_complete",
        "1 if this scrape is complete, else 0; the service's log lists missing values.",
        value=float(not snapshot.problems),
    )
