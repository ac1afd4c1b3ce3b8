"""Findings of the doctor after gpuhook install, and again after gpuhook uninstall."""

import pytest
from click.testing import CliRunner
from fabricated import BIN, Tree, said

from gpuhook.tools.cli import cli
from gpuhook.tools.doctor import docker, engines
from gpuhook.tools.doctor.case import Check

GPU_PY = f"{BIN}/gpu-py"
CHECKS: dict[str, Check] = {
    "docker": docker.docker,
    "containerd": engines.containerd,
    "crio": engines.crio,
    "podman": engines.podman,
}
PROGRAMS = {"docker": "dockerd"}


def _gpuhook(tree: Tree, command: str, engine: str, *options: str) -> None:
    words = [command, "--engine", engine, "--prefix", str(tree.root)]
    done = CliRunner().invoke(cli, [*words, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def _statuses(tree: Tree, engine: str) -> dict[str, str]:
    return {check: status for check, (status, _) in said(CHECKS[engine](tree.case)).items()}


@pytest.mark.parametrize(
    ("engine", "version"),
    [*((name, "2") for name in CHECKS), ("containerd", "3"), ("containerd", "4")],
)
def test_checks_pass_after_install_and_report_unused_after_uninstall(
    tree: Tree, engine: str, version: str
) -> None:
    tree.program(f"/usr/bin/{PROGRAMS.get(engine, engine)}")
    tree.process(7, "/usr/bin/kubelet")
    tree.program(GPU_PY)
    tree.program(f"{BIN}/gpuhook-prestart")
    if engine == "containerd":
        tree.write("/etc/containerd/config.toml", f"version = {version}\n")
    assert f"{engine}-unused" in _statuses(tree, engine)
    _gpuhook(tree, "install", engine, "--runtime-path", GPU_PY)
    found = _statuses(tree, engine)
    assert set(found.values()) == {"ok"}, found
    assert f"{engine}-unused" not in found
    _gpuhook(tree, "uninstall", engine)
    assert f"{engine}-unused" in _statuses(tree, engine)


def test_a_changed_low_level_runtime_of_podman_gives_a_note(tree: Tree) -> None:
    """gpuhook install writes podman's own runtime, so it must run again after a change."""
    for program in ("/usr/bin/podman", "/usr/bin/runc", GPU_PY):
        tree.program(program)
    for podmans in ("runc", "crun"):
        tree.program(f"/usr/bin/{podmans}")  # podman prefers crun
        _gpuhook(tree, "install", "podman", "--runtime-path", GPU_PY, "--set-default")
        assert "podman-low-level" not in _statuses(tree, "podman")
        tree.write("/etc/containers/containers.conf", '[engine]\nruntime = "runc"\n')
        is_other = podmans == "crun"
        assert _statuses(tree, "podman").get("podman-low-level") == ("note" if is_other else None)
        tree.write("/etc/containers/containers.conf", "")


@pytest.mark.parametrize("stage", ["prestart", "precreate"])
def test_an_installed_podman_hook_is_ok(tree: Tree, stage: str) -> None:
    tree.program("/usr/bin/podman")
    tree.program(GPU_PY)
    tree.program(f"{BIN}/gpuhook-prestart")
    _gpuhook(tree, "install", "podman", "--runtime-path", GPU_PY, "--hook", stage)
    found = _statuses(tree, "podman")
    assert found["podman-hook"] == "ok", found
