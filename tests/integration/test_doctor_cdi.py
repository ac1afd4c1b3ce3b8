"""The doctor's findings on a CDI spec after a real change of its simulated driver.

The tests of engines, and of faults that need no driver, are in
tests/unit/tools/doctor/test_doctor_cdi.py.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.cdi import KIND, generate
from harness.commands import run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

Findings = dict[str, dict[str, str]]


@dataclass
class Site:
    """A driver with three GPUs, and a CDI spec that was generated from it."""

    installation: Installation
    config: Path
    driver: Driver
    document: Path

    def findings(self) -> Findings:
        """Return the findings on CDI specs by check; each check occurs only once here."""
        words = (self.installation.command, "doctor", "--config", self.config, "--format", "json")
        found = json.loads(run(words).stdout)["findings"]
        assert not [each for each in found if "itself failed" in each["message"]]
        about = [each for each in found if each["check"].startswith("cdi-")]
        about = [each for each in about if each["check"] != "cdi-engine"]  # this machine's
        assert len({each["check"] for each in about}) == len(about), about
        return {each["check"]: each for each in about}

    def install(self, *options: str) -> None:
        """Replace the simulated driver by another one."""
        shutil.rmtree(self.driver.root)
        self.driver = simulate(self.installation, self.driver.root, *options)


GPUS = ("--gpus=3", "--minors=2,0,1")


@pytest.fixture
def site(installation: Installation, tmp_path: Path) -> Site:
    driver = simulate(installation, tmp_path / "driver", *GPUS)
    more = f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n'
    config = write_config(tmp_path / "etc", driver.root, ["runc"], more)
    return Site(installation, config, driver, generate(installation, config, tmp_path / "cdi"))


def test_a_correct_spec_has_no_warnings(site: Site) -> None:
    found = site.findings()
    assert set(found) == {"cdi-paths", "cdi-names"}
    assert {each["status"] for each in found.values()} <= {"ok", "note"}
    assert "7 CDI devices" in found["cdi-paths"]["message"]


def test_a_driver_update_makes_the_spec_stale(site: Site) -> None:
    old = site.driver.version
    site.install(*GPUS, "--driver-version=595.71.05")
    found = site.findings()
    assert found["cdi-paths"]["status"] == found["cdi-versions"]["status"] == "warning"
    assert f".so.{old} doesn't exist (and " in found["cdi-paths"]["message"]
    assert f"it is for driver {old}, and 595.71.05 is loaded" in found["cdi-versions"]["message"]
    assert "gpuhook cdi generate" in found["cdi-paths"]["remedy"]


def test_names_that_mean_other_gpus_are_a_failure(site: Site) -> None:
    """A request for 0 gets another GPU than intended, which is the worst case."""
    site.install("--gpus=3", "--minors=0,2,1")
    found = site.findings()["cdi-names"]
    assert found["status"] == "failure"
    assert "'0' is GPU 1 (GPU-" in found["message"]
    assert "'1' is GPU 0 (GPU-" in found["message"]
    assert "UUID" in found["remedy"]


def test_a_missing_gpu_that_shifts_the_others_is_a_failure(site: Site) -> None:
    uuids = [gpu.uuid for gpu in site.driver.gpus]
    site.install(*GPUS, "--unplug=0")
    found = site.findings()
    assert found["cdi-names"]["status"] == "failure"
    assert found["cdi-names"]["message"].endswith(f"'1' is GPU 0 ({uuids[1]})")
    gone = f"this host doesn't have GPU '2', '{uuids[0]}' (any more)"
    assert found["cdi-gone-devices"]["message"].endswith(gone)
    assert "/dev/nvidia2 doesn't exist" in found["cdi-paths"]["message"]


def test_a_missing_gpu_is_a_warning(site: Site) -> None:
    uuid = site.driver.gpus[2].uuid
    site.install("--gpus=2", "--minors=2,0")
    found = site.findings()
    assert "cdi-names" not in found
    assert found["cdi-gone-devices"]["status"] == "warning"
    gone = f"this host doesn't have GPU '2', '{uuid}' (any more)"
    assert found["cdi-gone-devices"]["message"].endswith(gone)
    assert "/dev/nvidia1 doesn't exist" in found["cdi-paths"]["message"]


def test_a_new_gpu_is_a_warning(site: Site) -> None:
    site.install("--gpus=4", "--minors=2,0,1,3")
    found = site.findings()["cdi-new-devices"]
    assert found["status"] == "warning"
    assert found["message"] == f"{site.document} is stale: GPU 3 of this host isn't in it"


def test_a_missing_driver_adds_no_findings_on_specs(site: Site) -> None:
    shutil.rmtree(site.driver.root)
    wrong = [
        check for check, found in site.findings().items() if found["status"] not in ("ok", "note")
    ]
    assert wrong == [], "the driver's own checks have said it"


def test_wrong_node_numbers_of_another_generator_are_a_warning(site: Site) -> None:
    """The spec has the old number of a node, whose major changed when the module was reloaded."""
    whole = json.loads(run([site.installation.command, "cdi", "generate", "--config", site.config,
                            "--format", "json"]).ok().stdout)  # fmt: skip
    uvm = site.driver.root / "dev/nvidia-uvm"
    major = os.major(uvm.stat().st_rdev)
    [node] = [
        each for each in whole["containerEdits"]["deviceNodes"] if each["path"] == "/dev/nvidia-uvm"
    ]
    node.update(type="c", major=major + 1, minor=0)
    site.document.unlink()
    (site.document.parent / "nvidia.json").write_text(json.dumps(whole))
    found = site.findings()["cdi-numbers"]
    assert found["status"] == "warning"
    assert f"{uvm} is {major + 1}:0, and is {major}:0 on this host" in found["message"]


def _second(site: Site) -> str:
    shutil.copy(site.document, site.document.with_name("nvidia.yaml"))
    return "cdi-conflict"


def _cut(site: Site) -> str:
    text = site.document.read_text()
    site.document.write_text(text[: len(text) // 2].rpartition("\n")[0] + "\n  kind: [")
    return "cdi-broken"


def _ending(site: Site) -> str:
    site.document.rename(site.document.with_suffix(".yml"))
    return "cdi-ignored"


def _hook(site: Site) -> str:
    text = site.document.read_text()
    program = f"{site.installation.command.parent}/gpuhook-cdi-hook"
    assert program in text
    site.document.write_text(text.replace(program, "/opt/moved/gpuhook-cdi-hook"))
    return "cdi-paths"


@pytest.mark.parametrize("fault", [_second, _cut, _ending, _hook])
def test_doctor_warns_of_faults_that_hide_a_cdi_spec_from_engines(
    site: Site, fault: Callable[[Site], str]
) -> None:
    check = fault(site)
    found = site.findings()[check]
    assert found["status"] == "warning"
    assert str(site.document.parent) in found["message"]
    assert found["remedy"]


def test_names_of_an_unknown_kind_are_not_judged(site: Site) -> None:
    """gpuhook doesn't know the meaning of such names."""
    site.document.write_text(site.document.read_text().replace(KIND, "other.example/gpu"))
    site.install("--gpus=2", "--minors=2,0")
    assert "cdi-names" not in site.findings()
