"""Costs of a container start in programs, system calls and memory: counts, never times."""

import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from harness import vendors
from harness.bundles import Bundle, GpuBundle
from harness.commands import daemon, wait_until
from harness.driver import Driver
from harness.installation import Installation, write_config
from harness.prefork import ONE, RUNTIMES

CALL = re.compile(r"^(\d+) +(?:<\.\.\. )?([a-z0-9_]+)")
# A module of gpuhook, by the path of its compiled file.
MODULE = re.compile(r'openat\([^"]*"[^"]*/gpuhook/((?:\w+/)*)__pycache__/(\w+)\.[^"]*\.pyc"')
EXEC = re.compile(r'^(\d+) +execve\("([^"]*)".*(?:\) += 0|<unfinished \.\.\.>)$')


class Trace:
    """The programs that were started and the system calls that each of them made."""

    def __init__(self, text: str) -> None:
        self.programs: list[str] = []
        self.calls: Counter[str] = Counter()
        self.processes: set[str] = set()
        found = {folder + name for folder, name in MODULE.findall(text)}
        self.modules = sorted(name for name in found if not name.endswith("__init__"))
        running: dict[str, str] = {}
        for line in text.splitlines():
            started = EXEC.match(line)
            if started:
                running[started[1]] = Path(started[2]).name
                self.programs.append(running[started[1]])
            call = CALL.match(line)
            if call:
                self.processes.add(call[1])
            if call and "resumed>" not in line:
                self.calls[running.get(call[1], "forked")] += 1

    def count(self, prefix: str) -> int:
        """Return how many started programs have a name that begins with ``prefix``."""
        return sum(name.startswith(prefix) for name in self.programs)


@pytest.fixture
def config(driver: Driver, tmp_path: Path) -> Path:
    """Configuration of a host on which only the container's own work remains to be done."""
    runtime = tmp_path / "runtime"
    runtime.write_text("#!/bin/sh\nexit 0\n")
    runtime.chmod(0o755)
    path = write_config(tmp_path / "etc", driver.root, [runtime])
    for each in (path, path.parent):
        os.utime(each, (10**9, 10**9))
    return path


def trace(bundle: Bundle, config: Path, log: Path, *argv: str | Path) -> Trace:
    env = {"GPUHOOK_CONFIG": str(config)}
    saved = bundle.config.read_bytes()
    bundle.call(*argv, env=env).ok()  # this run saves the inventory and the launcher's data
    bundle.config.write_bytes(saved)
    bundle.call("strace", "-f", "-o", log, *argv, env=env).ok()
    bundle.config.write_bytes(saved)
    return Trace(log.read_text())


@RUNTIMES
def test_other_verbs_start_no_python(bundle: GpuBundle, config: Path, tmp_path: Path) -> None:
    found = trace(bundle, config, tmp_path / "log", bundle.gpu_py, "state", "x")
    assert found.programs == ["gpu-py", "runtime"]
    assert found.calls["gpu-py"] <= 50


@RUNTIMES
def test_container_without_gpu_starts_no_python(
    bundle: GpuBundle, config: Path, tmp_path: Path
) -> None:
    words = ("create", "--bundle", bundle.path, "x")
    found = trace(bundle, config, tmp_path / "log", bundle.gpu_py, *words)
    assert found.programs == ["gpu-py", "runtime"]
    assert found.calls["gpu-py"] <= 60


@pytest.mark.parametrize("helper", ["true", "false"])
@RUNTIMES
def test_container_with_gpus_starts_python_once(
    bundle: GpuBundle, config: Path, tmp_path: Path, helper: str
) -> None:
    config.write_text(config.read_text().replace("[gpuhook]", f"[gpuhook]\nhelper = {helper}"))
    os.utime(config, (10**9, 10**9))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    words = ("create", "--bundle", bundle.path, "x")
    found = trace(bundle, config, tmp_path / "log", bundle.gpu_py, *words)
    assert found.count("python") == 1
    assert found.programs[-1] == "runtime"
    assert found.calls["python3"] <= 1000
    assert 30 < len(found.modules) <= (39 if helper == "false" else 57), found.modules


