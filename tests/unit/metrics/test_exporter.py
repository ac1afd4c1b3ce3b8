"""A snapshot as Prometheus text: names, labels, escapes, formats."""

import re
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuhook import __version__
from gpuhook.base.errors import MetricsError
from gpuhook.metrics import exporter
from gpuhook.metrics.model import Accelerator, Container, SeriesOptions, Snapshot, Usage

GPU = Accelerator(
    "nvidia", "GPU-1", "0", 3, "0000:1b:00.0", "NVIDIA H200",
    memory_total_bytes=100 << 20, memory_used_bytes=30 << 20, memory_reserved_bytes=10 << 20,
    utilization=0.6, temperature_celsius=40, power_watts=70.5, energy_joules=12.5,
    memory_temperature_celsius=48, ecc_corrected=3, ecc_uncorrected=0,
    clock_reasons=("sw_power_cap", "sync_boost"), recovery="gpu_reset",
    xids={79: 2, 13: 1}, readings={"SM_CLOCK": 1980, "PROF_DRAM_ACTIVE": 0.25},
)  # fmt: skip
PART = Accelerator(
    "nvidia", "MIG-1", "0:1", 3, "0000:1b:00.0", "NVIDIA H200 MIG 1g.18gb", "GPU-1", "1g.18gb", 7,
    memory_used_bytes=0, utilization=0.5, readings={"PROF_DRAM_ACTIVE": 0.75},
)  # fmt: skip
POD = Container(
    "c1", "kubernetes", "", "pod", "space", "web", "uid", "image", devices=("GPU-1", "MIG-gone")
)
NASTY = 'a"b\\c\nd'
OTHER = Container("c2", "docker", NASTY)
LOOK = Snapshot(
    (GPU, PART),
    (POD, OTHER),
    (
        Usage("c1", "GPU-1", 5, 0.25, 2),
        Usage("c2", "MIG-1", None, None, 1),
        Usage("", "GPU-1", 7, 0.0, 1),
        Usage("c1", "GPU-gone", 1, 1.0, 1),
    ),
    {"nvidia": "580.65.06"},
    {"timeout": 3},
    {"driver": 0.5},
)

Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(options: SeriesOptions | None = None, look: Snapshot = LOOK) -> Samples:
    body = exporter.text(look, options or SeriesOptions(), 0.25, openmetrics=False)
    found: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for each in family.samples:
            # The parser appends _total to the name of every counter.
            name = each.name if each.name.encode() in body else each.name.removesuffix("_total")
            found.setdefault(name, []).append((each.labels, each.value))
    return found


def test_device_samples_have_the_right_labels_and_values() -> None:
    found = samples()
    uuid = {"vendor": "nvidia", "uuid": "GPU-1", "index": "0"}
    part = {"vendor": "nvidia", "uuid": "MIG-1", "index": "0:1"}
    more = {"minor": "3", "bus_id": "0000:1b:00.0", "driver": "580.65.06"}
    whole = {**uuid, **more, "model": "NVIDIA H200", "parent": "", "mig_profile": ""}
    assert (whole, 1.0) in found["gpuhook_gpu_info"]
    [labels] = [labels for labels, _ in found["gpuhook_gpu_info"] if labels["uuid"] == "MIG-1"]
    assert (labels["parent"], labels["mig_profile"]) == ("GPU-1", "1g.18gb")
    used = [(uuid, 30 << 20), (part, 0)]
    assert found["gpuhook_gpu_memory_used_bytes"] == used
    assert found["gpuhook_gpu_memory_total_bytes"] == [(uuid, 100 << 20)]
    assert found["gpuhook_gpu_utilization_ratio"] == [(uuid, 0.6), (part, 0.5)]
    assert found["gpuhook_gpu_memory_temperature_celsius"] == [(uuid, 48)]
    errors = [({**uuid, "kind": "corrected"}, 3), ({**uuid, "kind": "uncorrected"}, 0)]
    assert found["gpuhook_gpu_ecc_errors_total"] == errors
    reasons = [({**uuid, "reason": word}, 1) for word in ("sw_power_cap", "sync_boost")]
    assert found["gpuhook_gpu_clock_reason"] == reasons
    assert found["gpuhook_gpu_recovery_action"] == [({**uuid, "action": "gpu_reset"}, 1)]
    assert found["gpuhook_gpu_temperature_celsius"] == [(uuid, 40)]
    assert found["gpuhook_gpu_power_watts"] == [(uuid, 70.5)]
    assert found["gpuhook_gpu_energy_joules_total"] == [(uuid, 12.5)]
    errors = [({**uuid, "xid": "13"}, 1), ({**uuid, "xid": "79"}, 2)]
    assert found["gpuhook_gpu_xid_errors_total"] == errors


