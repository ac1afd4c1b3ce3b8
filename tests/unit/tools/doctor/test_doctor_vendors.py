"""Vendors' checks in the doctor: NVIDIA's, and those of invented vendors, which may crash."""

import io
import tarfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from fabricated import Tree

import vendors
from gpuhook.core import contract
from gpuhook.tools.doctor import Finding, examine
from gpuhook.tools.doctor.checks import STEPS
from gpuhook.tools.doctor.report import write_report
from gpuhook.tools.doctor.vendors import doctors
from gpuhook.vendors.registry import BUILT_IN

ACME = """
from gpuhook.tools.doctor.case import VendorChecks
from gpuhook.tools.doctor.finding import ok

def acme_loaded(case):
    yield ok("acme-loaded", "The module acme is loaded")

def acme_host(case):
    yield ok("acme-host", f"gpu-py is in {case.bin}")

CHECKS = VendorChecks(
    (acme_loaded,),
    host=(acme_host,),
    report_files=("/proc/driver/acme/version", "/sys/class/acme/*/state"),
    report_nodes=("/dev/acme*",),
)
"""

# How a vendor's part of the doctor is broken -> the error that is reported.
BROKEN = {
    "raise RuntimeError('no reason')": "RuntimeError: no reason",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "no Python": "SyntaxError: ",
    "DRIVER = ()": "has no attribute 'CHECKS'",
    ACME.replace("(acme_host,)", "1"): "TypeError: 'int' object is not iterable",
}

VendorFolders = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def known(tmp_path: Path) -> VendorFolders:
    return partial(vendors.known, tmp_path / "packages")


def _by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_vendor_checks_run_before_and_after_the_general_checks(
    tree: Tree, known: VendorFolders
) -> None:
    tree.driver()
    with known("acme", doctor=ACME):
        order = [finding.check for finding in examine(tree.case)]
    assert order.index("driver-versions") < order.index("acme-loaded") < order.index("launchers")
    assert order[-2:] == ["foreign-toolkit", "acme-host"]


def test_nvidia_checks_run_in_diagnostic_order(tree: Tree) -> None:
    tree.driver()
    (tree.root / "run/systemd/system").mkdir(parents=True)
    order = [finding.check for finding in examine(tree.case)]
    first = [
        "configuration",
        "driver-loaded",
        "driver-versions",
        "device-nodes",
        "driver-files",
        "ld-cache",
    ]
    assert order[: len(first) + 1] == [*first, "dev-char"]
    assert order[len(first) + 1] == "launchers"


def test_a_vendor_without_a_doctor_is_examined_if_it_has_a_device(
    tree: Tree, known: VendorFolders
) -> None:
    names = '\nPCI_VENDOR = "ac3e"\n'
    tree.write("/sys/bus/pci/devices/0000:10:00.0/vendor", "0xac3d\n")
    with known("plain", names=vendors.NAMES.format(name="plain", upper="PLAIN") + names):
        assert "plain-devices" not in _by_name(examine(tree.case))
        tree.write("/sys/bus/pci/devices/0000:11:00.0/vendor", "0xac3e\n")
        found = _by_name(examine(tree.case))["plain-devices"]
    assert (found.status, found.message) == ("failure", "there is no plain")


def test_a_vendor_without_a_doctor_or_devices_has_no_findings(
    tree: Tree, known: VendorFolders
) -> None:
    tree.root.mkdir()
    without = list(_by_name(examine(tree.case)))
    with known("plain"), known("acme", doctor=ACME):
        found = list(_by_name(examine(tree.case)))
    assert [check for check in found if not check.startswith("acme")] == without
    assert {"acme-loaded", "acme-host"} <= set(found)


@pytest.mark.parametrize(("text", "words"), BROKEN.items(), ids=BROKEN.values())
def test_a_broken_vendor_doctor_is_a_failure_and_other_checks_run(
    tree: Tree, known: VendorFolders, text: str, words: str
) -> None:
    tree.driver()
    with known("broken", doctor=text), known("acme", doctor=ACME):
        found = _by_name(examine(tree.case))
    assert found["broken-checks"].status == "failure"
    assert found["broken-checks"].message.startswith("The checks of broken can't be used: ")
    assert words in found["broken-checks"].message
    assert {"driver-loaded", "foreign-toolkit", "acme-loaded", "acme-host"} <= set(found)


@pytest.mark.parametrize("error", ["OSError", "RuntimeError", "AssertionError"])
def test_a_crashing_vendor_check_is_a_failure_and_other_checks_run(
    tree: Tree, known: VendorFolders, error: str
) -> None:
    tree.driver()
    text = ACME.replace("    yield ok", f"    raise {error}('why')\n    yield ok", 1)
    with known("acme", doctor=text):
        found = _by_name(examine(tree.case))
    assert found["acme-loaded"].status == "failure"
    assert found["acme-loaded"].message == f"The check acme-loaded itself failed: {error}: why"
    assert {"driver-loaded", "acme-host"} <= set(found)


def test_a_crashing_check_without_a_name_is_reported_as_unnamed(tree: Tree) -> None:
    tree.root.mkdir()
    [found] = examine(tree.case, [partial(lambda _: 1 / 0)])  # type: ignore[list-item]
    assert found.message == "The check unnamed itself failed: ZeroDivisionError: division by zero"


