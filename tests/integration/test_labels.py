"""The command gpuhook labels: GPU feature discovery's labels of simulated GPUs."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.commands import Result, run, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

Labels = Callable[..., Result]


@pytest.fixture
def labels(installation: Installation, tmp_path: Path) -> Labels:
    """A function that calls gpuhook labels."""
    config = write_config(tmp_path / "config", tmp_path / "root", ["runc"])

    def call(*words: str, **environ: str) -> Result:
        argv = [str(installation.command), "labels", "--config", str(config), *words]
        return run(argv, env={**os.environ, **environ})

    return call


@pytest.fixture
def machine(installation: Installation, tmp_path: Path) -> Callable[..., Driver]:
    return lambda *options: simulate(installation, tmp_path / "root", *options)


def said(result: Result) -> dict[str, str]:
    pairs = (line.partition("=") for line in result.ok().stdout.splitlines())
    return {key.removeprefix("nvidia.com/"): value for key, _, value in pairs}


def test_labels_of_whole_gpus_are_complete(machine: Callable[..., Driver], labels: Labels) -> None:
    driver = machine("--gpus", "8", "--set", "model=A100")
    found = said(labels())
    major, minor, revision = driver.version.split(".")
    expected = {
        "cuda.driver.major": major, "cuda.driver.minor": minor, "cuda.driver.rev": revision,
        "cuda.driver-version.major": major, "cuda.driver-version.minor": minor,
        "cuda.driver-version.revision": revision, "cuda.driver-version.full": driver.version,
        "cuda.runtime.major": "13", "cuda.runtime.minor": "0", "cuda.runtime-version.major": "13",
        "cuda.runtime-version.minor": "0", "cuda.runtime-version.full": "13.0",
        "gpu.compute.major": "8", "gpu.compute.minor": "0", "gpu.count": "8",
        "gpu.family": "ampere", "gpu.machine": found["gpu.machine"], "gpu.memory": "81920",
        "gpu.mode": "compute", "gpu.product": "NVIDIA-A100-SXM4-80GB", "gpu.replicas": "1",
        "gpu.sharing-strategy": "none", "mig.capable": "true", "mps.capable": "false",
    }  # fmt: skip
    assert found == expected
    assert json.loads(labels("--format", "json").ok().stdout) == {
        f"nvidia.com/{key}": value for key, value in expected.items()
    }


def test_labels_name_shared_gpus_and_replicas(
    machine: Callable[..., Driver], labels: Labels, tmp_path: Path
) -> None:
    machine("--gpus", "1", "--set", "model=L4")
    file = tmp_path / "plugin.yaml"
    shares = "resources:\n    - {name: nvidia.com/gpu, replicas: 4}"
    file.write_text(f"version: v1\nsharing:\n  timeSlicing:\n    {shares}\n")
    found = said(labels(CONFIG_FILE=str(file)))
    assert found["gpu.product"] == "NVIDIA-L4-SHARED"
    assert found["gpu.replicas"] == "4"
    assert found["gpu.family"] == "ada-lovelace"
    assert found["mig.capable"] == "false"
    file.write_text(
        f"version: v1\nsharing:\n  timeSlicing:\n    renameByDefault: true\n    {shares}\n"
    )
    found = said(labels("--config-file", str(file)))
    assert found["gpu.product"] == "NVIDIA-L4"
    assert found["gpu.replicas"] == "4"


MIXED = ("--gpus", "2", "--set", "model=H100", "--set", "mig=0:1g.10gb,1g.10gb,1g.10gb+me")


def test_labels_of_mixed_mig_devices_are_per_profile(
    machine: Callable[..., Driver], labels: Labels
) -> None:
    machine(*MIXED)
    found = said(labels(MIG_STRATEGY="mixed"))
    assert found["mig.strategy"] == "mixed"
    mine = "mig-1g.10gb."
    part = {key.removeprefix(mine): value for key, value in found.items() if key.startswith(mine)}
    part = {key: value for key, value in part.items() if not key.startswith("me.")}
    assert part == {
        "product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "count": "2", "replicas": "1",
        "sharing-strategy": "none", "memory": "9984", "multiprocessors": "16",
        "slices.gi": "1", "slices.ci": "1", "engines.copy": "1", "engines.decoder": "1",
        "engines.encoder": "0", "engines.jpeg": "0", "engines.ofa": "0",
    }  # fmt: skip
    assert found["mig-1g.10gb.me.count"] == "1"
    assert found["gpu.count"] == "2"
    assert found["gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert not any(key.startswith("mig-") for key in said(labels()))


def test_labels_of_single_mig_devices_replace_the_gpus(
    machine: Callable[..., Driver], labels: Labels
) -> None:
    machine("--gpus", "1", "--set", "model=H100", "--set", "mig=0:3g.40gb,3g.40gb")
    found = said(labels(MIG_STRATEGY="single"))
    assert found["gpu.product"] == "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb"
    assert found["gpu.count"] == "2"
    assert found["gpu.memory"] == "40320"
    assert found["gpu.slices.gi"] == "3"
    assert found["gpu.family"] == "hopper"


def test_different_mig_devices_are_invalid_with_the_single_strategy(
    machine: Callable[..., Driver], labels: Labels
) -> None:
    machine(*MIXED)
    found = said(labels(MIG_STRATEGY="single"))
    assert found["gpu.product"] == "NVIDIA-H100-80GB-HBM3-MIG-INVALID"
    names = ("count", "replicas", "memory", "sharing-strategy")
    assert [found[f"gpu.{each}"] for each in names] == ["0", "0", "0", ""]


# Names of GPU feature discovery's labels on five kinds of machines, and patterns of their values.
COMMON = {
    "gfd.timestamp": r"\d{10}",
    **dict.fromkeys(("cuda.driver.major", "cuda.driver.minor"), r"\d+"),
    **dict.fromkeys(("cuda.driver.rev", "cuda.driver-version.revision"), r"\d*"),
    **dict.fromkeys(("cuda.driver-version.major", "cuda.driver-version.minor"), r"\d+"),
    "cuda.driver-version.full": r"\d+(\.\d+){1,2}",
    **dict.fromkeys(("cuda.runtime.major", "cuda.runtime.minor"), r"\d+"),
    **dict.fromkeys(("cuda.runtime-version.major", "cuda.runtime-version.minor"), r"\d+"),
    "cuda.runtime-version.full": r"\d+\.\d+",
    "gpu.machine": r".+",
    **dict.fromkeys(("gpu.count", "gpu.replicas", "gpu.memory"), r"\d+"),
    "gpu.sharing-strategy": "none|mps|time-slicing",
    "gpu.product": r"[-\w.]+",
    "gpu.family": r"[-a-z]+",
    "gpu.mode": "unknown|compute|graphics",
    **dict.fromkeys(("gpu.compute.major", "gpu.compute.minor"), r"\d+"),
    **dict.fromkeys(("mig.capable", "mps.capable"), "true|false"),
}
ATTRIBUTES = (
    "multiprocessors", "engines.copy", "engines.decoder", "engines.encoder", "engines.jpeg",
    "engines.ofa", "slices.gi", "slices.ci",
)  # fmt: skip
STRATEGY = {"mig.strategy": "single|mixed"}
PART = {
    "product": r"[-\w.]+", "sharing-strategy": "none|mps|time-slicing",
    **dict.fromkeys(("count", "replicas", "memory", *ATTRIBUTES), r"\d+"),
}  # fmt: skip
VGPU = {
    "vgpu.present": "true|false", "vgpu.host-driver-branch": ".*", "vgpu.host-driver-version": ".*"
}  # fmt: skip
LISTS = {
    "no MIG": ((), "none", COMMON),
    "MIG, not handed out": (("mig=0:1g.10gb",), "none", COMMON),
    "MIG, single": (
        ("mig=0:1g.10gb", "mig=1:1g.10gb"), "single",
        {**COMMON, **STRATEGY, **{f"gpu.{name}": r"\d+" for name in ATTRIBUTES}},
    ),
    "MIG, mixed": (
        ("mig=0:1g.10gb",), "mixed",
        {**COMMON, **STRATEGY, **{f"mig-1g.10gb.{name}": form for name, form in PART.items()}},
    ),
    "vGPU": ((), "none", {**COMMON, **VGPU}),
}  # fmt: skip
# Labels that gpuhook doesn't have, as docs/kubernetes/labels.md says.
MISSING = {"gfd.timestamp", *VGPU}


@pytest.mark.parametrize("name", LISTS)
def test_label_names_equal_those_of_gpu_feature_discovery(
    name: str, machine: Callable[..., Driver], labels: Labels
) -> None:
    settings, strategy, expected = LISTS[name]
    machine("--gpus", "2", "--set", "model=H100", *(f"--set={each}" for each in settings))
    found = said(labels(MIG_STRATEGY=strategy))
    assert {*found} == {*expected} - MISSING
    strange = {key: value for key, value in found.items() if not re.fullmatch(expected[key], value)}
    assert strange == {}


@pytest.mark.parametrize(
    ("way", "replicas", "strategy"),
    [("timeSlicing", 10, "time-slicing"), ("mps", 4, "mps"), ("memory", 4, "time-slicing")],
)
@pytest.mark.parametrize(("resource", "prefix"), [("gpu", "gpu"), ("mig-1g.10gb", "mig-1g.10gb")])
def test_labels_name_the_sharing_strategy_and_replicas(
    way: str,
    replicas: int,
    strategy: str,
    resource: str,
    prefix: str,
    machine: Callable[..., Driver],
    labels: Labels,
    tmp_path: Path,
) -> None:
    machine("--gpus", "2", "--set", "model=H100", "--set", "mig=0:1g.10gb")
    file = tmp_path / "plugin.yaml"
    shared = f"resources: [{{name: nvidia.com/{resource}, replicas: {replicas}}}]"
    flags = "flags: {plugin: {deviceListStrategy: volume-mounts}}"  # needed for sharing of memory
    file.write_text(f"sharing: {{{way}: {{{shared}}}}}\n{flags}\n")
    found = said(labels("--config-file", str(file), MIG_STRATEGY="mixed"))
    prefixes = ("gpu", "mig-1g.10gb")
    assert {each: found[f"{each}.sharing-strategy"] for each in prefixes} == {
        **dict.fromkeys(prefixes, "none"), prefix: strategy,
    }  # fmt: skip
    assert found[f"{prefix}.replicas"] == str(replicas)


def test_the_label_file_is_replaced_only_on_changes_and_removed(
    machine: Callable[..., Driver], labels: Labels, tmp_path: Path
) -> None:
    machine("--gpus", "1")
    folder = tmp_path / "features.d"
    file = folder / "gpuhook"
    printed = labels().ok().stdout
    assert labels("--output", str(file)).ok().stdout == f"wrote {file}\n"
    assert file.read_text() == printed
    before = file.stat()
    assert labels("--output", str(file)).ok().stdout == ""
    assert file.stat() == before
    file.write_text("old=1\n")
    with file.open() as reader:
        labels("--output", str(file)).ok()
        assert reader.read() == "old=1\n"  # the file was replaced, so a reader sees the old one
    assert os.listdir(folder) == ["gpuhook"]
    labels("--output", str(file), "--remove").ok()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_labels_service_ends_at_a_signal_as_a_pods_first_process(
    machine: Callable[..., Driver], installation: Installation, tmp_path: Path, number: int
) -> None:
    """The kernel ignores signals to a pod's first process if that has no handler for them."""
    machine("--gpus", "1")
    config = write_config(tmp_path / "config", tmp_path / "root", ["runc"])
    file = tmp_path / "features.d/gpuhook"
    words = ["labels", f"--config={config}", f"--output={file}", "--interval=1000"]
    process = subprocess.Popen([str(installation.command), *words], stdout=subprocess.DEVNULL)
    try:
        wait_until(file.exists, "the labels are written")
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_failing_driver_keeps_the_label_file(
    machine: Callable[..., Driver], labels: Labels, tmp_path: Path
) -> None:
    driver = machine("--gpus", "1")
    file = tmp_path / "features.d/gpuhook"
    labels("--output", str(file)).ok()
    before = file.read_text()
    driver.library("libnvidia-ml.so.1").write_bytes(b"nothing")
    result = labels("--output", str(file)).failed()
    assert "Traceback" not in result.stderr
    assert file.read_text() == before


@pytest.mark.parametrize(
    "words",
    [("--remove",), ("--interval", "5"), ("--output", "x", "--node", "y"), ("--node", "A/B")],
)
def test_invalid_option_combinations_are_refused(words: tuple[str, ...], labels: Labels) -> None:
    result = labels(*words).failed()
    assert result.stderr.startswith("gpuhook: ")
