"""The doctor on hosts where no engine starts the containers: Slurm, enroot and the like."""

import pytest
from click.testing import CliRunner
from fabricated import BIN, Tree, said

from gpuhook.hpc.slurm import oci_conf
from gpuhook.tools.cli import cli
from gpuhook.tools.doctor import engines, without_daemon

FOLDERS = ("/etc/slurm", "/etc/slurm-llnl", "/usr/local/etc/slurm", "/run/slurm/conf")


def slurms(tree: Tree, folder: str = "/etc/slurm", program: str = f"{BIN}/gpu-py") -> None:
    text = oci_conf.text("/usr/bin/gpuhook", program, "/run/slurm-containers")
    tree.write(f"{folder}/oci.conf", text)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_slurm_node_without_an_engine_is_ok(tree: Tree, folder: str) -> None:
    tree.program(f"{BIN}/gpu-py")
    assert said(engines.engine_found(tree.case))["engines"][0] == "warning"
    slurms(tree, folder)
    assert said(engines.engine_found(tree.case))["engines"] == ("ok", "Found Slurm")
    path = f"{folder}/oci.conf"
    assert said(without_daemon.slurm(tree.case)) == {
        "slurm-oci": ("ok", f"{path} calls {BIN}/gpu-py")
    }


def test_an_unregistered_engine_on_a_slurm_node_gives_no_warning(tree: Tree) -> None:
    tree.program("/usr/bin/podman")
    assert said(engines.used(tree.case))["engines-registered"][0] == "warning"
    slurms(tree)
    assert said(engines.used(tree.case)) == {}
    case = tree.case
    case.engine = "podman"
    assert said(engines.used(case))["engines-registered"][0] == "warning"


@pytest.mark.parametrize("engine", ["enroot", "charliecloud"])
def test_podman_need_not_be_registered_after_a_daemonless_install(tree: Tree, engine: str) -> None:
    tree.program("/usr/bin/podman")
    for name in ("gpu-py", "gpuhook", "gpuhook-cdi-hook"):
        tree.program(f"{BIN}/{name}")
    words = ["install", f"--prefix={tree.root}", f"--runtime-path={tree.root}{BIN}/gpu-py"]
    done = CliRunner().invoke(cli, [*words, "--engine", engine])
    assert done.exit_code == 0, done.output
    assert said(engines.used(tree.case)) == {}
    assert engine in said(engines.engine_found(tree.case))["engines"][1]


@pytest.mark.parametrize("program", ["/gone/gpu-py", "/gone folder/gpu-py"])
def test_a_missing_program_in_oci_conf_is_a_failure(tree: Tree, program: str) -> None:
    slurms(tree, program=program)
    status, message = said(without_daemon.slurm(tree.case))["slurm-oci"]
    assert status == "failure"
    assert program in message


@pytest.mark.parametrize(
    "text", ["", 'RunTimeRun="runc run %n"\n', 'RunTimeRun="it\'s"\n', "RunTimeRun", "# gpu-py"]
)
def test_an_oci_conf_without_gpu_py_is_ignored(tree: Tree, text: str) -> None:
    tree.program("/usr/bin/podman")
    tree.write("/etc/slurm/oci.conf", text)
    assert said(without_daemon.slurm(tree.case)) == {}
    assert said(engines.used(tree.case))["engines-registered"][0] == "warning"
