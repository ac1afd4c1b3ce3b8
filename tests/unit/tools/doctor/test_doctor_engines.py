import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from fabricated import BIN, BOOT, Tree, said

from gpuhook.tools.doctor import docker as docker_checks
from gpuhook.tools.doctor import engines

GPU_PY = f"{BIN}/gpu-py"
DAEMON_JSON = "/etc/docker/daemon.json"
CONTAINERD = "/etc/containerd/config.toml"
RUNTIME_TABLES = {
    "1": '[plugins.cri.containerd.runtimes.gpu-py]\nruntime_engine = "{}"\n',
    "2": '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu-py]\n'
    '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu-py.options]\n'
    'BinaryName = "{}"\n',
    "3": '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.gpu-py]\n'
    '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.gpu-py.options]\n'
    'BinaryName = "{}"\n',
}
RunDocker = Callable[..., None]


def _daemon_json(tree: Tree, program: str = GPU_PY, path: str = DAEMON_JSON) -> None:
    tree.write(path, json.dumps({"runtimes": {"gpu-py": {"path": program}}}))


def _docker(tree: Tree) -> dict[str, tuple[str, str]]:
    return said(docker_checks.docker(tree.case))


def test_a_host_without_engines_gives_a_warning(tree: Tree) -> None:
    assert said(engines.engine_found(tree.case))["engines"][0] == "warning"
    assert _docker(tree) == {}
    for check in (engines.containerd, engines.crio, engines.podman):
        assert said(check(tree.case)) == {}


def test_engines_that_are_installed_or_run_are_named(tree: Tree) -> None:
    tree.program("/usr/bin/podman")
    tree.process(7, "/opt/crio")
    assert said(engines.engine_found(tree.case))["engines"] == ("ok", "Found crio, podman")


def test_a_docker_that_is_not_running_gives_a_note(tree: Tree) -> None:
    tree.program("/usr/bin/dockerd")
    found = _docker(tree)
    assert {check: status for check, (status, _) in found.items()} == {
        "docker-unused": "note",
        "docker-loaded": "ok",
    }


@pytest.mark.parametrize(
    ("runtimes", "status", "words"),
    [
        ({"runc": "runc", "gpu-py": GPU_PY}, "ok", "default runtime is runc"),
        ({"runc": "runc"}, "failure", "hasn't loaded the runtime gpu-py"),
        ({"gpu-py": "/old/gpu-py"}, "failure", "hasn't loaded"),
        (None, "warning", "No such file or directory"),
    ],
    ids=["all is right", "not reloaded", "another path", "no answer"],
)
def test_dockerd_is_checked_for_the_loaded_runtime(
    tree: Tree, docker: RunDocker, runtimes: dict[str, str] | None, status: str, words: str
) -> None:
    _daemon_json(tree)
    tree.program(GPU_PY)
    tree.process(9, "/usr/bin/dockerd", "-H", "fd://")
    if runtimes is not None:
        docker(runtimes)
    found = _docker(tree)
    assert {check: status for check, (status, _) in found.items()} == {
        "docker-registered": "ok", "docker-loaded": status, "docker-gpus-option": "note",
    }  # fmt: skip
    assert words in found["docker-loaded"][1]
    assert "dev containers don't work" in found["docker-gpus-option"][1]


@pytest.mark.parametrize(("path", "more"), [("", ""), ("/srv/my file", " --config '/srv/my file'")])
@pytest.mark.parametrize(
    ("engine", "usual", "text"),
    [
        ("docker", DAEMON_JSON, '{{"runtimes": {{"gpu-py": {{"path": "{}"}}}}}}'),
        ("containerd", CONTAINERD, RUNTIME_TABLES["2"]),
    ],
)
def test_the_remedy_names_the_config_file_that_the_engine_reads(
    tree: Tree, engine: str, usual: str, text: str, path: str, more: str
) -> None:
    program, option = {"docker": ("dockerd", "--config-file")}.get(engine, (engine, "--config"))
    tree.process(9, program, option, path or usual)
    check = {"docker": docker_checks.docker, "containerd": engines.containerd}[engine]
    for registered in ("/other/runc", "/gone/gpu-py"):
        tree.write(path or usual, text.format(registered))
        remedies = " ".join(each.remedy for each in check(tree.case))
        assert f"gpuhook install --engine {engine}{more}" in remedies
        assert ("--config" in remedies) is bool(more)


