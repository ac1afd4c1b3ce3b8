"""gpuhook install and uninstall on a running Docker, and Docker's own option --gpus."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.commands import Result, run, wait_until
from harness.docker import Docker, dockerd
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import PATH, image
from harness.inside import look, seen
from harness.installation import Installation
from harness.namespaces import Namespace

DEBIAN = image("debian")
TWO = ["NVIDIA_VISIBLE_DEVICES=0,2"]
# No generator writes JSON in this style, so a restored file with it was kept, not generated again.
ODD_FILE = """\
{
\t"features": { "buildkit":true },
\t"default-runtime":   "runc",
\t"runtimes": {
\t},
\t"log-opts": {"max-size":"10m",
\t             "max-file":"3"},
\t"labels": ["a=1", "b=2"]
}"""


@dataclass(frozen=True)
class Site:
    """A Docker to install to: its daemon, its daemon.json, the gpuhook command and its state."""

    docker: Docker
    config: Path
    command: Path
    state: Path

    def gpuhook(self, verb: str, *words: str) -> Result:
        options = ["--engine=docker", f"--config={self.config}", f"--state-dir={self.state}"]
        return run([self.command, verb, *options, *words])

    def default_runtime(self) -> str:
        """Return the default runtime that the running daemon reports."""
        done = self.docker.call("info", "--format", "{{.DefaultRuntime}}").ok()
        return done.stdout.strip()

    def runtimes(self) -> set[str]:
        done = self.docker.call("info", "--format", "{{json .Runtimes}}").ok()
        return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def names(workspace: Path, installation: Installation) -> Path:
    """A folder with NVIDIA's names, which gpuhook made for an engine that doesn't exist."""
    folder = workspace / "install-names"
    words = ["--engine=docker", f"--config={workspace}/names.json", "--gpus"]
    words += [f"--bin-dir={folder}", f"--state-dir={workspace}/names-state"]
    run([installation.command, "install", *words]).ok()
    return folder


@pytest.fixture(scope="module")
def daemon(
    workspace: Path,
    host: Namespace,
    archive: Path,
    names: Path,
    configs: dict[str, Path],
) -> Iterator[Docker]:
    """A Docker that knows none of our runtimes, but finds NVIDIA's names."""
    env = {"GPUHOOK_CONFIG": str(configs["runc"]), "PATH": f"{names}:{PATH}"}
    with dockerd(workspace / "install-docker", host, {}, archive, env) as engine:
        yield engine


@pytest.fixture
def site(daemon: Docker, installation: Installation, tmp_path: Path) -> Site:
    config = daemon.folder / "daemon.json"
    config.write_text(ODD_FILE)
    return Site(daemon, config, installation.command, tmp_path / "state")


def test_nvidia_ctk_configures_docker(site: Site, names: Path, driver: Driver) -> None:
    words = [f"--config={site.config}", f"--state-dir={site.state}", "--runtime=docker"]
    shown = run([names / "nvidia-ctk", "runtime", "configure", *words, "--dry-run"]).ok()
    assert "nvidia" in json.loads(shown.stdout)["runtimes"]
    assert site.config.read_text() == ODD_FILE
    assert run([names / "nvidia-ctk", "runtime", "configure", *words]).ok().stdout == ""
    assert site.docker.pid is not None
    os.kill(site.docker.pid, signal.SIGHUP)
    wait_until(lambda: "nvidia" in site.runtimes(), "Docker knows nvidia")
    inside = seen(site.docker.run(DEBIAN, *look(driver.minors), env=TWO, runtime="nvidia"))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
    site.gpuhook("uninstall", "--reload").ok()
    assert site.config.read_text() == ODD_FILE


