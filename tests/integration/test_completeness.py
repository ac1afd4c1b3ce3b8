"""Incomplete drivers: a request that can't work is refused, and a missing part is a warning."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import bundles
from harness.bundles import Bundle
from harness.commands import Result, run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.namespaces import Namespace

ALL = "NVIDIA_VISIBLE_DEVICES=all"
NO_UVM = "there is no device node {root}/dev/nvidia-uvm, without which CUDA doesn't work"
NO_CUDA = "libcuda.so.{version} isn't installed, without which CUDA doesn't work"
NO_NVML = "libnvidia-ml.so.{version} isn't installed, without which nvidia-smi doesn't work"


class Machine:
    """A separate simulated driver that a test may damage, and containers that use it."""

    def __init__(self, folder: Path, bundle: Bundle, installation: Installation) -> None:
        self.installation = installation
        self.bundle = bundle
        self.log = folder / "log"
        self._folder = folder
        self._variables = list(bundle.spec()["process"]["env"])

    def simulate(self, *options: str) -> Driver:
        driver = simulate(self.installation, self._folder / "driver", *options)
        self.config = write_config(self._folder / "config", driver.root, ["runc"])
        debug = f'load-kmods = false\ndebug = "{self.log}"'
        self.config.write_text(self.config.read_text().replace("load-kmods = false", debug))
        self.driver = driver
        self.version = driver.version
        self.libraries = driver.library("libcuda.so.1").parent
        return driver

    def start(self, *settings: str, runtime: str | Path | None = None) -> Result:
        """Start a container that runs nvidia-smi with gpu-py, or with another runtime."""
        self.ask(*settings)
        env = {"GPUHOOK_CONFIG": str(self.config)}
        return self.bundle.run(runtime or self.installation.runtime, env)

    def ask(self, *settings: str) -> None:
        """Set the container's variables to these settings and the image's variables."""

        def change(spec: dict[str, Any]) -> None:
            spec["process"].update(args=["true"], env=[*self._variables, *settings])
            spec["linux"]["resources"]["devices"] = [{"allow": False, "access": "rwm"}]
            spec.pop("hooks", None)

        self.bundle.change(change)

    def explain(self) -> dict[str, Any]:
        """Return the JSON of gpuhook explain; check that its text has the same warnings."""
        words: list[str | Path] = [self.installation.command, "explain", "--config", self.config]
        words += ["--bundle", self.bundle.path]
        found: dict[str, Any] = json.loads(run([*words, "--format", "json"]).stdout)
        text = run([*words, "-v"]).stdout if found["warnings"] else ""
        assert all(f"Warning:         {each}\n" in text for each in found["warnings"])
        return found

    def refused(self, cause: str, *settings: str) -> str:
        """Check that gpu-py, the hook and explain refuse the container with one error.

        The hook also runs without gpu-py. Returns the error code that explain reports.
        """
        cause = cause.format(root=self.driver.root, version=self.version)
        by_runtime = self.start(*settings).failed()
        assert cause in by_runtime.stderr
        self.ask(*settings)
        error = self.explain()["error"]
        assert f"gpu-py: {error['message']}\n" in by_runtime.stderr
        self.bundle.prestart(self.installation.hook, self.config)
        by_hook = self.bundle.run("runc").failed()
        assert error["message"] in by_hook.stderr
        return str(error["code"])

    def started(self, *settings: str) -> list[str]:
        """Start a container; return its warnings, which are equal in explain and the hook's log."""
        self.log.unlink(missing_ok=True)
        self.start(*settings).ok()
        (line,) = self.log.read_text().splitlines()
        self.ask(*settings)
        explained = self.explain()
        assert explained["error"] is None
        warnings: list[str] = json.loads(line)["warnings"]
        assert explained["warnings"] == warnings
        return warnings

    def remove(self, *names: str) -> None:
        """Remove nodes and libraries of the driver, and run ldconfig."""
        for name in names:
            folder = self.driver.root if name.startswith("dev/") else self.libraries
            found = list(folder.glob(name))
            assert found, name
            for path in found:
                path.unlink()
        self.ldconfig()

    def ldconfig(self) -> None:
        run(["ldconfig", "-r", self.driver.root]).ok()


@pytest.fixture
def machine(
    workspace: Path, roots: dict[str, Path], host: Namespace, installation: Installation
) -> Iterator[Machine]:
    parent = workspace / "completeness"
    with bundles.bundle(parent, roots["debian"], host, "runc") as made:
        folder = parent / f"{made.name}-machine"
        folder.mkdir()
        yield Machine(folder, made, installation)
        run(["rm", "-rf", folder]).ok()


def test_a_complete_driver_causes_no_warning(machine: Machine) -> None:
    machine.simulate("--gpus=2", "--compat32")
    assert machine.started(ALL, "NVIDIA_DRIVER_CAPABILITIES=all") == []


def test_compute_without_the_uvm_node_is_refused_until_it_is_made(machine: Machine) -> None:
    driver = machine.simulate("--gpus=1")
    node = driver.root / "dev/nvidia-uvm"
    numbers = node.stat().st_rdev
    machine.remove("dev/nvidia-uvm")
    machine.refused(NO_UVM, ALL)
    machine.refused(NO_UVM, "NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all")
    assert machine.started(ALL, "NVIDIA_DRIVER_CAPABILITIES=utility") == []
    os.mknod(node, 0o20666, numbers)  # as nvidia-modprobe does
    assert machine.started(ALL) == []


