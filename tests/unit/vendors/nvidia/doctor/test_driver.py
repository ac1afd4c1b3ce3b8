"""Checks of NVIDIA's driver, on simulated machines."""

import shutil
from pathlib import Path

import paper
import pytest
from fabricated import LIBRARIES, VERSION, Tree, said

from gpuhook.tools.doctor import examine
from gpuhook.tools.vendors.nvidia.doctor import CHECKS, driver
from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.model import Gpu


def test_a_loaded_module_is_reported_with_its_version(tree: Tree) -> None:
    tree.driver()
    assert said(driver.driver_loaded(tree.case)) == {
        "driver-loaded": ("ok", f"The NVIDIA kernel module {VERSION} is loaded")
    }


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n"}, "kernel module isn't loaded"),
        ({"/sys/module/nouveau/initstate": "live\n"}, "nouveau is using the GPU"),
    ],
)
def test_a_module_that_is_not_loaded_is_a_failure_with_the_reason(
    tree: Tree, files: dict[str, str], words: str
) -> None:
    for path, text in files.items():
        tree.write(path, text)
    status, message = said(driver.driver_loaded(tree.case))["driver-loaded"]
    assert status == "failure"
    assert words in message


@pytest.mark.parametrize("vendors", [(), ("0x1234", "0x8086")])
def test_a_machine_without_accelerators_has_no_failure(
    tree: Tree, vendors: tuple[str, ...]
) -> None:
    tree.root.mkdir(exist_ok=True)
    for number, vendor in enumerate(vendors):
        tree.write(f"/sys/bus/pci/devices/0000:0{number}:00.0/vendor", f"{vendor}\n")
    [found] = examine(tree.case, CHECKS.driver)
    assert (found.check, str(found.status)) == ("driver-loaded", "note")
    assert "the PCI bus shows no NVIDIA GPU" in found.message
    assert found.remedy.startswith("If this host should have one: ")


def test_a_driver_without_any_gpu_is_a_failure(tree: Tree) -> None:
    """A host with the driver's libraries has, or had, a GPU."""
    tree.driver(gpus=0)
    (tree.root / "proc/driver/nvidia/version").unlink()
    shutil.rmtree(tree.root / "sys/module", ignore_errors=True)
    shutil.rmtree(tree.root / "proc/driver", ignore_errors=True)
    found = said(driver.driver_loaded(tree.case))["driver-loaded"]
    assert found[0] == "failure"
    assert "the PCI bus shows no NVIDIA GPU" in found[1]


@pytest.fixture
def neuron(tree: Tree, tmp_path: Path) -> Tree:
    """A machine with another vendor's devices, without an NVIDIA driver or GPU."""
    paper.machine("neuron", tmp_path / "neuron", 2)
    tree.config.driver_roots = (f"neuron={tmp_path}/neuron",)
    tree.root.mkdir()
    return tree


def test_a_machine_of_another_vendor_has_no_problems(neuron: Tree) -> None:
    found = list(examine(neuron.case, CHECKS.driver))
    assert [(each.check, str(each.status)) for each in found] == [("driver-loaded", "ok")]
    assert "devices of another vendor" in found[0].message


@pytest.mark.parametrize(
    "files",
    [
        {"/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n"},
        {"/sys/module/nouveau/initstate": "live\n"},
        {"/proc/driver/nvidia/params": ""},
    ],
)
def test_a_machine_with_nvidia_and_another_vendor_is_examined(
    neuron: Tree, files: dict[str, str]
) -> None:
    for path, text in files.items():
        neuron.write(path, text)
    found = list(examine(neuron.case, CHECKS.driver))
    assert "failure" in {str(each.status) for each in found}


def test_a_configured_nvidia_driver_root_is_examined(neuron: Tree) -> None:
    neuron.config.driver_root = "/run/nvidia/driver"
    assert not driver.is_elsewhere(neuron.case)


def test_another_vendors_driver_without_devices_does_not_count(tree: Tree, tmp_path: Path) -> None:
    paper.machine("neuron", tmp_path / "neuron", 0)
    tree.config.driver_roots = (f"neuron={tmp_path}/neuron",)
    tree.root.mkdir()
    assert said(driver.driver_loaded(tree.case))["driver-loaded"][0] == "note"