def test_shell_completion_offers_the_name_of_a_running_container(
    site: Site, configs: dict[str, Path]
) -> None:
    site.gpuhook("install", "--reload").ok()
    assert "gpu-py" in site.runtimes()
    name = "gpuhook-completed"
    words = ["--runtime=gpu-py", f"--name={name}", "-e", *TWO]
    try:
        site.docker.call("run", "--detach", *words, DEBIAN, "sleep", "infinity").ok()
        line = {"COMP_WORDS": "gpuhook repair gpuhook-", "COMP_CWORD": "2"}
        env = {"GPUHOOK_CONFIG": str(configs["runc"]), "_GPUHOOK_COMPLETE": "zsh_complete"}
        assert name in run([site.command], env={**env, **line}).ok().stdout.splitlines()
    finally:
        site.docker.call("rm", "--force", name)
        site.gpuhook("uninstall", "--reload")


def test_docker_gives_gpus_after_install_and_refuses_after_uninstall(
    site: Site, driver: Driver
) -> None:
    shown = site.gpuhook("install", "--dry-run").ok().stdout
    assert site.config.read_text() == ODD_FILE
    assert '+\t\t"gpu-py": {' in shown.splitlines()

    done = site.gpuhook("install", "--reload").ok()
    assert f"docker: process {site.docker.pid} has reloaded {site.config}" in done.stdout
    assert "gpu-py" in site.runtimes()
    assert site.default_runtime() == "runc"
    inside = seen(site.docker.run(DEBIAN, *look(driver.minors), env=TWO))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
    installed = site.config.read_bytes()
    site.gpuhook("install", "--reload").ok()
    assert site.config.read_bytes() == installed

    site.gpuhook("uninstall", "--reload").ok()
    assert site.config.read_text() == ODD_FILE
    assert not site.state.exists()
    assert "gpu-py" not in site.runtimes()
    assert "gpu-py" in site.docker.run(DEBIAN, "true").failed().stderr


def test_default_runtime_gives_gpus_until_uninstalled(site: Site, driver: Driver) -> None:
    site.gpuhook("install", "--set-default", "--reload").ok()
    assert site.default_runtime() == "gpu-py"
    done = site.docker.call("run", "--rm", "-e", TWO[0], DEBIAN, "nvidia-smi", "-L").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
    site.gpuhook("uninstall", "--reload").ok()
    assert site.default_runtime() == "runc"
    assert site.config.read_text() == ODD_FILE


def test_installing_again_loses_nothing(site: Site) -> None:
    site.gpuhook("install", "--set-default", "--reload").ok()
    assert site.default_runtime() == "gpu-py"
    installed = site.config.read_bytes()
    done = site.gpuhook("install").ok()
    assert done.stdout.startswith(f"docker: unchanged {site.config}\nNothing has changed: ")
    assert "Check this host: gpuhook doctor\n" in done.stdout
    assert site.config.read_bytes() == installed
    site.gpuhook("install", "--no-set-default", "--reload").ok()
    assert site.default_runtime() == "runc"
    assert "gpu-py" in site.runtimes()
    site.gpuhook("uninstall", "--reload").ok()
    assert site.config.read_text() == ODD_FILE


@pytest.mark.protects(
    "docker-forgets",
    "removal: gpu-py is also removed from a running Docker daemon",
    instead="edited = json_text.edited(text, document, change.path)",
)
@pytest.mark.parametrize("text", [None, "{}", '{"log-level":  "warn"}\n'])
def test_uninstall_removes_the_runtime_from_a_running_docker(site: Site, text: str | None) -> None:
    """Without help, dockerd keeps runtimes and a default that its file no longer names."""
    site.config.unlink()
    if text is not None:
        site.config.write_text(text)
    site.gpuhook("install", "--set-default", "--reload").ok()
    assert site.default_runtime() == "gpu-py"
    done = site.gpuhook("uninstall", "--reload").ok()
    assert f"docker: process {site.docker.pid} no longer has gpu-py" in done.stdout
    assert site.default_runtime() == "runc"
    assert "gpu-py" not in site.runtimes()
    assert (site.config.read_text() if site.config.exists() else None) == text
    assert not site.state.exists()