def test_a_memory_limit_sample_has_its_source_as_label() -> None:
    usage = Usage("c1", "GPU-1", 5, memory_limit_bytes=8, memory_source="dmem")
    found = samples(look=Snapshot((GPU,), (POD,), (usage,)))
    [(labels, value)] = found["gpuhook_container_gpu_memory_limit_bytes"]
    assert (labels["source"], labels["container_id"], value) == ("dmem", "c1", 8)
    assert "gpuhook_container_gpu_memory_limit_bytes" not in samples()


def test_container_samples_have_the_right_labels_and_values() -> None:
    found = samples()
    labels = {
        "vendor": "nvidia", "uuid": "GPU-1", "index": "0", "container_id": "c1",
        "engine": "kubernetes", "name": "", "pod": "pod", "namespace": "space", "container": "web",
        "slurm_job": "",
    }  # fmt: skip
    nobody = {**dict.fromkeys(labels, ""), "vendor": "nvidia", "uuid": "GPU-1", "index": "0"}
    assert found["gpuhook_container_gpu_assigned"] == [(labels, 1)]
    memory = [(labels, 5), (nobody, 7)]
    assert found["gpuhook_container_gpu_memory_used_bytes"] == memory
    share = [(labels, 0.25), (nobody, 0)]
    assert found["gpuhook_container_gpu_sm_utilization_ratio"] == share
    assert [value for _, value in found["gpuhook_container_gpu_processes"]] == [2, 1, 1]


def test_quotes_and_newlines_in_labels_are_escaped() -> None:
    names = [labels["name"] for labels, _ in samples()["gpuhook_container_gpu_processes"]]
    assert NASTY in names
    body = exporter.text(LOOK, SeriesOptions(), 0.0, openmetrics=False)
    assert rb'name="a\"b\\c\nd"' in body


def test_samples_about_the_exporter_itself_are_written() -> None:
    found = samples()
    assert found["gpuhook_metrics_errors_total"] == [({"kind": "timeout"}, 3)]
    assert found["gpuhook_metrics_scrape_duration_seconds"] == [({}, 0.25)]
    assert found["gpuhook_metrics_step_duration_seconds"] == [({"step": "driver"}, 0.5)]
    assert found["gpuhook_metrics_complete"] == [({}, 1)]
    [(labels, one)] = samples()["gpuhook_build_info"]
    assert (labels["version"], one) == (__version__, 1)
    assert labels["python_version"].startswith("3.")
    assert samples(look=Snapshot(problems=("?",)))["gpuhook_metrics_complete"] == [({}, 0)]


def test_cadvisor_series_are_written_only_on_request() -> None:
    assert not [name for name in samples() if not name.startswith("gpuhook_")]
    found = samples(SeriesOptions(cadvisor=True))
    [(labels, value)] = found["container_accelerator_duty_cycle"]
    assert value == 60
    assert labels == {
        "make": "nvidia", "model": "NVIDIA H200", "acc_id": "GPU-1", "id": "c1", "name": "c1",
        "image": "image", "container": "web", "pod": "pod", "namespace": "space",
    }  # fmt: skip
    assert found["container_accelerator_memory_total_bytes"][0][1] == 100 << 20
    assert found["container_accelerator_memory_used_bytes"][0][1] == 30 << 20