def test_equal_versions_of_libraries_and_module_are_ok(tree: Tree) -> None:
    tree.driver()
    assert said(driver.driver_versions(tree.case))["driver-versions"][0] == "ok"
    (tree.root / "proc/driver/nvidia/version").unlink()
    assert said(driver.driver_versions(tree.case)) == {}  # driver_loaded reports this


@pytest.mark.parametrize(
    ("installed", "words"),
    [("550.54.15", ("550.54.15", VERSION)), (None, ("libnvidia-ml.so.1 is not there",))],
)
def test_missing_or_differing_driver_libraries_are_a_failure(
    tree: Tree, installed: str | None, words: tuple[str, ...]
) -> None:
    tree.root.mkdir()
    if installed:
        tree.driver(installed=installed)
    status, message = said(driver.driver_versions(tree.case))["driver-versions"]
    assert status == "failure"
    assert all(word in message for word in words)


def test_a_missing_driver_root_is_a_failure(tree: Tree) -> None:
    tree.config.driver_root = "/run/nvidia/driver"
    [finding] = examine(tree.case, CHECKS.driver)
    assert (finding.check, str(finding.status)) == ("driver-root", "failure")
    assert "/run/nvidia/driver can't be opened" in finding.message


def test_a_stale_missing_or_damaged_loader_cache_is_reported(tree: Tree) -> None:
    tree.driver()
    assert said(driver.loader_cache(tree.case))["ld-cache"][0] == "ok"
    tree.cache("libnvidia-ml.so.1")
    status, message = said(driver.loader_cache(tree.case))["ld-cache"]
    assert (status, message) == ("warning", "/etc/ld.so.cache doesn't know libcuda.so.1")
    tree.write("/etc/ld.so.cache", b"nonsense")
    assert said(driver.loader_cache(tree.case))["ld-cache"][0] == "failure"
    (tree.root / "etc/ld.so.cache").unlink()
    status, message = said(driver.loader_cache(tree.case))["ld-cache"]
    assert status == "warning"
    assert "doesn't exist" in message


def test_a_library_named_by_its_soname_has_no_known_version(tree: Tree) -> None:
    tree.driver()
    folder = tree.root / LIBRARIES
    (folder / "libnvidia-ml.so.1").unlink()
    (folder / f"libnvidia-ml.so.{VERSION}").rename(folder / "libnvidia-ml.so.1")
    status, message = said(driver.driver_versions(tree.case))["driver-versions"]
    assert status == "ok"
    assert message.endswith(
        f"libnvidia-ml.so.1 has no version in its name; the module is {VERSION}"
    )


def _answer(gpus: int, lost: tuple[int, ...] = ()) -> nvml.NvmlResponse:
    made = [
        Gpu(n, n, f"GPU-{n}", f"00000000:0{n}:00.0", "X", "9.0", "Tesla", False, ())
        for n in range(gpus)
    ]
    return nvml.NvmlResponse(VERSION, "12.2", tuple(made), lost)


@pytest.mark.parametrize(
    ("answer", "seconds", "expected"),
    [
        (_answer(2), 0.1, {"nvml": "ok"}),
        (_answer(2), 1.5, {"nvml": "warning"}),
        (_answer(1), 0.1, {"nvml": "warning"}),
        (_answer(1, (1,)), 0.1, {"nvml": "ok", "nvml-lost": "failure"}),
    ],
)
def test_slow_or_incomplete_nvml_answers_are_reported(
    answer: nvml.NvmlResponse, seconds: float, expected: dict[str, str]
) -> None:
    found = said(driver._nvml_findings(answer, seconds, 2))
    assert {check: status for check, (status, _) in found.items()} == expected


def test_an_nvml_library_that_is_not_elf_is_a_failure(tree: Tree) -> None:
    tree.driver()
    tree.write(f"{LIBRARIES}/libnvidia-ml.so.{VERSION}", b"not an ELF file")
    status, message = said(driver.nvml_answers(tree.case))["nvml"]
    assert status == "failure"
    assert "libnvidia-ml" in message
