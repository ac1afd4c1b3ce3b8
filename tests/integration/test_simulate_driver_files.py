"""A simulated driver over the real files of Debian's packages, queried by the real nvidia-smi."""

import os
import subprocess
from pathlib import Path

import pytest

from gpuhook.base.loader import ldcache
from gpuhook_simulate.vendors.nvidia import Built, Options, build


@pytest.fixture(scope="module")
def built(beside_driver_files: Path, driver_files: Path) -> Built:
    return build(
        Options(
            root=str(beside_driver_files / "simulated"),
            gpus=3,
            minors=(2, 0, 1),
            mig={1: ("3g.71gb", "1g.18gb")},
            driver_files=str(driver_files),
        )
    )


def nvidia_smi(built: Built, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the real program, which finds libnvidia-ml.so.1 by name."""
    program = f"{built.root}/usr/lib/nvidia/current/nvidia-smi"
    return subprocess.run(
        [program, *words],
        env={"LD_LIBRARY_PATH": f"{built.root}{built.library_dir}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_simulated_driver_files_are_laid_out_as_in_debian(built: Built) -> None:
    root, version = Path(built.root), built.driver_version
    public = built.library_dir.removesuffix("/nvidia/current")
    assert built.library_dir == f"{public}/nvidia/current"
    private = root / built.library_dir.lstrip("/")
    assert (private / f"libnvidia-encode.so.{version}").stat().st_size > 100_000
    assert (private / f"libcuda.so.{version}").stat().st_size < 1_000_000  # ours
    assert (private / f"libnvidia-ml.so.{version}").stat().st_size < 1_000_000
    entries = ldcache.parse((root / "etc/ld.so.cache").read_bytes(), "cache").entries
    paths = {entry.key: entry.value for entry in entries}
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-cfg.so.1", "libnvcuvid.so.1"):
        assert paths[name] == f"{public}/{name}"
        link = os.readlink(root / public.lstrip("/") / name)
        assert link.startswith("/etc/alternatives/")
    assert os.readlink(root / "usr/bin/nvidia-smi") == "/etc/alternatives/nvidia--nvidia-smi"
    assert (root / f"lib/firmware/nvidia/{version}/gsp_tu10x.bin").stat().st_size > 10_000_000


def test_simulating_over_driver_packages_leaves_their_files_unchanged(
    built: Built, driver_files: Path
) -> None:
    name = f"{built.library_dir.lstrip('/')}/libcuda.so.{built.driver_version}"
    assert (driver_files / name).stat().st_size > 10_000_000


def test_nvidia_smi_lists_simulated_gpus_and_mig_devices(built: Built) -> None:
    done = nvidia_smi(built, "-L")
    big, small = built.gpus[1].migs
    assert done.stdout.splitlines() == [
        f"GPU 0: NVIDIA H200 (UUID: {built.gpus[0].uuid})",
        f"GPU 1: NVIDIA H200 (UUID: {built.gpus[1].uuid})",
        f"  MIG 3g.71gb     Device  0: (UUID: {big.uuid})",
        f"  MIG 1g.18gb     Device  1: (UUID: {small.uuid})",
        f"GPU 2: NVIDIA H200 (UUID: {built.gpus[2].uuid})",
    ]
    assert (done.returncode, done.stderr) == (0, "")


def test_the_simulated_nvidia_smi_lists_the_same_as_the_real_one(
    built: Built, workspace: Path
) -> None:
    other = Options(
        root=str(workspace / "ours"),
        gpus=3,
        minors=(2, 0, 1),
        mig={1: ("3g.71gb", "1g.18gb")},
        driver_version=built.driver_version,
    )
    ours = build(other)
    done = subprocess.run(
        [f"{ours.root}/usr/bin/nvidia-smi", "-L"],
        env={"LD_LIBRARY_PATH": f"{ours.root}{ours.library_dir}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == nvidia_smi(built, "-L").stdout


def test_nvidia_smi_prints_its_table(built: Built) -> None:
    done = nvidia_smi(built)
    assert done.returncode == 0
    assert f"Driver Version: {built.driver_version}" in done.stdout
    assert "No running processes found" in done.stdout
    assert "/ 70912MiB" in done.stdout  # the MIG device's memory


def test_nvidia_smi_answers_queries_for_simulated_gpus(built: Built) -> None:
    fields = "index,uuid,pci.bus_id,memory.total,mig.mode.current,driver_version"
    done = nvidia_smi(built, f"--query-gpu={fields}", "--format=csv,noheader")
    assert done.stdout.splitlines() == [
        f"{at}, {gpu.uuid}, {gpu.pci_bus_id}, 143771 MiB, {mode}, {built.driver_version}"
        for at, (gpu, mode) in enumerate(
            zip(built.gpus, ("Disabled", "Enabled", "Disabled"), strict=True)
        )
    ]
    details = nvidia_smi(built, "-q", "-i", built.gpus[2].uuid)
    assert details.returncode == 0
    assert "Minor Number                          : 1\n" in details.stdout


def test_nvidia_smi_lists_mig_instances(built: Built) -> None:
    lines = [
        " ".join(line.split()) for line in nvidia_smi(built, "mig", "-lgi").stdout.splitlines()
    ]
    assert "| 1 MIG 3g.71gb 9 1 4:4 |" in lines
    assert "| 1 MIG 1g.18gb 19 7 0:1 |" in lines


def test_nvidia_smi_reports_an_unloaded_driver(built: Built) -> None:
    nodes = Path(built.root) / "dev"
    (nodes / "nvidiactl").rename(nodes / "away")
    try:
        done = nvidia_smi(built, "-L")
    finally:
        (nodes / "away").rename(nodes / "nvidiactl")
    assert done.returncode == 9
    assert "couldn't communicate with the NVIDIA driver" in done.stdout
