"""gVisor's runsc as gpu-py's low-level runtime, which uses the contents of config.json itself.

Debian's runsc has nvproxy, which stands for NVIDIA's kernel module in the sandbox. The tests
run without that module, so no node can be opened; they check only nodes and files.
"""

import subprocess
from pathlib import Path

import pytest
from harness.bundles import GpuBundle
from harness.commands import Result
from harness.driver import Driver
from harness.installation import write_config
from harness.prefork import ONE

OPTIONS = "--nvproxy --nvproxy-driver-version=550.90.07 --network=none --ignore-cgroups"
SEE = """
for node in /dev/nvidia* /dev/dri/*; do [ ! -c $node ] || echo $node; done
busybox sha256sum {files}
echo
"""
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


@pytest.fixture
def runsc(bundle: GpuBundle, gvisor_root: Path) -> Path:
    """A program that calls runsc with its own options, as containerd and Docker are set up."""
    program = bundle.path / "runsc"
    real = gvisor_root / "usr/bin/runsc"
    program.write_text(f'#!/bin/sh\nexec {real} --root={bundle.path}/state {OPTIONS} "$@"\n')
    program.chmod(0o755)
    return program


def configured(bundle: GpuBundle, driver: Driver, runsc: Path, mode: str) -> Path:
    more = f'mode = "{mode}"\n[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{bundle.path}"]'
    config = write_config(bundle.path / "etc", driver.root, [runsc], more)
    (config.parent / "state").mkdir()
    return config


def run(bundle: GpuBundle, runsc: Path, config: Path) -> Result:
    try:
        return bundle.start(config)
    finally:
        bundle.call(runsc, "delete", "--force", bundle.name)


def sums(driver: Driver, folder: str) -> list[str]:
    """Return the lines that sha256sum prints for the driver's libraries in a container's folder."""
    files = [driver.library(name) for name in LIBRARIES]
    done = subprocess.run(["sha256sum", *files], capture_output=True, text=True, check=True)
    lines = zip(done.stdout.splitlines(), LIBRARIES, strict=True)
    return [f"{line.partition(' ')[0]}  {folder}/{name}" for line, name in lines]


def ask(bundle: GpuBundle, driver: Driver, request: str) -> list[str]:
    """Make the container print its devices and libraries; return the lines for the libraries."""
    folder = str(driver.library(LIBRARIES[0]).parent).removeprefix(str(driver.root))
    files = " ".join(f"{folder}/{name}" for name in LIBRARIES)
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES={request}")
    bundle.command("sh", "-c", SEE.format(files=files))
    return sums(driver, folder)


@ONE
def test_spec_mode_lists_nodes_and_files_in_config_json(
    bundle: GpuBundle, driver: Driver, runsc: Path
) -> None:
    """config.json lists the nodes and files, and it contains no hook."""
    expected = ask(bundle, driver, "0,2")
    done = run(bundle, runsc, configured(bundle, driver, runsc, "spec")).ok()
    nodes = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
    nodes |= {f"/dev/nvidia{gpu.minor}" for gpu in driver.chosen(0, 2)}
    lines = done.stdout.splitlines()
    assert {line for line in lines if line.startswith("/dev/")} == nodes
    assert [line for line in lines if not line.startswith("/dev/")] == [*expected, ""]


@ONE
def test_a_cdi_spec_without_hooks_gives_nodes_and_files(
    bundle: GpuBundle, driver: Driver, runsc: Path
) -> None:
    """Links in the CDI spec are mounts, because this runsc runs no hooks in the container."""
    expected = ask(bundle, driver, "nvidia.com/gpu=1")
    config = configured(bundle, driver, runsc, "cdi")
    words = ("--for", "charliecloud", "--output", bundle.path / "nvidia.json", "--config", config)
    bundle.call(bundle.installation.command, "cdi", "generate", *words).ok()
    lines = run(bundle, runsc, config).ok().stdout.splitlines()
    gpus = [line for line in lines if line.startswith("/dev/nvidia") and line[-1].isdigit()]
    assert gpus == [f"/dev/nvidia{gpu.minor}" for gpu in driver.chosen(1)]
    assert [line for line in lines if not line.startswith("/dev/")] == [*expected, ""]


@ONE
def test_mode_hook_is_refused(bundle: GpuBundle, driver: Driver, runsc: Path) -> None:
    """A separate process of runsc has the container's files, and no hook can enter that process."""
    ask(bundle, driver, "0")
    done = run(bundle, runsc, configured(bundle, driver, runsc, "hook")).failed()
    assert "gpuhook-prestart: The container's root filesystem" in done.stderr
