"""Report of gpuhook doctor --before-update and --npd."""

import importlib
import json
from collections.abc import Iterable

import pytest
from click.testing import CliRunner, Result

from gpuhook.monitor.containers.open_nodes import NodeUser
from gpuhook.tools.cli import cli
from gpuhook.tools.doctor import Case, before_update, examine
from gpuhook.tools.doctor.before_update import DriverUser
from gpuhook.tools.doctor.finding import Finding, Status, failure, ok, warning

ONE, TWO = NodeUser(7, "python3", ("/dev/nvidia0",)), NodeUser(8, "a\nb", ("/dev/nvidiactl",))


@pytest.mark.parametrize(
    ("holder", "unit", "remedy"),
    [
        (
            DriverUser("ns/pod/main", "f" * 64, "kubernetes", [ONE], "kubelet", ""),
            "",
            "kubectl drain ",
        ),
        (DriverUser("web", "f" * 64, "docker", [ONE], "no", ""), "", "Run docker stop web"),
        (DriverUser("web", "f" * 64, "podman", [ONE], "", ""), "", "Run podman stop web"),
        (
            DriverUser("w", "f" * 64, "podman", [ONE], "", ""),
            "w.service",
            "Run systemctl stop w.serv",
        ),
        (
            DriverUser("x.service", "x.service", "", [ONE], "", ""),
            "x.service",
            "systemctl stop x.ser",
        ),
        (DriverUser("slurm:42", "slurm:42", "slurm", [ONE], "", ""), "", "run scancel 42"),
        (DriverUser("process 7", "process 7", "", [ONE], "", ""), "", "End process 7"),
        (DriverUser("trial", "trial", "", [ONE], "", ""), "", "Stop this container"),
    ],
    ids=lambda value: value.engine or value.name if isinstance(value, DriverUser) else None,
)
def test_each_kind_of_device_holder_has_its_remedy(
    holder: DriverUser, unit: str, remedy: str
) -> None:
    made = before_update._holder(holder, unit)
    assert remedy in made.remedy
    found = before_update._finding(made)
    assert (found.check, found.status) == ("driver-in-use", Status.FAILURE)
    assert found.remedy.startswith(made.remedy)


def test_in_use_finding_names_processes_nodes_and_restart_policy() -> None:
    holder = DriverUser(
        "web", "f" * 64, "docker", [ONE, TWO], "docker: always", "Run docker stop web"
    )
    found = before_update._finding(holder)
    assert found.message == (
        "docker:web has /dev/nvidia0, /dev/nvidiactl open in processes 7 (python3), 8 (a\\nb)"
    )
    assert found.remedy == "Run docker stop web; it is restarted by docker: always"
    idle = before_update._finding(holder._replace(processes=[], restarts="no"))
    assert (idle.check, idle.status) == ("stale-container", Status.WARNING)
    assert idle.remedy.endswith("; nothing restarts it")
    assert holder.to_json()["processes"][0] == ONE._asdict()
    assert holder._replace(restarts="").to_json()["restarts"] is None


def _npd(monkeypatch: pytest.MonkeyPatch, *findings: Finding, user: int = 0) -> Result:
    """Run the doctor for node-problem-detector, with one check that returns these findings."""

    def check(_: Case) -> Iterable[Finding]:
        yield from findings
        if not findings:
            raise ValueError("it is broken")

    command = importlib.import_module("gpuhook.tools.cli.doctor")
    monkeypatch.setattr(command, "examine", lambda case, *_: examine(case, [check]))
    monkeypatch.setattr("os.geteuid", lambda: user)
    return CliRunner().invoke(cli, ["doctor", "--npd"])


def test_npd_output_and_exit_status_follow_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    good, poor = ok("a", "Fine"), warning("b", "Poor", "Do it")
    bad, worse = failure("c", "Bad\nfile", "Mend it"), failure("d", "Worse", "Mend it")
    for findings, status, line in (
        ((good, poor), 0, "gpuhook: no failure, 1 warning\n"),
        ((poor, bad), 1, "c: Bad\\nfile\n"),
        ((bad, good, worse), 1, "c: Bad\\nfile (1 more)\n"),
        ((), 2, "gpuhook: state unknown: the check check failed\n"),
    ):
        done = _npd(monkeypatch, *findings)
        assert (done.exit_code, done.output) == (status, line)
    done = _npd(monkeypatch, good, user=1000)
    assert (done.exit_code, done.output) == (2, "gpuhook: state unknown: run it as root\n")


def test_before_update_with_conflicting_options_is_refused() -> None:
    for other in ("--npd", "--engine=docker"):
        done = CliRunner().invoke(cli, ["doctor", "--before-update", other])
        assert done.exit_code == 2
        assert "can't be combined" in done.output


def test_doctor_before_update_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    command = importlib.import_module("gpuhook.tools.cli.doctor")
    monkeypatch.setattr(
        command, "examine", lambda case, *_: examine(case, [lambda _: [ok("a", "b")]])
    )
    found = json.loads(
        CliRunner().invoke(cli, ["doctor", "--before-update", "--format=json"]).output
    )
    assert (found["status"], found["holders"]) == ("ok", [])
