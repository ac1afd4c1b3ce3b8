"""A container of gpu-py, which is the same under a hardened host's umask of 077.

Engines set their own umask; here a systemd unit starts gpu-py itself, as Slurm does.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import BUSYBOX, REQUEST, call

FIND = (
    "find", "/", "-path", "/proc", "-prune", "-o", "-path", "/sys", "-prune",
    "-o", "-type", "d", "-exec", "busybox", "stat", "-c", "%a %n", "{}", "+",
)  # fmt: skip


@pytest.fixture
def bundle(docker: tuple[str], tmp_path: Path) -> Iterator[Path]:
    """A bundle whose container lists its folders."""
    call("docker", "create", "--name=of-bundle", BUSYBOX)
    (tmp_path / "rootfs").mkdir()
    with subprocess.Popen(["docker", "export", "of-bundle"], stdout=subprocess.PIPE) as export:
        subprocess.run(["tar", "-C", tmp_path / "rootfs", "-x"], stdin=export.stdout, check=True)
    call("docker", "rm", "of-bundle")
    call("runc", "spec", "--bundle", tmp_path)
    config = tmp_path / "config.json"
    spec = json.loads(config.read_text())
    spec["process"].update(args=["busybox", *FIND], terminal=False)
    spec["process"]["env"].append(REQUEST)
    spec["root"]["readonly"] = False
    config.write_text(json.dumps(spec))
    yield tmp_path
    call("systemctl", "start", "gpuhook-watch")


def folders(bundle: Path, runtime: str, umask: str) -> set[str]:
    """Return the folders of the bundle's container with their modes; leave the bundle unchanged."""
    call("cp", "--archive", bundle, f"{bundle}.copy")
    # The helper may outlive runc by a moment. In namespaces, nothing tells systemd that a cgroup of
    # v1 is empty (release_agent), so a unit would wait for it in vain.
    # With KillMode=process, as in Slurm's unit, it doesn't wait.
    properties = (f"--property=UMask={umask}", "--property=KillMode=process")
    unit = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect", *properties)
    try:
        words = ("run", "--bundle", f"{bundle}.copy", "umask")
        return {*call(*unit, runtime, *words).splitlines()}
    finally:
        call("rm", "--recursive", f"{bundle}.copy")


def test_a_container_is_the_same_under_any_umask(bundle: Path) -> None:
    call("systemctl", "stop", "gpuhook-watch")  # its process has a umask of its own
    made = [folders(bundle, "gpu-py", umask) for umask in ("0022", "0077")]
    plain = [folders(bundle, "runc", umask) for umask in ("0022", "0077")]
    ours = [with_gpus - without for with_gpus, without in zip(made, plain, strict=True)]
    assert any("/usr/lib/firmware/nvidia" in line for line in ours[0])
    assert ours[0] == ours[1]