def test_install_waits_until_a_slow_docker_has_read_its_config(site: Site) -> None:
    """The next command may be `docker run`."""
    words = ["install", "--engine=docker", "--reload", f"--config={site.config}"]
    assert site.docker.pid is not None
    os.kill(site.docker.pid, signal.SIGSTOP)
    try:
        with subprocess.Popen([site.command, *words, f"--state-dir={site.state}"]) as installing:
            try:
                wait_until(lambda: "gpu-py" in site.config.read_text(), "the file is written")
                with pytest.raises(subprocess.TimeoutExpired):
                    installing.wait(2.0)  # a request waits five seconds for its answer
            finally:
                os.kill(site.docker.pid, signal.SIGCONT)
        assert installing.returncode == 0
        assert "gpu-py" in site.runtimes()
    finally:
        site.gpuhook("uninstall", "--reload")


def test_uninstall_with_an_unresponsive_docker_is_refused(site: Site) -> None:
    site.gpuhook("install", "--set-default", "--reload").ok()
    assert site.default_runtime() == "gpu-py"
    installed = site.config.read_bytes()
    assert site.docker.pid is not None
    os.kill(site.docker.pid, signal.SIGSTOP)
    try:
        done = site.gpuhook("uninstall", "--reload").failed()
    finally:
        os.kill(site.docker.pid, signal.SIGCONT)
    assert f"The running dockerd {site.docker.pid} couldn't be asked" in done.stderr
    assert "gpuhook uninstall --engine docker && systemctl restart docker" in done.stderr
    assert site.config.read_bytes() == installed
    site.gpuhook("uninstall", "--reload").ok()
    assert site.default_runtime() == "runc"


def test_a_default_set_by_the_administrator_blocks_removal(site: Site) -> None:
    """dockerd doesn't start if its default names a missing runtime."""
    site.gpuhook("install").ok()
    changed = site.config.read_text().replace('"runc"', '"gpu-py"')
    site.config.write_text(changed)
    done = site.gpuhook("uninstall", "--reload").failed()
    assert f'"default-runtime" in {site.config} is gpu-py' in done.stderr
    assert site.config.read_text() == changed
    site.config.write_text(changed.replace('"default-runtime": "gpu-py"', '"x": "runc"'))
    site.gpuhook("uninstall", "--reload").ok()


def test_uninstall_unless_in_use_is_refused_while_a_container_needs_it(site: Site) -> None:
    site.gpuhook("install", "--reload").ok()
    assert "gpu-py" in site.runtimes()
    installed = site.config.read_bytes()
    words = ["run", "--detach", "--network=none", "--stop-timeout=0"]
    free = site.docker.call(*words, "--name=free", DEBIAN, "sleep", "1000").ok().stdout[:12]
    bound = site.docker.call(*words, "--runtime=gpu-py", "--name=bound", DEBIAN, "sleep", "1000")
    try:
        name = bound.ok().stdout[:12]
        done = site.gpuhook("uninstall", "--unless-in-use").failed()
        assert f"Run this first: docker stop {name}." in done.stderr
        assert free not in done.stderr
        assert site.config.read_bytes() == installed
        site.docker.call("stop", name).ok()
        site.gpuhook("uninstall", "--unless-in-use").ok()
    finally:
        site.docker.call("rm", "--force", "bound", "free").ok()
    assert "gpu-py" not in site.runtimes()


def test_a_running_container_stops_a_removal_unless_forced(site: Site) -> None:
    site.gpuhook("install", "--reload").ok()
    assert "gpu-py" in site.runtimes()
    installed = site.config.read_bytes()
    words = ["run", "--detach", "--network=none", "--stop-timeout=0", "--name=bound"]
    started = site.docker.call(*words, "--runtime=gpu-py", DEBIAN, "sleep", "1000").ok()
    name = started.stdout[:12]
    try:
        for more in ((), ("--reload",)):
            done = site.gpuhook("uninstall", *more).failed()
            assert f"Run this first: docker stop {name}; or continue with" in done.stderr
            assert site.config.read_bytes() == installed
        shown = site.gpuhook("uninstall", "--dry-run").ok()
        assert name in shown.stderr
        assert '-    "gpu-py"' in shown.stdout or "gpu-py" in shown.stdout
        assert site.config.read_bytes() == installed
        site.gpuhook("uninstall", "--force").ok()
        assert site.config.read_text() == ODD_FILE
        assert site.docker.call("exec", "bound", "true").status == 0
    finally:
        site.docker.call("rm", "--force", "bound").ok()


