"""gpuhook doctor --before-update, with real containers and processes that hold a node open."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.bundles import Bundle
from harness.commands import Result, run, wait_until
from harness.containerd import Containerd
from harness.docker import Docker
from harness.images import REPOSITORY, image
from harness.installation import Installation
from harness.podman import Podman
from harness.prefork import ONE

NUMBERS = {"acme0": (1, 7), "acme1": (1, 5)}  # of /dev/full and /dev/zero, which can be opened
TABLE = """
[[gpuhook.vendors]]
name = "acme"
kind = "acme.com/npu"
variable = "ACME_VISIBLE_DEVICES"
nodes = ["/dev/acme{n}"]
files = ["/opt/acme/libacme.so"]
"""
HOLD = 'exec busybox sleep 1000 3<"$1"'


@dataclass(frozen=True)
class Update:
    """A simulated driver whose nodes can be opened, and the doctor before its update."""

    installation: Installation
    root: Path
    config: Path

    def node(self, number: int) -> Path:
        return self.root / f"dev/acme{number}"

    def doctor(self, *words: str, env: dict[str, str] | None = None) -> Result:
        command = (str(self.installation.command), "doctor", "--config", str(self.config), *words)
        return run(command, env=env)

    def report(self) -> dict[str, Any]:
        done = self.doctor("--before-update", "--format=json")
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.status == {"ok": 0, "warning": 1, "failure": 2}[found["status"]]
        return found

    def holders(self, of: str) -> list[dict[str, Any]]:
        """Return the holders whose name or id contains this text."""
        every = self.report()["holders"]
        return [each for each in every if of in each["name"] or of in each["id"]]


@pytest.fixture(scope="module")
def update(installation: Installation, workspace: Path) -> Iterator[Update]:
    root = workspace / "update-driver"
    (root / "dev").mkdir(parents=True)
    (root / "opt/acme").mkdir(parents=True)
    (root / "opt/acme/libacme.so").write_text("a library\n")
    for name, (major, minor) in NUMBERS.items():
        os.mknod(root / "dev" / name, 0o020666, os.makedev(major, minor))
    config = workspace / "update.toml"
    config.write_text(
        f'[nvidia-container-cli]\nroot = "{root}"\n[gpuhook]\n'
        f'driver-roots = ["acme={root}"]\nstate-dir = "{workspace}/update-state"\n{TABLE}'
    )
    yield Update(installation, root, config)
    run(["rm", "-rf", root]).ok()


@pytest.fixture
def held(update: Update) -> Iterator[Callable[[str, int], int]]:
    """A function that starts a process that holds a node open or mapped, and returns its PID."""
    started = []

    def hold(how: str, flags: int = os.O_RDONLY) -> int:
        keep = {
            "open": "fd",
            "mapped": "keep = mmap.mmap(fd, 4096, mmap.MAP_PRIVATE); os.close(fd)",
        }[how]
        node = update.node(0 if how == "open" else 1)
        text = f"import mmap, os; fd = os.open({str(node)!r}, {flags}); {keep}"
        words = ("python3", "-c", f"{text}; print(flush=True); input()")
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        return process.pid

    yield hold
    for process in started:
        process.communicate(b"\n", timeout=60)


def _pids(found: list[dict[str, Any]]) -> dict[int, list[str]]:
    return {one["pid"]: one["nodes"] for each in found for one in each["processes"]}


def test_a_process_with_an_open_node_is_a_failure(update: Update, held: Callable[..., int]) -> None:
    pid, without = held("open"), held("open", os.O_PATH)
    found = _pids(update.report()["holders"])
    assert found[pid] == ["/dev/acme0"]
    assert without not in found
    done = update.doctor("--before-update", "--quiet")
    assert done.status == 2
    assert f"/dev/acme0 open in process {pid} (python3)" in " ".join(done.stdout.split())


def test_a_process_that_only_mapped_a_node_is_found(
    update: Update, held: Callable[..., int]
) -> None:
    """A mapping keeps the kernel module in use without a descriptor."""
    pid = held("mapped")
    assert _pids(update.report()["holders"])[pid] == ["/dev/acme1"]


@pytest.mark.parametrize("policy", ["always", "no"])
def test_a_docker_container_is_reported_with_its_restart_policy(
    docker: Docker, update: Update, policy: str
) -> None:
    name = f"update-{policy}"
    words = ["run", "--detach", f"--name={name}", f"--restart={policy}", "--runtime=runc"]
    words += [f"--device={update.node(0)}:/dev/acme0", image("busybox")]
    container = docker.call(*words, "sh", "-c", HOLD, "sh", "/dev/acme0").ok().stdout.strip()
    try:
        _check(update, container, "docker", "no" if policy == "no" else "docker: always")
    finally:
        docker.call("rm", "--force", name).ok()


@pytest.mark.parametrize("policy", ["always", "no"])
def test_a_podman_container_is_reported_with_its_restart_policy(
    podman_hook_runc: Podman, update: Update, policy: str
) -> None:
    name = f"update-podman-{policy}"
    words = ["run", "--detach", f"--name={name}", f"--restart={policy}", "--network=none"]
    words += ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--pids-limit=0"]
    words += [f"--device={update.node(0)}:/dev/acme0", image("busybox")]
    made = podman_hook_runc.call(*words, "sh", "-c", HOLD, "sh", "/dev/acme0").ok()
    try:
        restarts = "no" if policy == "no" else "podman: always"
        _check(update, made.stdout.strip(), "podman", restarts)
    finally:
        podman_hook_runc.call("rm", "--force", "--time=0", name).ok()


def test_a_containerd_container_is_reported(containerd_runc: Containerd, update: Update) -> None:
    name = "update-containerd"
    words = ["run", "--detach", f"--device={update.node(0)}", image("busybox"), name]
    inside = str(update.node(0))
    containerd_runc.call(*words, "sh", "-c", HOLD, "sh", inside).ok()
    try:
        _check(update, name, "", None)
    finally:
        containerd_runc.call("task", "kill", "--signal=KILL", name).ok()
        wait_until(lambda: containerd_runc.call("task", "rm", name).status == 0, "it has ended")
        containerd_runc.call("container", "rm", name).ok()


def _check(update: Update, container: str, engine: str, restarts: str | None) -> None:
    wait_until(lambda: bool(_pids(update.holders(container))), f"{container} has its node open")
    [one] = update.holders(container)
    assert (one["engine"], one["restarts"]) == (engine, restarts)
    assert [each["nodes"] for each in one["processes"]] == [["/dev/acme0"]]
    remedy = f"Run {engine} stop {one['name']}" if engine else "Stop this container"
    assert one["remedy"] == remedy


@ONE
def test_a_container_without_open_nodes_is_a_warning(bundle: Bundle, update: Update) -> None:
    """It has the old driver's files; the status is 1 unless other processes are holders."""
    bundle.environ("ACME_VISIBLE_DEVICES=0")
    bundle.command("sleep", "1000")
    config = bundle.path / "update.toml"
    config.write_text(update.config.read_text())
    bundle.detach(update.installation.runtime, config)
    found = update.report()
    [one] = [each for each in found["holders"] if each["id"] == bundle.name]
    assert one["processes"] == []
    assert [each for each in found["findings"] if each["check"] == "stale-container"]
    assert found["status"] in ("warning", "failure")
    bundle.call(bundle.runtime, "kill", bundle.name, "KILL").ok()