@ONE
def test_a_start_with_cdi_specs_loads_few_modules(
    bundle: GpuBundle, config: Path, tmp_path: Path
) -> None:
    """The start includes the helper for the hook. The content of the CDI specs is already saved."""
    folder = tmp_path / "cdi"
    dirs = f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{folder}"]\n'
    config.write_text(f'{config.read_text()}mode = "cdi"\n{dirs}')
    words = ("--config", config, "--output", f"{folder}/nvidia.json")
    bundle.call(bundle.installation.command, "cdi", "generate", *words).ok()
    for path in (folder / "nvidia.json", folder, config, config.parent):
        os.utime(path, (10**9, 10**9))
    # An inventory isn't saved while its sources have just changed.
    wait_until(lambda: time.time() > folder.stat().st_ctime + 4, "the documents are old enough")
    bundle.environ("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=all")
    create = ("create", "--bundle", bundle.path, "x")
    found = trace(bundle, config, tmp_path / "log", bundle.gpu_py, *create)
    assert 30 < len(found.modules) <= 68, found.modules


@pytest.mark.parametrize(
    ("vendor", "variable"),
    [
        ("amd", "AMD_VISIBLE_DEVICES"),
        ("neuron", "AWS_NEURON_VISIBLE_DEVICES"),
        ("gaudi", "HABANA_VISIBLE_DEVICES"),
    ],
)
@ONE
def test_another_vendors_devices_cost_no_more_system_calls_than_nvidias(
    bundle: Bundle,
    installation: Installation,
    config: Path,
    tmp_path: Path,
    workspace: Path,
    vendor: str,
    variable: str,
) -> None:
    words = ("create", "--bundle", bundle.path, "x")
    with vendors.devices(installation, workspace / f"{vendor}-counts", vendor, 8) as devices:
        text = config.read_text()
        roots = f'driver-roots = ["{vendor}={devices.root}"]\n'
        config.write_text(text.replace("[gpuhook]\n", f"[gpuhook]\n{roots}"))
        counts = []
        for name in ("NVIDIA_VISIBLE_DEVICES", variable):
            plain = bundle.config.read_bytes()
            bundle.environ(f"{name}=all")
            found = trace(bundle, config, tmp_path / name, installation.runtime, *words)
            bundle.config.write_bytes(plain)
            assert found.count("python") == 1
            counts.append(found.calls["python3"])
    assert 0 < counts[1] <= counts[0]


@RUNTIMES
def test_container_with_gpus_is_served_without_a_fork(
    bundle: Bundle, installation: Installation, config: Path, tmp_path: Path
) -> None:
    """The prefork server runs, so gpu-py starts only the low-level runtime."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    words = bundle.namespace.enter(installation.command, "watch", f"--config={config}")
    ready = Path(f"/run/gpuhook/launcher{config}/ready")
    (config.parent / "state").mkdir(exist_ok=True)
    log = tmp_path / "watch.log"
    with daemon(words, log, lambda: any(ready.glob("[0-9]*"))):
        os.utime(config.parent, (10**9, 10**9))
        create = ("create", "--bundle", bundle.path, "x")
        found = trace(bundle, config, tmp_path / "log", installation.runtime, *create)
    assert found.programs == ["gpu-py", "runtime"]
    assert len(found.processes) == 1
    assert found.calls["gpu-py"] <= 120


@RUNTIMES
def test_the_hook_starts_no_other_program_and_uses_little_memory(
    bundle: Bundle, installation: Installation, driver: Driver, tmp_path: Path
) -> None:
    """The hook runs in one interpreter, in one pass, with less than 20 MiB."""
    config = write_config(tmp_path / "etc", driver.root, [bundle.runtime])
    measure = tmp_path / "measure.py"
    measure.write_text(
        "import json, resource, subprocess, sys\n"
        "status = subprocess.run(sys.argv[2:]).returncode\n"
        "usage = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "open(sys.argv[1], 'w').write(json.dumps([status, usage.ru_maxrss]))\n"
        "sys.exit(status)\n"
    )
    result, log = tmp_path / "result", tmp_path / "log"
    hook = [str(installation.hook), "--config", str(config), "prestart"]
    args = [sys.executable, str(measure), str(result), "strace", "-f", "-o", str(log), *hook]
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    bundle.change(
        lambda spec: spec.update(
            hooks={"prestart": [{"path": sys.executable, "args": args, "env": ["PATH=/usr/bin"]}]}
        )
    )
    for _ in range(2):
        bundle.call(bundle.runtime, "run", "--bundle", bundle.path, bundle.name).ok()
    status, kibibytes = json.loads(result.read_text())
    found = Trace(log.read_text())
    assert status == 0
    assert [name for name in found.programs if not name.startswith("python")] == [
        "gpuhook-prestart"
    ]
    assert found.count("python") == 1
    assert found.calls["python3"] <= 2200
    assert 40 < len(found.modules) <= 52, found.modules
    assert kibibytes < 20 << 10