@pytest.mark.parametrize("answer", [[], "text", None])
def test_a_malformed_docker_answer_gives_a_warning(tree: Tree, answer: Any) -> None:
    tree.process(9, "dockerd")
    with tree.docker_answers("/var/run/docker.sock", answer):
        assert _docker(tree)["docker-loaded"][0] == "warning"


def test_an_error_answer_of_docker_is_quoted(tree: Tree) -> None:
    tree.process(9, "dockerd")
    with tree.docker_answers("/var/run/docker.sock", {}, "403 Forbidden"):
        assert "403 Forbidden" in _docker(tree)["docker-loaded"][1]


def test_a_missing_registered_program_is_a_failure(tree: Tree) -> None:
    tree.program("/usr/bin/dockerd")
    _daemon_json(tree)
    status, message = _docker(tree)["docker-registered"]
    assert status == "failure"
    assert "can't be executed" in message


@pytest.mark.parametrize("text", ["{", '{"runtimes": ', "gpu", "[]", "1", '{"runtimes": []}',
                                  '{"runtimes": {"a": 1}}'])  # fmt: skip
def test_invalid_daemon_json_is_a_failure_and_odd_values_are_ignored(tree: Tree, text: str) -> None:
    tree.program("/usr/bin/dockerd")
    tree.write(DAEMON_JSON, text)
    found = _docker(tree)
    if text in ("{", '{"runtimes": ', "gpu"):
        status, message = found["docker-registered"]
        assert status == "failure"
        assert "isn't JSON" in message
    else:
        assert "docker-unused" in found


def test_config_file_and_socket_options_of_dockerd_are_used(tree: Tree, docker: RunDocker) -> None:
    tree.process(9, "dockerd", "--config-file=/srv/d.json", "--host", "unix:///srv/d.sock")
    _daemon_json(tree, path="/srv/d.json")
    tree.program(GPU_PY)
    docker({"gpu-py": GPU_PY}, "/srv/d.sock")
    found = _docker(tree)
    assert found["docker-registered"][0] == found["docker-loaded"][0] == "ok"
    assert "/srv/d.json" in found["docker-registered"][1]


def test_rootless_dockerd_files_are_found_in_the_users_home(tree: Tree, docker: RunDocker) -> None:
    environ = ["HOME=/home/ann", "XDG_RUNTIME_DIR=/run/user/1000"]
    tree.users = {1000}
    tree.process(9, "dockerd", environ=environ, uid=1000)
    _daemon_json(tree, path="/home/ann/.config/docker/daemon.json")
    tree.program(GPU_PY)
    docker({"gpu-py": GPU_PY}, "/run/user/1000/docker.sock")
    found = _docker(tree)
    assert found["docker-registered"][0] == found["docker-loaded"][0] == "ok"
    assert "/home/ann/" in found["docker-registered"][1]


def test_gpu_py_registered_as_nvidia_is_ok(tree: Tree, docker: RunDocker) -> None:
    program = "/usr/local/bin/nvidia-container-runtime"
    tree.link(program, str(tree.program(GPU_PY)))
    settings = {"runtimes": {"nvidia": {"path": program}}}
    tree.write(DAEMON_JSON, json.dumps(settings))
    tree.process(9, "dockerd")
    docker({"nvidia": program})
    found = _docker(tree)
    assert found["docker-registered"][0] == found["docker-loaded"][0] == "ok"