def test_a_runtime_with_arguments_counts_as_in_use(site: Site) -> None:
    """Docker calls a runtime with arguments through its own script."""
    entry = {"path": str(site.command.with_name("gpu-py")), "runtimeArgs": ["--debug"]}
    site.config.write_text(json.dumps({"runtimes": {"talks": entry}}))
    assert site.docker.pid is not None
    os.kill(site.docker.pid, signal.SIGHUP)
    wait_until(lambda: "talks" in site.runtimes(), "Docker knows the runtime")
    words = ["run", "--detach", "--network=none", "--runtime=talks", "--name=bound"]
    name = site.docker.call(*words, DEBIAN, "sleep", "1000").ok().stdout[:12]
    try:
        done = site.gpuhook("uninstall", "--unless-in-use").failed()
    finally:
        site.docker.call("rm", "--force", "bound").ok()
    assert f"docker stop {name}." in done.stderr


def test_uninstall_is_refused_while_gpu_py_is_the_default_runtime(site: Site) -> None:
    program = site.command.with_name("gpu-py")
    runtimes = {"gpu-py": {"path": str(program)}}
    site.config.write_text(json.dumps({"runtimes": runtimes, "default-runtime": "gpu-py"}))
    assert site.docker.pid is not None
    os.kill(site.docker.pid, signal.SIGHUP)
    wait_until(lambda: site.default_runtime() == "gpu-py", "gpu-py is Docker's default")
    try:
        done = site.gpuhook("uninstall", "--unless-in-use").failed()
    finally:
        site.config.write_text(ODD_FILE)
        os.kill(site.docker.pid, signal.SIGHUP)
        wait_until(lambda: site.default_runtime() == "runc", "runc is Docker's default again")
    assert f"The running dockerd {site.docker.pid} has gpu-py ({program})" in done.stderr
    assert "nothing to remove" in site.gpuhook("uninstall", "--unless-in-use").ok().stdout


def test_uninstall_keeps_later_changes_of_the_administrator(site: Site) -> None:
    site.gpuhook("install", "--set-default", "--cdi").ok()
    changed = site.config.read_text().replace('"10m"', '"20m"')
    site.config.write_text(changed)
    site.gpuhook("uninstall").ok()
    kept = json.loads(ODD_FILE.replace('"10m"', '"20m"'))
    assert json.loads(site.config.read_text()) == kept
    assert list(json.loads(site.config.read_text())) == list(kept)  # in the same order


def test_containers_that_need_the_runtime_are_named(site: Site) -> None:
    site.gpuhook("install", "--reload").ok()
    assert "gpu-py" in site.runtimes()
    site.docker.call("create", "--runtime=gpu-py", "--name=bound", DEBIAN).ok()
    site.docker.call("create", "--name=free", DEBIAN).ok()
    try:
        done = site.gpuhook("uninstall").ok()
    finally:
        site.docker.call("rm", "--force", "bound", "free").ok()
    assert "bound" in done.stderr
    assert "free" not in done.stderr


@pytest.mark.parametrize("text", ["{,}", '{"runtimes": ', "[]", "\udcff"])
def test_an_unparsable_config_is_refused_and_unchanged(site: Site, text: str) -> None:
    content = text.encode("utf-8", "surrogateescape")
    site.config.write_bytes(content)
    done = site.gpuhook("install")
    assert done.status == 1
    assert str(site.config) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert site.config.read_bytes() == content
    assert not site.state.exists()


@pytest.fixture
def registered(site: Site) -> Iterator[Site]:
    site.gpuhook("install", "--reload").ok()
    assert "gpu-py" in site.runtimes()
    yield site
    site.gpuhook("uninstall", "--reload").ok()