def test_a_spec_with_the_drivers_files_is_a_warning(update: Update, workspace: Path) -> None:
    folder = workspace / "update-cdi"
    words = (
        "cdi",
        "generate",
        "--config",
        update.config,
        "--output",
        folder,
        "--kind=acme.com/npu",
    )
    run([update.installation.command, *words]).ok()
    text = update.config.read_text()
    modes = f'\n[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{folder}"]\n'
    changed = workspace / "update-spec.toml"
    changed.write_text(text + modes)
    other = Update(update.installation, update.root, changed)
    [found] = [each for each in other.report()["findings"] if each["check"] == "stale-spec"]
    assert (found["status"], "1 files" in found["message"]) == ("warning", True)


def test_the_documented_node_problem_detector_rule_works(update: Update) -> None:
    """The rule runs as in node-problem-detector, in the namespaces of a host process."""
    page = (REPOSITORY / "docs/kubernetes/device-plugin.md").read_text()
    [text] = re.findall(r'```json\n(\{\n  "plugin".*?)```', page, re.DOTALL)
    written = json.loads(text)
    [rule] = written["rules"]
    assert {rule["condition"]} == {each["type"] for each in written["conditions"]}
    words = [*rule["args"], "--config", str(update.config)]
    words[words.index("--target=1")] = f"--target={os.getpid()}"
    words[words.index("/opt/gpuhook/bin/gpuhook")] = str(update.installation.command)
    done = run([rule["path"], *words])
    line = done.stdout
    assert done.status in (0, 1), done
    assert line.endswith("\n")
    assert 0 < len(line) <= written["pluginConfig"]["max_output_length"]


def test_npd_output_is_one_line_with_a_plugin_status(update: Update) -> None:
    """node-problem-detector's custom plugins print one line and return 0, 1 or 2."""
    done = update.doctor("--npd")
    assert (done.status, done.stdout.count("\n")) in ((0, 1), (1, 1))
    broken = update.config.with_name("update-broken.toml")
    broken.write_text("[gpuhook]\nstate-dir = 7\n")
    bad = Update(update.installation, update.root, broken)
    done = bad.doctor("--npd")
    assert done.status == 1
    assert done.stdout.startswith("configuration: ")
    as_json = json.loads(bad.doctor("--npd", "--format=json").stdout)
    assert as_json["npd"] == {"status": 1, "message": done.stdout.strip()}
    setpriv = ("setpriv", "--reuid=65534", "--clear-groups", bad.installation.command)
    done = run([*setpriv, "doctor", "--npd"])
    assert done.status == 2
    assert done.stdout == "gpuhook: state unknown: run it as root\n"
    assert bad.doctor("--npd", "--before-update").status == 2