def test_general_checks_come_from_no_vendor_module() -> None:
    assert not [step for step in STEPS if ".vendors." in step.check.__module__]


def _reported(tree: Tree, path: Path) -> dict[str, str]:
    write_report(str(path), tree.case, [])
    files = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            assert member.mode == 0o600  # unpacked files must stay private to their owner
            opened = archive.extractfile(member)
            assert opened is not None
            text = io.TextIOWrapper(opened).read()
            files[member.name.removeprefix("gpuhook-report/")] = text
    return files


def test_the_report_contains_the_files_each_vendor_names(
    tree: Tree, known: VendorFolders, tmp_path: Path
) -> None:
    tree.driver(gpus=2)
    tree.config.driver_root = "/"
    tree.write("/proc/driver/acme/version", "7.1\n")
    tree.write("/sys/class/acme/acme0/state", "up\n")
    tree.write("/sys/class/acme/acme0/secret", "password\n")
    tree.write("/dev/acme0", mode=0o660)
    tree.write("/dev/nvidia0")
    tree.write("/dev/nvidia-caps/nvidia-cap1")
    with known("acme", doctor=ACME), known("broken", doctor="no Python", vendor="no Python"):
        files = _reported(tree, tmp_path / "report.tar.gz")
    assert "SyntaxError" in files["inventory.json"]
    assert files["proc/driver/acme/version"] == "7.1\n"
    assert files["sys/class/acme/acme0/state"] == "up\n"
    assert "sys/class/acme/acme0/secret" not in files
    assert "Device Minor: \t 1\n" in files["proc/driver/nvidia/gpus/0000:01:00.0/information"]
    nodes = [line.split()[0] for line in files["nodes.txt"].splitlines()]
    assert {"/dev/acme0", "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1"} <= set(nodes)


def test_report_files_are_searched_below_the_driver_root_first(
    tree: Tree, known: VendorFolders, tmp_path: Path
) -> None:
    tree.config.driver_root = "/run/driver"
    tree.write("/run/driver/proc/driver/acme/version", "in the driver root\n")
    tree.write("/proc/driver/acme/version", "the machine's\n")
    tree.write("/sys/class/acme/acme0/state", "up\n")
    with known("acme", doctor=ACME):
        files = _reported(tree, tmp_path / "report.tar.gz")
    assert files["proc/driver/acme/version"] == "in the driver root\n"
    assert files["sys/class/acme/acme0/state"] == "up\n"


def test_each_vendor_is_examined_below_its_own_driver_root(
    tree: Tree, known: VendorFolders, tmp_path: Path
) -> None:
    tree.config.root = "/run/all"
    tree.config.driver_roots = ("acme=/run/acme", "amce=/run/x")
    tree.write("/run/acme/proc/driver/acme/version", "ACME's\n")
    tree.write("/run/all/proc/driver/acme/version", "not ACME's\n")
    tree.write("/run/acme/dev/acme0")
    with known("acme", doctor=ACME):
        files = _reported(tree, tmp_path / "report.tar.gz")
        found = [each for each in examine(tree.case) if each.check == "driver-roots"]
    assert files["proc/driver/acme/version"] == "ACME's\n"
    assert files["nodes.txt"].startswith("/dev/acme0 ")
    assert [each.status for each in found] == ["warning", "ok"]
    assert "the vendor 'amce'" in found[0].message
    assert "NVIDIA below /run/all" in found[1].message
    tree.config.driver_roots = ()
    [found_once] = [each for each in examine(tree.case) if each.check == "driver-roots"]
    assert found_once.message == "Drivers are searched for below /run/all"
    tree.config.root = ""
    assert "driver-roots" not in {each.check for each in examine(tree.case)}


def test_an_nvidia_driver_root_gives_no_findings_for_other_vendors(tree: Tree) -> None:
    """NVIDIA's driver may be in a container that has no files of other vendors' drivers."""
    tree.config.driver_root = "/run/driver"
    tree.write("/run/driver/dev/nvidiactl")
    words = [names.NAME.partition("_")[0] for names in BUILT_IN.values() if names.NAME != "nvidia"]
    found = [each for each in examine(tree.case) if each.check.startswith(tuple(words))]
    assert [each.message for each in found if each.status not in ("ok", "note")] == []


# These vendors' checks find the driver in another way, which their own tests cover.
OTHERS = ("ascend", "nvidia")


@pytest.mark.parametrize("vendor", [name for name in BUILT_IN if name not in OTHERS])
def test_discovery_that_may_hang_runs_in_a_child_process(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    names = BUILT_IN[vendor]
    [trace, *_] = contract.load(names).driver_markers()
    tree.write(f"{trace}/uevent")
    asked: list[str] = []  # calls in this process

    def hang(root: str) -> None:
        asked.append(root)
        time.sleep(20)

    monkeypatch.setattr(f"{contract.package(names)}.discover.discover", hang)
    tree.config.nvml_timeout = 0.05
    [found] = [each for each in doctors(tree.config) if each.name == vendor]
    for step in found.driver_checks:  # no findings, because the bus has no such device
        assert not [*step.check(tree.case)]
    assert asked == []