def test_the_docker_socket_named_in_daemon_json_is_used(tree: Tree, docker: RunDocker) -> None:
    tree.process(9, "dockerd")
    tree.write(DAEMON_JSON, '{"hosts": ["tcp://x", "unix:///srv/d.sock"]}')
    docker({}, "/srv/d.sock")
    assert tree.case.dockers[0].info is not None


def test_a_dockerd_in_another_pid_namespace_is_ignored(tree: Tree) -> None:
    tree.process(9, "dockerd", status={"NSpid": "9\t1"})
    assert tree.case.dockers == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\n", "uses NVIDIA's /opt/n/nvidia-container-runtime-hook"),
        ("#!/bin/sh\nexec gpuhook-prestart\n", "uses gpuhook"),
    ],
)
def test_the_hook_that_serves_docker_gpus_is_named(tree: Tree, text: str, words: str) -> None:
    tree.process(9, "dockerd", environ=["PATH=/usr/bin:/opt/n", "SECRET=x"])
    tree.program("/opt/n/nvidia-container-runtime-hook", text)
    status, message = _docker(tree)["docker-gpus-option"]
    assert status == "ok"
    assert words in message


@pytest.mark.parametrize(
    ("version", "words"),
    [("28.5.2", "don't work"), ("29.2.0", "uses CDI specs in Docker 29.2.0")],
)
def test_docker_gpus_option_served_by_cdi_gives_a_note(
    tree: Tree, docker: RunDocker, version: str, words: str
) -> None:
    tree.process(9, "dockerd", environ=["PATH=/usr/bin"])
    tree.program("/usr/bin/nvidia-cdi-hook")
    docker({"runc": "runc"}, ServerVersion=version)
    status, message = _docker(tree)["docker-gpus-option"]
    assert status == "note"
    assert words in message


def test_a_hook_newer_than_the_running_dockerd_gives_a_warning(tree: Tree) -> None:
    tree.program(f"{BIN}/gpuhook-prestart")
    tree.link("/usr/bin/nvidia-container-runtime-hook", f"{tree.root}{BIN}/gpuhook-prestart")
    tree.process(9, "dockerd", environ=["PATH=/usr/bin"])
    status, message = _docker(tree)["docker-gpus-option"]
    assert status == "warning"
    assert "is newer than the running dockerd" in message


def test_a_hook_as_old_as_dockerd_within_rounding_gives_no_warning(tree: Tree) -> None:
    """The boot time has whole seconds, so a dockerd may seem older than it is."""
    tree.program(f"{BIN}/gpuhook-prestart")
    tree.process(9, "dockerd", environ=["PATH=/usr/bin"])
    [dockerd] = tree.case.machine.processes("dockerd")
    since_boot = dockerd.started - BOOT
    tree.write("/proc/stat", f"btime {int(time.time() - since_boot)}\n")
    tree.link("/usr/bin/nvidia-container-runtime-hook", f"{tree.root}{BIN}/gpuhook-prestart")
    assert "is newer than" not in _docker(tree)["docker-gpus-option"][1]


def test_an_unreadable_dockerd_environment_gives_a_note(tree: Tree) -> None:
    tree.process(9, "dockerd", environ=None)
    status, message = _docker(tree)["docker-gpus-option"]
    assert status == "note"
    assert "is unknown whether" in message


def test_docker_from_a_snap_gives_a_warning(tree: Tree) -> None:
    tree.write("/snap/bin/docker")
    assert _docker(tree)["docker-snap"][0] == "warning"


@pytest.mark.parametrize("version", RUNTIME_TABLES)
def test_runtimes_in_every_containerd_config_version_are_found(tree: Tree, version: str) -> None:
    tree.program("/usr/bin/containerd")
    tree.program(GPU_PY)
    text = f"version = {version}\n" + RUNTIME_TABLES[version].format(GPU_PY)
    tree.write(CONTAINERD, text)
    found = said(engines.containerd(tree.case))
    assert found["containerd-registered"] == (
        "ok",
        f"{CONTAINERD} registers the runtime gpu-py: {GPU_PY}",
    )
    assert found["containerd-loaded"][0] == "ok"


