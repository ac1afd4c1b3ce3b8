"""gpuhook labels as it is called: GPU feature discovery's labels of simulated GPUs."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.commands import Result, run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

Labels = Callable[..., Result]


@pytest.fixture
def labels(installation: Installation, tmp_path: Path) -> Labels:
    """Return what makes a machine of options and calls the command for it."""
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


def test_gpus(machine: Callable[..., Driver], labels: Labels) -> None:
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
        "mig.capable": "true", "mps.capable": "false",
    }  # fmt: skip
    assert found == expected
    assert json.loads(labels("--format", "json").ok().stdout) == {
        f"nvidia.com/{key}": value for key, value in expected.items()
    }


def test_shared_gpus(machine: Callable[..., Driver], labels: Labels, tmp_path: Path) -> None:
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


def test_mixed_mig_devices(machine: Callable[..., Driver], labels: Labels) -> None:
    machine(*MIXED)
    found = said(labels(MIG_STRATEGY="mixed"))
    assert found["mig.strategy"] == "mixed"
    mine = "mig-1g.10gb."
    part = {key.removeprefix(mine): value for key, value in found.items() if key.startswith(mine)}
    part = {key: value for key, value in part.items() if not key.startswith("me.")}
    assert part == {
        "product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "count": "2", "replicas": "1",
        "memory": "9984", "multiprocessors": "16", "slices.gi": "1", "slices.ci": "1",
        "engines.copy": "1", "engines.decoder": "1", "engines.encoder": "0", "engines.jpeg": "0",
        "engines.ofa": "0",
    }  # fmt: skip
    assert found["mig-1g.10gb.me.count"] == "1"
    assert found["gpu.count"] == "2"
    assert found["gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert not any(key.startswith("mig-") for key in said(labels()))


def test_single_mig_devices(machine: Callable[..., Driver], labels: Labels) -> None:
    machine("--gpus", "1", "--set", "model=H100", "--set", "mig=0:3g.40gb,3g.40gb")
    found = said(labels(MIG_STRATEGY="single"))
    assert found["gpu.product"] == "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb"
    assert found["gpu.count"] == "2"
    assert found["gpu.memory"] == "40320"
    assert found["gpu.slices.gi"] == "3"
    assert found["gpu.family"] == "hopper"


def test_mig_devices_that_are_not_alike(machine: Callable[..., Driver], labels: Labels) -> None:
    machine(*MIXED)
    found = said(labels(MIG_STRATEGY="single"))
    assert found["gpu.product"] == "NVIDIA-H100-80GB-HBM3-MIG-INVALID"
    assert [found[f"gpu.{each}"] for each in ("count", "replicas", "memory")] == ["0", "0", "0"]


def test_a_file(machine: Callable[..., Driver], labels: Labels, tmp_path: Path) -> None:
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
        assert reader.read() == "old=1\n"  # who reads has the old file whole: it was replaced
    assert os.listdir(folder) == ["gpuhook"]
    labels("--output", str(file), "--remove").ok()
    assert os.listdir(folder) == []


def test_a_driver_that_fails_leaves_the_file(
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
def test_what_does_not_go_together(words: tuple[str, ...], labels: Labels) -> None:
    result = labels(*words).failed()
    assert result.stderr.startswith("gpuhook: ")