@pytest.mark.parametrize(
    ("gpus", "indices"),
    [
        ('"device=0,2"', [0, 2]),
        ("device=3", [3]),
        ("all", range(8)),
        ("2", [0, 1]),
        ('all,"capabilities=utility"', range(8)),
    ],
)
@pytest.mark.parametrize("runtime", ["runc", "gpu-py"])
def test_the_gpus_option_gives_the_named_gpus(
    registered: Site, driver: Driver, gpus: str, indices: list[int], runtime: str
) -> None:
    """With runc only the hook works; with gpu-py the hook is called twice, and works once."""
    options = ["--gpus", gpus]
    script = look(driver.minors)
    inside = seen(registered.docker.run(DEBIAN, *script, options=options, runtime=runtime))
    minors = {gpu.minor for gpu in driver.chosen(*indices)}
    assert inside.gpu_minors == minors
    assert {opened for opened, _ in inside.nodes.values()} == {"ENXIO"}
    assert {minor for minor, opened in inside.by_hand.items() if opened == "ENXIO"} == minors


class ApiConnection(http.client.HTTPConnection):
    """A connection to Docker's API on its unix socket, as docker compose uses it."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self.path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)

    def create(self, name: str, body: dict[str, Any]) -> None:
        """Create a container as compose does, with all settings of its file in one request."""
        headers = {"Content-Type": "application/json"}
        path = f"/v1.41/containers/create?name={name}"
        self.request("POST", path, json.dumps(body), headers)
        answer = self.getresponse()
        assert answer.status == 201, answer.read()


@pytest.mark.parametrize(
    ("environment", "more"),
    [
        (["NVIDIA_VISIBLE_DEVICES=0,2", "OTHER"], {"Runtime": "gpu-py"}),
        (
            ["NVIDIA_DRIVER_CAPABILITIES=utility,compute"],
            {"DeviceRequests": [{"DeviceIDs": ["0", "2"], "Capabilities": [["gpu"]]}]},
        ),
        (
            ["NVIDIA_VISIBLE_DEVICES=all"],
            {
                "Runtime": "gpu-py",
                "DeviceRequests": [
                    {"Driver": "nvidia", "DeviceIDs": ["0", "2"], "Capabilities": [["gpu"]]}
                ],
            },
        ),
    ],
    ids=["environment", "devices", "both"],
)
def test_requests_of_docker_compose_select_gpus(
    registered: Site, driver: Driver, environment: list[str], more: dict[str, Any]
) -> None:
    """compose sends ``environment`` and ``deploy.resources.reservations.devices``."""
    body = {
        "Image": DEBIAN,
        "Cmd": ["nvidia-smi", "-L"],
        "Env": environment,
        "HostConfig": {"NetworkMode": "none", **more},
    }
    with contextlib.closing(ApiConnection(registered.docker.folder / "docker.sock")) as docker:
        docker.create("composed", body)
    try:
        done = registered.docker.call("start", "--attach", "composed").ok()
    finally:
        registered.docker.call("rm", "--force", "composed").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))


def test_the_gpus_option_with_an_unknown_gpu_is_refused(registered: Site) -> None:
    options = ["--gpus", "device=99"]
    done = registered.docker.run(DEBIAN, "true", options=options, runtime="runc").failed()
    assert "This host has no GPU or MIG device '99'" in done.stderr


def test_an_old_entry_for_nvidias_runtime_starts_gpu_py(
    site: Site, names: Path, driver: Driver
) -> None:
    """NVIDIA's name in an older daemon.json leads to gpu-py."""
    path = str(names / "nvidia-container-runtime")
    old = {"runtimes": {"nvidia": {"path": path, "runtimeArgs": []}}}
    site.config.write_text(json.dumps(old))
    assert site.docker.pid is not None
    assert site.docker.pid is not None
    os.kill(site.docker.pid, signal.SIGHUP)
    wait_until(lambda: "nvidia" in site.runtimes(), "Docker knows nvidia")
    done = site.docker.run(DEBIAN, "nvidia-smi", "-L", env=TWO, runtime="nvidia").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