def test_dcgm_series_have_dcgms_labels_and_values() -> None:
    found = samples(SeriesOptions(dcgm=True))
    [(labels, value)] = found["DCGM_FI_DEV_GPU_UTIL"]
    assert value == 60
    assert labels == {
        "gpu": "0", "UUID": "GPU-1", "pci_bus_id": "00000000:1B:00.0", "device": "nvidia3",
        "modelName": "NVIDIA H200", "DCGM_FI_DRIVER_VERSION": "580.65.06", "container": "web",
        "namespace": "space", "pod": "pod", "pod_uid": "uid",
    }  # fmt: skip
    whole = samples(SeriesOptions(dcgm=True), replace(LOOK, devices=(GPU,)))
    values = {name.removeprefix("DCGM_FI_DEV_"): each[0][1] for name, each in whole.items()}
    assert values["FB_FREE"] == 60
    assert (values["FB_USED"], values["FB_RESERVED"], values["SM_CLOCK"]) == (30, 10, 1980)
    assert (values["TOTAL_ENERGY_CONSUMPTION"], values["XID_ERRORS"]) == (12500, 13)
    [part] = [labels for labels, _ in found["DCGM_FI_DEV_FB_USED"] if "GPU_I_ID" in labels]
    assert (part["UUID"], part["GPU_I_PROFILE"], part["GPU_I_ID"]) == ("GPU-1", "1g.18gb", "7")
    assert "pod" not in part
    assert (values["MEMORY_TEMP"], values["ECC_SBE_VOL_TOTAL"], values["ECC_DBE_VOL_TOTAL"]) == (
        48, 3, 0,
    )  # fmt: skip
    assert [value for _, value in found["DCGM_FI_PROF_DRAM_ACTIVE"]] == [0.75]
    assert len(found["DCGM_FI_DEV_GPU_UTIL"]) == 1  # DCGM has no such series for MIG devices


# The series that DCGM's exporter has by default (without a file), and their types.
DEFAULTS = {
    **dict.fromkeys(
        (
            "DEV_SM_CLOCK", "DEV_MEM_CLOCK", "DEV_MEMORY_TEMP", "DEV_GPU_TEMP", "DEV_POWER_USAGE",
            "DEV_GPU_UTIL", "DEV_MEM_COPY_UTIL", "DEV_ENC_UTIL", "DEV_DEC_UTIL", "DEV_XID_ERRORS",
            "DEV_FB_FREE", "DEV_FB_USED", "DEV_FB_RESERVED", "DEV_VGPU_LICENSE_STATUS",
            "DEV_ROW_REMAP_FAILURE", "PROF_GR_ENGINE_ACTIVE", "PROF_PIPE_TENSOR_ACTIVE",
            "PROF_DRAM_ACTIVE", "PROF_PCIE_TX_BYTES", "PROF_PCIE_RX_BYTES",
        ),
        "gauge",
    ),
    **dict.fromkeys(
        (
            "DEV_TOTAL_ENERGY_CONSUMPTION", "DEV_PCIE_REPLAY_COUNTER", "DEV_NVLINK_BANDWIDTH_TOTAL",
            "DEV_UNCORRECTABLE_REMAPPED_ROWS", "DEV_CORRECTABLE_REMAPPED_ROWS",
        ),
        "counter",
    ),
}  # fmt: skip


def test_all_default_series_of_the_dcgm_exporter_are_written() -> None:
    options = SeriesOptions(dcgm=True)
    body = exporter.text(LOOK, options, 0.0, openmetrics=False).decode()
    types = dict(re.findall(r"^# TYPE DCGM_FI_(\S+) (\S+)$", body, re.MULTILINE))
    assert {name: types.get(name) for name in DEFAULTS} == DEFAULTS
    assert set(types.values()) == {"gauge", "counter"}
    assert "DCGM_FI_DRIVER_VERSION" in samples(options)["DCGM_FI_DEV_FB_USED"][0][0]


@pytest.mark.protects(
    "series-once",
    "each metric series appears only once in a scrape",
    instead='series[f"{sample.name}{labels}{len(series)}"] = sample.value',
)
def test_dcgm_series_count_a_gpu_in_mig_mode_once() -> None:
    """The sum over a DCGM series is the total of the host, even if GPUs are divided."""
    memory: Any = {"memory_total_bytes": 50 << 20, "memory_reserved_bytes": 5 << 20}
    parts = [replace(PART, id=f"MIG-{n}", gpu_instance=n, memory_used_bytes=n << 20, **memory)
             for n in (10, 20)]  # fmt: skip
    other = replace(GPU, id="GPU-2", label="1")
    pod = replace(POD, devices=("MIG-10",))
    look = Snapshot((GPU, *parts, other), (pod,))
    found = samples(SeriesOptions(dcgm=True), look)
    mine = {name: [value for labels, value in each if labels["UUID"] == "GPU-1"]
            for name, each in found.items() if name.startswith("DCGM")}  # fmt: skip
    for name, values in (("USED", [10, 20]), ("FREE", [35, 25]), ("RESERVED", [5, 5])):
        assert mine[f"DCGM_FI_DEV_FB_{name}"] == values
    assert mine["DCGM_FI_PROF_DRAM_ACTIVE"] == [0.75, 0.75]
    once = {name: values for name, values in mine.items() if len(values) == 1}
    assert once.keys() >= {f"DCGM_FI_DEV_{name}" for name in (
        "GPU_TEMP", "POWER_USAGE", "TOTAL_ENERGY_CONSUMPTION", "XID_ERRORS", "SM_CLOCK"
    )}  # fmt: skip
    assert {len(values) for values in mine.values()} == {1, 2}
    [given] = [labels for labels, _ in found["DCGM_FI_DEV_FB_USED"] if "pod" in labels]
    assert given["GPU_I_ID"] == "10"
    whole = [labels for labels, _ in found["DCGM_FI_DEV_FB_USED"] if "GPU_I_ID" not in labels]
    assert [each["UUID"] for each in whole] == ["GPU-2"]