def test_compute_without_libcuda_is_refused_until_it_is_installed(machine: Machine) -> None:
    driver = machine.simulate("--gpus=1")
    library = driver.library("libcuda.so.1")
    content = library.read_bytes()
    machine.remove("libcuda.so*")
    machine.refused(NO_CUDA, ALL)
    assert machine.started(ALL, "NVIDIA_DRIVER_CAPABILITIES=utility") == []
    library.write_bytes(content)
    machine.ldconfig()
    assert machine.started(ALL) == []


def test_nvml_without_a_version_in_its_name_is_used_only_if_alone(machine: Machine) -> None:
    """If another version is present, a file named by its SONAME isn't this driver's."""
    driver = machine.simulate("--gpus=1")
    library = driver.library("libnvidia-ml.so.1")
    link = library.with_name("libnvidia-ml.so.1")
    link.unlink()
    library.rename(link)
    machine.ldconfig()
    assert machine.started(ALL) == []
    shutil.copy(link, link.with_name("libnvidia-ml.so.470.256.02"))
    machine.ldconfig()
    machine.refused(NO_NVML, ALL)
    assert machine.started(ALL, "NVIDIA_DRIVER_CAPABILITIES=compute") == []


@pytest.mark.parametrize("devices", ["none", "all"])
def test_an_incomplete_driver_causes_only_warnings_without_a_gpu(
    machine: Machine, devices: str
) -> None:
    driver = machine.simulate(f"--gpus={1 if devices == 'none' else 0}")
    machine.remove("dev/nvidia-uvm", "libcuda.so*")
    assert machine.started(f"NVIDIA_VISIBLE_DEVICES={devices}") == [
        f"compute can't work: {NO_UVM.format(root=driver.root)}",
        f"compute can't work: {NO_CUDA.format(version=machine.version)}",
    ]


def test_missing_graphics_files_cause_only_warnings_for_all_capabilities(machine: Machine) -> None:
    machine.simulate("--gpus=1")
    graphics = ("libGLX_nvidia.so*", "libEGL_nvidia.so*", "dev/nvidia-modeset")
    machine.remove("libnvcuvid.so*", "libnvidia-encode.so*", "libnvidia-ngx.so*", *graphics)
    assert machine.started(ALL, "NVIDIA_DRIVER_CAPABILITIES=all") == [
        "video lacks libnvcuvid, libnvidia-encode",
        "display and graphics lack libGLX_nvidia, libEGL_nvidia, /dev/nvidia-modeset",
        "ngx lacks libnvidia-ngx",
        "compat32 lacks every 32-bit library",
    ]


def test_missing_parts_of_default_capabilities_cause_warnings(machine: Machine) -> None:
    driver = machine.simulate("--gpus=1")
    (driver.root / "usr/bin/nvidia-smi").unlink()
    machine.remove("libnvidia-ptxjitcompiler.so*")
    assert machine.started(ALL) == [
        "compute lacks libnvidia-ptxjitcompiler",
        "utility lacks nvidia-smi",
    ]


def test_a_lost_gpu_is_refused_by_name_and_left_out_of_all(machine: Machine) -> None:
    driver = machine.simulate("--gpus=3", "--lost=1")
    lost = "GPU 1 has fallen off the bus (lost)"
    for devices in ("1", "0-2", "0,1"):
        code = machine.refused(f"gpu-py: {lost}. Look", f"NVIDIA_VISIBLE_DEVICES={devices}")
        assert code == "lost-device"
    uuid = driver.gpus[1].uuid
    code = machine.refused(f"{lost} and may be it", f"NVIDIA_VISIBLE_DEVICES={uuid}")
    assert code == "unknown-device"
    assert machine.started("NVIDIA_VISIBLE_DEVICES=0,2") == []
    assert machine.started(ALL) == [lost]


def test_doctor_and_the_refusal_give_the_same_message(machine: Machine) -> None:
    machine.simulate("--gpus=1")
    machine.remove("libcuda.so*")
    machine.ask(ALL)
    error = machine.explain()["error"]["message"]
    command = str(machine.installation.command)
    done = run([command, "doctor", "--format", "json", "--config", str(machine.config)])
    findings = json.loads(done.stdout)["findings"]
    (found,) = [each for each in findings if each["check"] == "driver-files"]
    assert f"The container asks for compute, and {found['message']}. {found['remedy']}," in error


def test_nvidia_container_cli_refuses_incomplete_drivers_and_lost_gpus(machine: Machine) -> None:
    driver = machine.simulate("--gpus=2", "--lost=1")
    program = machine.installation.bin / "gpuhook-container-cli"
    env = {"GPUHOOK_CONFIG": str(machine.config)}

    def configure(*words: str) -> str:
        fixed = ("configure", "--pid=1", "--no-cgroups")
        return run([program, *fixed, *words, machine.bundle.root], env=env).failed().stderr

    assert "device error: GPU 1 has fallen off the bus (lost). Look" in configure("--device=1")
    machine.remove("dev/nvidia-uvm")
    cause = NO_UVM.format(root=driver.root)
    said = configure("--device=0", "--compute")
    assert f"initialization error: The container asks for compute, and {cause}" in said
