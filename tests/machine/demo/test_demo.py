"""The first command of the README, run from a clone on a machine with Docker."""

from pathlib import Path

from booted import call
from harness.commands import run
from harness.images import REPOSITORY

FOLDERS = ("/tmp", "/var/tmp", "/run", "/run/containerd", "/run/docker", "/sys/class/net")


def state() -> dict[str, list[str]]:
    """Return objects that the demo could leave or use: files, interfaces, cgroups, containers."""
    found = {folder: sorted(path.name for path in Path(folder).glob("*")) for folder in FOLDERS}
    found["cgroups"] = [str(path) for path in Path("/sys/fs/cgroup").glob("**/gpuhook-demo-*")]
    namespaces = call("ctr", "namespaces", "list", "--quiet").split()
    for name in namespaces:
        found[name] = call("ctr", "--namespace", name, "containers", "list", "--quiet").split()
    return found


def test_the_demo_works_and_leaves_the_machine_unchanged() -> None:
    assert call("systemctl", "is-active", "docker", "containerd").split() == ["active"] * 2
    before = state()
    assert "docker0" in before["/sys/class/net"]
    done = run(["./scripts/demo"], cwd=REPOSITORY, timeout=600.0).ok()
    assert "All went well" in done.stdout
    assert state() == before
    assert call("systemctl", "is-active", "docker", "containerd").split() == ["active"] * 2