@pytest.mark.protects(
    "series-once",
    "each metric series appears only once in a scrape",
    instead='series[f"{sample.name}{labels}{len(series)}"] = sample.value',
)
def test_no_series_is_written_twice() -> None:
    """Two compute instances of a GPU instance, or a pod listed twice, produce only one series."""
    parts = [replace(PART, id=f"MIG-{number}", mig_profile=f"{number}c.3g.40gb")
             for number in (1, 2)]  # fmt: skip
    pods = [replace(POD, id="", devices=("MIG-1",)), replace(POD, id="", devices=("MIG-2",))]
    again = [replace(POD, id=each) for each in ("c1", "c3")]
    for containers in ((), pods, again, [*pods, *pods]):
        look = Snapshot((GPU, *parts), tuple(containers))
        for name, found in samples(SeriesOptions(cadvisor=True, dcgm=True), look).items():
            every = [tuple(sorted(labels.items())) for labels, _ in found]
            assert len(every) == len({*every}), name
    [part] = [labels for labels, _ in samples(SeriesOptions(dcgm=True), look)["DCGM_FI_DEV_FB_USED"]
              if "GPU_I_ID" in labels]  # fmt: skip
    assert part["GPU_I_PROFILE"] == "3g.40gb"


def test_dcgm_series_of_slurm_jobs_have_the_job_label() -> None:
    jobs = [Container(f"c{job}", slurm_job=job) for job in ("41", "41 again", "42")]
    jobs[1] = Container("c1", slurm_job="41")
    uses = [Usage(each.id, "GPU-1", 1, None, 1) for each in jobs[:2]]
    idle = Usage(jobs[2].id, "GPU-1", 0, None, 0)
    look = Snapshot((GPU, PART), tuple(jobs), (*uses, idle))
    found = samples(SeriesOptions(dcgm=True), look)["DCGM_FI_DEV_FB_USED"]
    assert [labels.get("hpc_job") for labels, _ in found] == [None]  # the MIG device's series
    found = samples(SeriesOptions(dcgm=True), replace(look, devices=(GPU,)))["DCGM_FI_DEV_FB_USED"]
    assert [labels.get("hpc_job") for labels, _ in found] == ["41"]
    given = Snapshot((GPU,), (Container("c", devices=("GPU-1",), slurm_job="43"),))
    found = samples(SeriesOptions(dcgm=True), given)["DCGM_FI_DEV_FB_USED"]
    assert [labels["hpc_job"] for labels, _ in found] == ["43"]
    assert samples(look=look)["gpuhook_container_gpu_processes"][0][0]["slurm_job"] == "41"


@pytest.mark.parametrize("options", [SeriesOptions(), SeriesOptions(cadvisor=True, dcgm=True)])
def test_each_metric_family_is_written_once(options: SeriesOptions) -> None:
    body = exporter.text(LOOK, options, 0.0, openmetrics=False)
    assert body.endswith(b"\n")
    types = re.findall(r"^# TYPE (\S+)", body.decode(), re.MULTILINE)
    assert len(types) == len({*types})


def test_openmetrics_text_ends_with_eof() -> None:
    body = exporter.text(LOOK, SeriesOptions(), 0.0, openmetrics=True)
    assert body.endswith(b"# EOF\n")
    assert b"gpuhook_gpu_energy_joules_total{" in body


def test_a_metrics_file_that_cannot_be_written_is_an_error(tmp_path: object) -> None:
    with pytest.raises(MetricsError, match="can't be written"):
        exporter.write(LOOK, SeriesOptions(), 0.0, f"{tmp_path}/none/metrics.prom")
