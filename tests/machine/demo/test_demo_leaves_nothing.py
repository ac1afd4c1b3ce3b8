"""What the demo leaves on a machine where Docker runs as it is installed: nothing."""

import subprocess
from pathlib import Path

FOLDERS = ("/tmp", "/var/tmp", "/run", "/run/containerd", "/run/docker")


def output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def names() -> dict[str, list[str]]:
    found = {folder: sorted(path.name for path in Path(folder).glob("*")) for folder in FOLDERS}
    found["cgroups"] = [str(path) for path in Path("/sys/fs/cgroup").glob("**/gpuhook-demo-*")]
    return found


def test_the_demo_leaves_the_machine_alone() -> None:
    assert output("systemctl", "is-active", "docker", "containerd").split() == ["active"] * 2
    before = names()
    done = subprocess.run(["./scripts/demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert names() == before
    assert output("ctr", "containers", "list", "--quiet") == ""
    assert "moby" not in output("ctr", "namespaces", "list", "--quiet").split()