@pytest.mark.parametrize("by", [CONTAINERD, "/etc/containerd/more.toml"])
def test_runtimes_in_imported_containerd_drop_ins_are_found(tree: Tree, by: str) -> None:
    tree.program("/usr/bin/containerd")
    tree.program(GPU_PY)
    tree.write(CONTAINERD, 'version = 3\nimports = ["more.toml"]\n')
    tree.write(by, 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    tree.write("/etc/containerd/conf.d/99.toml", RUNTIME_TABLES["3"].format(GPU_PY))
    status, message = said(engines.containerd(tree.case))["containerd-registered"]
    assert status == "ok"
    assert message.startswith("/etc/containerd/conf.d/99.toml")


@pytest.mark.parametrize(("started", "status"), [(BOOT + 10, "failure"), (2**31, "ok")])
def test_a_daemon_older_than_its_config_file_is_a_failure(
    tree: Tree, started: int, status: str
) -> None:
    tree.process(3, "/usr/bin/containerd", "--config", "/srv/c.toml", started=started)
    tree.program(GPU_PY)
    tree.write("/srv/c.toml", RUNTIME_TABLES["2"].format(GPU_PY))
    assert said(engines.containerd(tree.case))["containerd-loaded"][0] == status


@pytest.mark.parametrize(
    ("newer", "status"), [(-60, "ok"), (0.9, "ok"), (1.9, "ok"), (2.1, "failure"), (60, "failure")]
)
def test_a_daemon_restarted_within_two_seconds_of_its_file_is_ok(
    tree: Tree, newer: float, status: str
) -> None:
    tree.process(3, "/usr/bin/containerd", started=BOOT + 100)
    tree.program(GPU_PY)
    file = tree.write(CONTAINERD, RUNTIME_TABLES["2"].format(GPU_PY))
    os.utime(file, (BOOT + 100 + newer, BOOT + 100 + newer))
    assert said(engines.containerd(tree.case))["containerd-loaded"][0] == status


def test_several_containerds_give_one_finding_for_each_config_file(tree: Tree) -> None:
    tree.process(3, "/usr/bin/containerd")
    tree.process(4, "/usr/bin/containerd")
    assert len(list(engines.containerd(tree.case))) == 1
    tree.process(5, "/usr/bin/containerd", "--config", "/srv/c.toml")
    messages = [finding.message for finding in engines.containerd(tree.case)]
    assert [CONTAINERD in message for message in messages] == [True, False]
    assert "/srv/c.toml" in messages[1]


def test_a_daemon_of_unknown_age_gives_a_warning(tree: Tree) -> None:
    tree.process(3, "/usr/bin/containerd")
    (tree.root / "proc/stat").unlink()
    tree.program(GPU_PY)
    tree.write(CONTAINERD, RUNTIME_TABLES["2"].format(GPU_PY))
    assert said(engines.containerd(tree.case))["containerd-loaded"][0] == "warning"


@pytest.mark.parametrize(("program", "status"), [(GPU_PY, "ok"), ("/other/runc", "failure")])
@pytest.mark.parametrize("path", ["/usr/bin/containerd", "/proc/3/exe"])
def test_containerds_config_dump_decides_over_its_files(
    tree: Tree, path: str, program: str, status: str
) -> None:
    """The dump includes files that are read later, and it comes from the running containerd."""
    dump = tree.write("/dump", "version = 2\n" + RUNTIME_TABLES["2"].format(program))
    words = f'#!/bin/sh\n[ "$*" = "--config {tree.root}{CONTAINERD} config dump" ] && cat {dump}'
    if path.startswith("/proc"):
        tree.process(3, "/usr/bin/containerd")
        tree.program("/usr/bin/containerd")  # another version, which isn't the running one
        (tree.root / path.lstrip("/")).unlink(missing_ok=True)
    tree.program(path, words)
    tree.program(GPU_PY)
    tree.write(CONTAINERD, "version = 2\n" + RUNTIME_TABLES["2"].format(GPU_PY))
    case = tree.case
    assert said(engines.containerd(case))["containerd-registered"][0] == status
    assert case.registered == (["containerd"] if status == "ok" else [])


@pytest.mark.parametrize(
    ("version", "main", "other", "refused"),
    [("2.3.4", 3, 4, True), ("2.3.4", 2, 3, True), ("2.2.1", 2, 3, False), ("2.3.4", 4, 2, False)],
)
def test_containerd_with_an_imported_file_of_a_higher_version(
    tree: Tree, version: str, main: int, other: int, refused: bool
) -> None:
    """containerd 2.3 doesn't start if an imported file has a higher version."""
    tree.program("/usr/bin/containerd", f"#!/bin/sh\necho containerd x/v2 v{version} x\n")
    tree.program(GPU_PY)
    tree.write(CONTAINERD, f'version = {main}\nimports = ["conf.d/*.toml"]\n')
    text = f"version = {other}\n" + RUNTIME_TABLES["2"].format(GPU_PY)
    tree.write("/etc/containerd/conf.d/99-gpuhook.toml", text)
    status, words = said(engines.containerd(tree.case))["containerd-registered"]
    assert status == ("failure" if refused else "ok")
    assert ("higher configuration version" in words) == refused


def test_containerd_started_by_docker_is_ignored(tree: Tree) -> None:
    child = "/var/run/docker/containerd/containerd.toml"
    tree.process(3, "containerd", "--config", child)
    assert said(engines.containerd(tree.case)) == {}


def test_unregistered_containerd_is_a_warning_only_with_a_kubelet(tree: Tree) -> None:
    case = tree.case
    case.registered.append("docker")
    tree.program("/usr/bin/dockerd")
    tree.program("/usr/bin/containerd")
    assert said(engines.containerd(case))["containerd-unused"][0] == "note"
    assert said(engines.used(case)) == {}
    tree.process(4, "/usr/bin/kubelet")
    assert said(engines.used(case)) == {
        "engines-registered": ("warning", "No engine here knows gpu-py (containerd)")
    }


def test_broken_containerd_files_are_a_failure(tree: Tree) -> None:
    tree.program("/usr/bin/containerd")
    tree.write(CONTAINERD, "[[[")
    assert said(engines.containerd(tree.case))["containerd-registered"][0] == "failure"
    tree.write(CONTAINERD, RUNTIME_TABLES["2"].format("/gone/gpu-py"))
    status, message = said(engines.containerd(tree.case))["containerd-registered"]
    assert status == "failure"
    assert "/gone/gpu-py" in message


def test_crio_registration_in_a_drop_in_is_ok(tree: Tree) -> None:
    tree.process(5, "/usr/bin/crio", started=2**31)
    assert "crio-unused" in said(engines.crio(tree.case))
    tree.program(GPU_PY)
    text = f'[crio.runtime.runtimes.gpu-py]\nruntime_path = "{GPU_PY}"\n'
    tree.write("/etc/crio/crio.conf.d/99-gpu.conf", text)
    found = said(engines.crio(tree.case))
    assert found["crio-registered"][0] == found["crio-loaded"][0] == "ok"


@pytest.mark.parametrize(
    ("path", "text", "check", "status"),
    [
        ("/etc/other", "", "podman-unused", "note"),
        (
            "/etc/containers/containers.conf.d/gpu.conf",
            f'[engine.runtimes]\ncrun = ["/usr/bin/crun"]\ngpu-py = ["{GPU_PY}"]\n',
            "podman-runtime", "ok",
        ),
        (
            "/etc/containers/containers.conf", '[engine.runtimes]\ngpu-py = ["/gone/gpu-py"]\n',
            "podman-runtime", "failure",
        ),
        ("/etc/containers/containers.conf.d/50.conf", "[engine", "podman-runtime", "failure"),
        *[
            (
                "/usr/share/containers/oci/hooks.d/gpuhook.json",
                json.dumps({"version": "1.0.0", "hook": hook}),
                "podman-hook", "ok",
            )
            for hook in (f"{BIN}/gpuhook-prestart", {"path": f"{BIN}/gpuhook-prestart"})
        ],
    ],
    ids=["without us", "runtime", "no program", "no TOML", "hook of old", "hook"],
)  # fmt: skip
def test_podman_registration_is_checked_in_config_and_hook_files(
    tree: Tree, path: str, text: str, check: str, status: str
) -> None:
    tree.program("/usr/bin/podman")
    tree.program(f"{BIN}/gpuhook-prestart")
    tree.program(GPU_PY)
    tree.write(path, text)
    assert said(engines.podman(tree.case))[check][0] == status


@pytest.mark.parametrize(
    ("version", "named", "status", "words"),
    [
        ("podman version 4.9.4", False, "warning", "podman 4.9.4 doesn't read"),
        ("podman version 4.9.4", True, "ok", "registers"),
        ("podman version 5.0.0-rc1", False, "ok", "registers"),
        ("podman version 10.1", False, "ok", "registers"),
        ("nonsense", False, "ok", "only if hooks_dir names it"),
        ("", False, "ok", "only if hooks_dir names it"),
    ],
)
def test_a_hook_folder_that_old_podman_does_not_read_gives_a_warning(
    tree: Tree, version: str, named: bool, status: str, words: str
) -> None:
    tree.program("/usr/bin/podman", f"#!/bin/sh\necho {version}\n")
    tree.program(f"{BIN}/gpuhook-prestart")
    folder = "/etc/containers/oci/hooks.d"
    hook = {"version": "1.0.0", "hook": {"path": f"{BIN}/gpuhook-prestart"}}
    tree.write(f"{folder}/gpuhook.json", json.dumps(hook))
    if named:
        text = f'[engine]\nhooks_dir = ["{folder}/"]\n'
        tree.write("/etc/containers/containers.conf", text)
    found, message = said(engines.podman(tree.case))["podman-hook"]
    assert found == status
    assert words in message
    assert ("hooks_dir" in message) == ("hooks_dir" in words or status == "warning")


@pytest.mark.parametrize(
    ("folder", "status"),
    [
        ("/usr/share/containers/oci/hooks.d", "warning"),
        ("/etc/containers/oci/hooks.d", "warning"),
        ("/etc/containers/oci/precreate.d", "ok"),
    ],
)
def test_a_precreate_hook_in_a_folder_read_by_builds_gives_a_warning(
    tree: Tree, folder: str, status: str
) -> None:
    tree.program("/usr/bin/podman")
    tree.program(f"{BIN}/gpuhook-prestart")
    tree.write("/etc/containers/containers.conf", f'[engine]\nhooks_dir = ["{folder}"]\n')
    hook = {"hook": {"path": f"{BIN}/gpuhook-prestart"}, "stages": ["precreate"]}
    tree.write(f"{folder}/gpuhook.json", json.dumps(hook))
    assert said(engines.podman(tree.case))["podman-hook"][0] == status


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"hook": {}}', '{"hook": {"path": "/gone"}}', "", "{}"]
)
def test_an_invalid_podman_hook_file_is_a_failure(tree: Tree, text: str) -> None:
    tree.program("/usr/bin/podman")
    tree.write("/etc/containers/containers.conf", '[engine]\nhooks_dir = ["/srv/hooks"]\n')
    tree.write("/srv/hooks/x.json", text)
    assert said(engines.podman(tree.case))["podman-hook"][0] == "failure"
