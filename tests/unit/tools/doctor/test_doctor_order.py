"""Checks after a failure, and the problems found on whole fake machines."""

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fabricated import BIN, BOOT, VERSION, Tree

from gpuhook import __version__
from gpuhook.tools.cli import cli
from gpuhook.tools.doctor import Case, Finding, examine, host
from gpuhook.tools.doctor.case import DRIVER, Check, CheckStep
from gpuhook.tools.doctor.checks import every_step
from gpuhook.tools.doctor.finding import Status, failure, note, ok, warning, worst
from gpuhook.tools.doctor.machine import Machine

Call = Callable[..., Result]
GPU_PY = f"{BIN}/gpu-py"
CONTAINERD = "/etc/containerd/config.toml"
OLDER, NEWER = "470.1.2", "560.1"


def finds(*findings: Finding) -> Check:
    def check(case: Case) -> Iterator[Finding]:
        del case
        yield from findings

    return check


def never(case: Case) -> Iterator[Finding]:
    raise AssertionError(case)


def wrong(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [
        (each.check, str(each.status)) for each in findings if each.status not in ("ok", "note")
    ]


def test_a_step_that_needs_a_failed_check_is_skipped(tree: Tree) -> None:
    steps = (
        finds(ok("first", "")),
        finds(failure("second", "", ""), ok("third", "")),
        CheckStep(never, needs=("first", "second")),
        CheckStep(finds(ok("fourth", "")), needs=("first", "third")),
    )
    examination = examine(tree.case, steps)
    assert [each.check for each in examination] == ["first", "second", "third", "fourth"]
    assert [each.check for each in examination.findings] == ["first", "second", "third", "fourth"]
    assert examination.skipped == ["never"]


def test_checks_after_a_warning_still_run(tree: Tree) -> None:
    steps = (finds(warning("first", "", "")), CheckStep(finds(ok("second", "")), needs=("first",)))
    assert [each.check for each in examine(tree.case, steps)] == ["first", "second"]


def test_a_driver_failure_skips_checks_that_need_the_driver(tree: Tree) -> None:
    steps = (CheckStep(finds(failure("x", "", "")), part=DRIVER), CheckStep(never, needs=(DRIVER,)))
    assert [each.check for each in examine(tree.case, steps)] == ["x"]


@pytest.mark.parametrize(("engine", "expected"), [("", "abc"), ("docker", "ab"), ("crio", "ac")])
def test_only_checks_of_the_selected_engine_run(tree: Tree, engine: str, expected: str) -> None:
    case = tree.case
    case.engine = engine
    steps = (
        finds(ok("a", "")),
        CheckStep(finds(ok("b", "")), engine="docker"),
        CheckStep(finds(ok("c", "")), engine="crio"),
    )
    examination = examine(case, steps)
    assert "".join(each.check for each in examination) == expected
    assert examination.skipped == []


@pytest.fixture
def doctor(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A function that runs gpuhook doctor with only one check, which returns five findings."""
    found = [warning("b", "B", "do b"), note("d", "D", "d or not"), failure("a", "A", "do a"),
             warning("c", "C", "do c"), ok("e", "E")]  # fmt: skip
    command = importlib.import_module("gpuhook.tools.cli.doctor")
    monkeypatch.setattr(command, "examine", lambda case: examine(case, [finds(*found)]))
    monkeypatch.setattr(Case, "of_this_machine", lambda *_: tree.case)
    return lambda *words: CliRunner().invoke(cli, ["doctor", *words])


def test_warnings_and_failures_are_printed_last(doctor: Call) -> None:
    done = doctor()
    assert done.exit_code == 2
    assert done.stdout.splitlines() == [
        "note     d: D.",
        "         -> d or not.",
        "ok       e: E.",
        "warning  b: B.",
        "         -> do b.",
        "warning  c: C.",
        "         -> do c.",
        "failure  a: A.",
        "         -> do a.",
        "",
        "1 ok, 1 note, 2 warnings, 1 failure",
    ]
    quiet = doctor("--quiet").stdout.splitlines()
    assert quiet == done.stdout.splitlines()[3:-2]


def test_json_report_has_host_version_and_time(doctor: Call) -> None:
    found = json.loads(doctor("--format=json").stdout)
    assert (found["status"], found["version"]) == ("failure", __version__)
    assert found["host"] == os.uname().nodename
    age = datetime.now(UTC) - datetime.fromisoformat(found["time"])
    assert timedelta(0) <= age < timedelta(minutes=1)
    assert [each["status"] for each in found["findings"]].count("note") == 1


def test_notes_do_not_change_the_exit_status() -> None:
    found = [ok("a", ""), note("b", "", "")]
    assert worst(found) is Status.OK
    assert [status.exit_status for status in Status] == [0, 0, 1, 2]


# Drivers -------------------------------------------------------------------------------------


@pytest.fixture
def installed(tree: Tree) -> Tree:
    """A simulated host with a working gpuhook, which podman uses."""
    tree.program(GPU_PY)
    tree.program(f"{BIN}/gpuhook-prestart")
    tree.config.runtimes = (str(tree.program("/usr/bin/runc")),)
    tree.config.state_dir = "/run/gpuhook"
    tree.config.cdi_spec_dirs = ("/etc/cdi",)
    tree.write("/proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    tree.program("/usr/bin/podman")
    runtimes = f'[engine.runtimes]\ngpu-py = ["{GPU_PY}"]\n'
    tree.write("/etc/containers/containers.conf.d/gpu.conf", runtimes)
    return tree


def test_a_broken_configuration_is_the_first_and_only_problem(installed: Tree) -> None:
    broken = "x.toml is not valid TOML: no. Correct it."
    case = Case(Machine(str(installed.root), installed.users), installed.config, BIN, broken)
    findings = list(examine(case))
    assert (findings[0].check, findings[0].message) == (
        "configuration",
        "x.toml is not valid TOML: no",
    )
    assert wrong(findings) == [("configuration", "failure")]


def test_a_machine_without_accelerators_has_no_problems(installed: Tree) -> None:
    assert wrong(examine(installed.case)) == []


def test_a_missing_driver_is_one_finding(installed: Tree) -> None:
    installed.write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    spec = {"path": "/dev/nvidia0", "hostPath": "/dev/nvidia0"}
    devices = [{"name": "0", "containerEdits": {"deviceNodes": [spec]}}]
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    installed.write("/etc/cdi/nvidia.json", json.dumps(document))
    assert wrong(examine(installed.case)) == [("driver-loaded", "failure")]


@pytest.mark.parametrize(
    ("libraries", "words"),
    [
        (NEWER, "Reboot, or stop all users of the GPUs and reload the module"),
        (OLDER, f"Install the driver's libraries {VERSION}; if {OLDER} is the whole"),
    ],
)
def test_driver_libraries_of_another_version_are_one_failure(
    installed: Tree, libraries: str, words: str
) -> None:
    installed.driver(installed=libraries, gpus=0)
    (installed.root / "proc/devices").unlink()
    findings = [each for each in examine(installed.case) if not each.check.startswith("device-")]
    assert wrong(findings) == [("driver-versions", "failure")]
    [found] = [each for each in findings if each.check == "driver-versions"]
    assert found.remedy.startswith(words)


def test_a_damaged_loader_cache_is_one_finding(installed: Tree) -> None:
    installed.driver(gpus=0)
    installed.write("/etc/ld.so.cache", b"nonsense")
    findings = [each for each in examine(installed.case) if not each.check.startswith("device-")]
    assert wrong(findings) == [("driver-versions", "failure")]


# Engines -------------------------------------------------------------------------------------


def without_driver(case: Case) -> list[tuple[str, str]]:
    steps = every_step(case.config)
    return wrong(examine(case, [step for step in steps if step.part != DRIVER]))


def test_a_machine_in_order_has_no_problems(installed: Tree) -> None:
    assert without_driver(installed.case) == []


def test_one_registered_engine_of_several_is_enough(installed: Tree) -> None:
    installed.program("/usr/bin/dockerd")
    installed.program("/usr/bin/containerd")
    assert without_driver(installed.case) == []
    (installed.root / "etc/containers/containers.conf.d/gpu.conf").unlink()
    assert without_driver(installed.case) == [("engines-registered", "warning")]


def test_cdi_specs_of_gpuhook_serve_engines_without_gpu_py(installed: Tree) -> None:
    (installed.root / "etc/containers/containers.conf.d/gpu.conf").unlink()
    installed.program(f"{BIN}/gpuhook-cdi-hook")
    hook = {"hookName": "createContainer", "path": f"{BIN}/gpuhook-cdi-hook"}
    devices = [{"name": "x", "containerEdits": {"hooks": [hook]}}]
    document = {"cdiVersion": "0.5.0", "kind": "acme.com/npu", "devices": devices}
    installed.write("/etc/cdi/acme.json", json.dumps(document))
    assert without_driver(installed.case) == []


@pytest.mark.parametrize(("started", "expected"), [(2**31, []), (BOOT, ["containerd-loaded"])])
def test_an_engine_not_restarted_after_installation_is_reported(
    installed: Tree, started: int, expected: list[str]
) -> None:
    installed.write(CONTAINERD, f'[plugins.x.runtimes.gpu-py.options]\nBinaryName = "{GPU_PY}"\n')
    installed.process(7, "/usr/bin/containerd", started=started)
    installed.process(8, "/usr/bin/kubelet")
    assert [check for check, _ in without_driver(installed.case)] == expected


def test_a_broken_file_of_an_engine_is_one_finding(installed: Tree) -> None:
    installed.program("/usr/bin/crio")
    installed.write("/etc/crio/crio.conf", "[[[")
    installed.process(8, "/usr/bin/kubelet")
    assert without_driver(installed.case) == [("crio-registered", "failure")]


def test_the_selinux_remedy_depends_on_the_policy_boolean(installed: Tree) -> None:
    """The remedy names a boolean only if the policy has it; Debian's policy has none."""
    installed.write("/sys/fs/selinux/enforce", "1")
    [finding] = host.security_modules(installed.case)
    assert str(finding.status) == "warning"
    assert finding.remedy == "Run the containers with --security-opt label=disable"
    installed.write("/sys/fs/selinux/booleans/container_use_devices", "0 0")
    [finding] = host.security_modules(installed.case)
    assert finding.remedy.startswith("Run setsebool -P container_use_devices on, or ")
    installed.write("/sys/fs/selinux/booleans/container_use_devices", "1 1")
    assert without_driver(installed.case) == []


def test_the_remedy_names_the_missing_selinux_policy_module(installed: Tree) -> None:
    installed.write("/sys/fs/selinux/enforce", "1")
    installed.write("/sys/fs/selinux/booleans/container_use_dri", "0 0")
    [finding] = host.security_modules(installed.case)
    assert finding.message == "SELinux is enforcing without gpuhook's policy module"
    module = "/usr/local/share/selinux/packages/gpuhook.cil"
    assert f"gpuhook files {module} >{module}; semodule -i {module}" in finding.remedy
    installed.write(module)
    [finding] = host.security_modules(installed.case)
    assert f"semodule -i {module} and restorecon -RF {GPU_PY} " in finding.remedy


def test_remedies_with_the_selinux_policy_name_labels_and_boolean(
    installed: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root may write labels, so the test simulates them."""
    labels = {GPU_PY: b"system_u:object_r:bin_t:s0"}
    monkeypatch.setattr(Machine, "label", lambda _, path: labels[path])
    installed.write("/sys/fs/selinux/enforce", "1")
    installed.write("/sys/fs/selinux/booleans/container_use_dri", "0 0")
    installed.write("/sys/fs/selinux/booleans/gpuhook_containers_use_gpus", "1 1")
    [finding] = host.security_modules(installed.case)
    assert finding.remedy.startswith(f"Give it runc's label: restorecon -F {GPU_PY}, or ")
    labels[GPU_PY] = b"system_u:object_r:container_engine_exec_t:s0"
    assert without_driver(installed.case) == []
    installed.write("/sys/fs/selinux/booleans/gpuhook_containers_use_gpus", "0 0")
    [finding] = host.security_modules(installed.case)
    assert finding.remedy.startswith("Run setsebool -P gpuhook_containers_use_gpus on, or ")


def test_missing_cgroups_are_accepted_when_disabled_by_configuration(installed: Tree) -> None:
    installed.write("/proc/self/mountinfo", "")
    assert without_driver(installed.case) == [("cgroups", "warning")]
    installed.config.no_cgroups = True
    assert without_driver(installed.case) == []


def test_the_path_of_the_report_is_printed_only_in_plain_output(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("damaged")
    words = ["doctor", f"--config={config}", f"--report={tmp_path / 'report.tar.gz'}"]
    line = f"Wrote the report to {tmp_path}/report.tar.gz; read it before you send it.\n"
    for more in ([], ["--quiet"], ["--format=json"]):
        assert (line in CliRunner().invoke(cli, [*words, *more]).stdout) is (not more)
        (tmp_path / "report.tar.gz").unlink()
