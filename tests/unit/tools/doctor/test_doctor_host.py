import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
from fabricated import BIN, Tree, said

from gpuhook.base import log
from gpuhook.base.config.loader import loads
from gpuhook.cluster import checks as kubernetes
from gpuhook.prefork.launcher_cache import CACHE, FOLDER
from gpuhook.tools.doctor import Case, Finding, Status, examine, host, install, worst
from gpuhook.tools.doctor.finding import failure, ok, warning
from gpuhook.tools.doctor.machine import Machine

V1 = "30 24 0:26 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n"
V2 = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = V1 + "31 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "words"),
    [
        (V1, "cgroup version 1"),
        (V2, "cgroup version 2"),
        (HYBRID, "cgroup version 1, and an empty version 2 tree"),
    ],
)
def test_the_cgroup_version_is_reported(tree: Tree, mounts: str, words: str) -> None:
    tree.write("/proc/self/mountinfo", mounts)
    assert said(host.cgroups(tree.case))["cgroups"] == ("ok", words)


@pytest.mark.parametrize(("mounts", "warned"), [(V1, False), (V2, False), (HYBRID, True)])
def test_hybrid_cgroups_without_nsdelegate_warn_with_memory_limits(
    tree: Tree, mounts: str, warned: bool
) -> None:
    """With memory limits set, one container could move another out of its cgroup."""
    tree.write("/proc/self/mountinfo", mounts)
    assert not list(install.memory_limits(tree.case))
    tree.case.config.device_memory = "8GiB"
    found = [each for each in install.memory_limits(tree.case) if "nsdelegate" in each.message]
    assert [each.status for each in found] == (["warning"] if warned else [])
    assert all("remount,nsdelegate /sys/fs/cgroup/unified, " in each.remedy for each in found)


def test_missing_cgroups_give_a_warning(tree: Tree) -> None:
    tree.write("/proc/self/mountinfo", "1 2 0:1 / / rw - ext4 /dev/sda rw\n")
    assert said(host.cgroups(tree.case))["cgroups"][0] == "warning"


EVENTS = """
import resource, types
from pyroute2 import UeventSocket
from pyroute2.netlink import nlsocket
from gpuhook.tools.doctor import host
UeventSocket().close()  # imports all that it needs
if {limited}:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
for each in host.kernel_events(types.SimpleNamespace()):
    print(each.check, each.status, each.message)
"""


@pytest.mark.parametrize("limited", [False, True])
def test_unreceivable_kernel_events_give_a_warning(limited: bool) -> None:
    """The warning gives the system's reason, here that the process may open no socket."""
    argv = [sys.executable, "-c", EVENTS.format(limited=limited)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    reason = os.strerror(errno.EMFILE)
    assert done.stdout.startswith("kernel-events warning " if limited else "")
    assert (f"can't be received: {reason}" in done.stdout) == limited
    assert bool(done.stdout) == limited


@pytest.mark.parametrize(
    ("release", "status"), [("6.1.0-18-amd64", "ok"), ("5.6.0", "ok"), ("5.4.0-generic", "warning")]
)
def test_an_old_kernel_gives_a_warning(tree: Tree, release: str, status: str) -> None:
    tree.write("/proc/sys/kernel/osrelease", f"{release}\n")
    assert said(host.kernel(tree.case))["kernel"][0] == status


@pytest.mark.parametrize(
    ("path", "text", "status", "word"),
    [
        ("/sys/fs/selinux/enforce", "1", "warning", "enforcing"),
        ("/sys/fs/selinux/enforce", "0", "ok", "permissive"),
        ("/sys/module/apparmor/parameters/enabled", "Y\n", "ok", "AppArmor"),
        ("/nothing", "", "ok", "Neither"),
    ],
)
def test_enforcing_selinux_gives_a_warning(
    tree: Tree, path: str, text: str, status: str, word: str
) -> None:
    tree.write(path, text)
    found = said(host.security_modules(tree.case))["security-module"]
    assert found[0] == status
    assert word in found[1]


def test_missing_launchers_are_a_failure(tree: Tree) -> None:
    tree.program(f"{BIN}/gpu-py")
    status, message = said(install.launchers(tree.case))["launchers"]
    assert status == "failure"
    assert message == f"gpuhook-prestart can't be executed in {BIN}"


@pytest.mark.parametrize(
    ("header", "machine"),
    [
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00", "aarch64"),
        (b"\x7fELF\x02\x02\x01" + bytes(9) + b"\x00\x02\x00\x16", "s390x"),
        (b"\x7fELF\x01\x01\x01" + bytes(9) + b"\x02\x00\xff\x00", "machine 255 of elf.h"),
    ],
)
@pytest.mark.parametrize("name", ["gpu-py", "gpuhook-prestart"])
def test_launchers_of_another_architecture_are_a_failure(
    tree: Tree, name: str, header: bytes, machine: str
) -> None:
    """Hosts of two architectures may share a file system that contains a virtual environment."""
    for each in ("gpu-py", "gpuhook-prestart"):
        tree.write(f"{BIN}/{each}", "#!/bin/sh\n", 0o755)
    assert said(install.launchers(tree.case))["launchers"][0] == "ok"
    shutil.copy("/proc/self/exe", tree.root / f"{BIN}/{name}".lstrip("/"))
    assert said(install.launchers(tree.case))["launchers"][0] == "ok"
    (tree.root / f"{BIN}/{name}".lstrip("/")).write_bytes(header)
    status, message = said(install.launchers(tree.case))["launchers"]
    assert status == "failure"
    assert f"{BIN}/{name} is a program for {machine}, and this host is " in message


@pytest.mark.parametrize("text", ["", "#!/bin/sh\n", "\x7fELF"])
def test_launchers_that_are_not_compiled_are_ok(tree: Tree, text: str) -> None:
    for each in ("gpu-py", "gpuhook-prestart"):
        tree.write(f"{BIN}/{each}", text, 0o755)
    assert said(install.launchers(tree.case))["launchers"][0] == "ok"


def test_launchers_writable_by_others_are_a_failure(tree: Tree) -> None:
    hook = tree.program(f"{BIN}/gpuhook-prestart")
    tree.program(f"{BIN}/gpu-py")
    assert said(install.launchers(tree.case))["launchers"][0] == "ok"
    assert "launcher-owner" not in said(install.launchers(tree.case))
    hook.chmod(0o757)
    status, message = said(install.launchers(tree.case))["launcher-owner"]
    assert status == "failure"
    assert f"{BIN}/gpuhook-prestart" in message


def _starts(tree: Tree, script: str) -> dict[str, tuple[str, str]]:
    tree.program(f"{BIN}/gpu-py", f"#!/bin/sh\n{script}\n")
    return said(install.runtime_starts(tree.case))


def test_a_runtime_that_starts_is_ok(tree: Tree) -> None:
    assert _starts(tree, '[ "$1" = --version ]')["runtime-starts"][0] == "ok"
    tree.config.runtimes = (str(tree.program("/usr/bin/runc")),)
    assert said(install.low_level_runtime(tree.case))["low-level-runtime"][0] == "ok"


def test_a_runtime_that_does_not_start_is_a_failure(tree: Tree) -> None:
    status, message = _starts(tree, "echo first; echo it is broken >&2; exit 3")["runtime-starts"]
    assert status == "failure"
    assert message == "gpu-py --version exits with status 3: it is broken"


def test_a_missing_low_level_runtime_is_a_failure(tree: Tree) -> None:
    tree.config.runtimes = ("/nonexistent/runc",)
    assert said(install.low_level_runtime(tree.case))["low-level-runtime"][0] == "failure"


def test_unknown_configuration_keys_give_a_warning(tree: Tree) -> None:
    tree.config = loads('[nvidia-ctk]\npath = "x"\npth = "x"\n', "/etc/gpuhook/config.toml")
    assert said(install.configuration(tree.case)) == {
        "configuration": ("ok", "/etc/gpuhook/config.toml is valid"),
        "configuration-unused-keys": (
            "ok",
            "NVIDIA's keys without effect here: nvidia-ctk.path",
        ),
        "configuration-keys": (
            "warning",
            "nvidia-ctk.pth has no effect: gpuhook doesn't know this key",
        ),
    }


def test_a_configuration_writable_by_others_is_a_failure(tree: Tree) -> None:
    tree.write("/etc/gpuhook/config.toml", mode=0o666)
    tree.config = loads("", "/etc/gpuhook/config.toml")
    assert said(install.configuration(tree.case))["configuration-owner"][0] == "failure"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("disable-require = 3\n", "disable-require must be true or false"),
        ('swarm-resource = "nvida=X"\n', "swarm-resource names the vendor"),
    ],
)
def test_an_invalid_configuration_is_a_failure(
    tmp_path_factory: pytest.TempPathFactory, text: str, problem: str
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(text)
    case = Case.of_this_machine(str(path), "/nonexistent/gpuhook")
    status, message = said(install.configuration(case))["configuration"]
    assert status == "failure"
    assert problem in message


def test_a_rootless_dockerd_is_reported(tree: Tree) -> None:
    tree.process(9, "dockerd")
    with tree.docker_answers("/var/run/docker.sock", {"SecurityOptions": ["name=rootless"]}):
        assert said(host.rootless(tree.case))["rootless"][0] == "ok"


def test_a_check_that_fails_stops_no_other(tree: Tree) -> None:
    def broken_check(case: Case) -> list[Finding]:
        return [ok("never", case.config.no_such_attribute)]  # type: ignore[attr-defined]

    def other(case: Case) -> list[Finding]:
        return [ok("other", case.bin)]

    found = said(examine(tree.case, (broken_check, other)))
    assert found["other"] == ("ok", BIN)
    assert found["broken-check"][0] == "failure"


def test_no_check_breaks_on_an_empty_machine(tree: Tree) -> None:
    tree.root.mkdir()
    findings = list(examine(tree.case))
    assert worst(findings) is Status.FAILURE
    assert not [each for each in findings if "itself failed" in each.message]


def test_exit_status_follows_the_worst_finding() -> None:
    assert worst([]) is Status.OK
    assert worst([ok("a", "")]).exit_status == 0
    assert worst([warning("a", "", ""), ok("b", "")]).exit_status == 1
    assert worst([failure("a", "", ""), warning("b", "", "")]).exit_status == 2


def test_programs_are_found_like_a_shell_finds_them(tree: Tree) -> None:
    tree.program("/usr/bin/tool")
    tree.write("/bin/tool")
    machine = Machine(str(tree.root))
    assert machine.which("tool", "relative:/bin:/usr/bin/") == "/usr/bin/tool"
    assert machine.which("tool", "/bin") is None


def test_a_state_folder_writable_by_others_is_a_failure(tree: Tree) -> None:
    tree.config.state_dir = "/run/gpuhook"
    folder = tree.root / "run/gpuhook"
    folder.mkdir(parents=True, mode=0o755)
    assert said(install.saved_inventory(tree.case)) == {}  # no driver: nothing to save
    tree.write("/proc/driver/nvidia/version")
    assert said(install.saved_inventory(tree.case))["saved-inventory"][0] == "note"
    folder.chmod(0o777)
    assert said(install.saved_inventory(tree.case))["saved-inventory"][0] == "failure"


def test_the_launchers_saved_settings_are_reported_fresh_or_stale(tree: Tree) -> None:
    assert said(install.launcher_settings(tree.case)) == {}
    path = "/etc/gpuhook/config.toml"
    settings = tree.write(path)
    tree.config = loads("", path)
    assert "hasn't read" in said(install.launcher_settings(tree.case))["launcher-settings"][1]
    saved = tree.write(f"{FOLDER}{path}/{CACHE}", "")
    later = settings.stat().st_mtime + 10
    os.utime(saved, (later, later))
    is_fresh = "is fresh" in said(install.launcher_settings(tree.case))["launcher-settings"][1]
    assert is_fresh == (os.geteuid() == 0)
    os.utime(settings, (later + 10, later + 10))
    assert "hasn't read" in said(install.launcher_settings(tree.case))["launcher-settings"][1]
    saved.unlink()
    os.utime(settings, (1, 1))
    assert "reproducible" in said(install.launcher_settings(tree.case))["launcher-settings"][1]


def test_recent_errors_are_shown_and_old_ones_not(tree: Tree) -> None:
    now = log.timestamp()
    lines = [
        {"level": "error", "msg": "old", "time": "2001-01-01T00:00:00Z"},
        {"level": "error", "msg": "gpuhook-prestart: no such GPU.", "time": now},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "cut off"
    tree.write(f"{tree.case.config.state_dir}/{log.ERRORS}", text)
    status, words = said(install.recent_errors(tree.case))["recent-errors"]
    assert status == "note"
    assert (
        words == f"A container failed within a day, the last: {now} gpuhook-prestart: no such GPU"
    )


def test_recent_warnings_are_shown(tree: Tree) -> None:
    now = log.timestamp()
    line = {"level": "warning", "msg": "gpu-py: 'x' isn't a driver capability", "time": now}
    path = f"{tree.case.config.state_dir}/{log.WARNINGS}"
    for count, start in ((1, "A container requests"), (2, "2 containers request")):
        tree.write(path, (json.dumps(line) + "\n") * count)
        status, words = said(install.recent_warnings(tree.case))["recent-warnings"]
        assert status == "note"
        assert (
            words == f"{start} something unavailable, within a day, the last: {now} {line['msg']}"
        )


def test_an_empty_log_gives_no_finding(tree: Tree) -> None:
    assert said(install.recent_errors(tree.case)) == {}
    assert said(install.recent_warnings(tree.case)) == {}


# Kubernetes -----------------------------------------------------------------------------------


PLUGINS = "/var/lib/kubelet/device-plugins"
OURS, NVIDIAS, REGISTRY = "gpuhook-nvidia.com-gpu.sock", "nvidia-gpu.sock", "kubelet.sock"


@pytest.mark.parametrize(
    ("sockets", "runs", "expected"),
    [
        ([], False, {}),
        ([], True, {}),
        ([REGISTRY, OURS], True, {"ok": "serves 1 resource"}),
        ([REGISTRY, NVIDIAS, OURS], True, {"warning": "registers last", "ok": "serves 1"}),
        ([REGISTRY, NVIDIAS], False, {"ok": "NVIDIA's device plugin"}),
        ([REGISTRY], True, {"warning": "has no socket"}),
        ([REGISTRY], False, {"note": "no device plugin"}),
    ],
)
def test_the_device_plugins_state_is_reported(
    tree: Tree,
    sockets: list[str],
    runs: bool,
    expected: dict[str, str],
) -> None:
    for name in sockets:
        tree.write(f"{PLUGINS}/{name}", "")
    if runs:
        tree.process(71, "gpuhook-server")
    found = {each.status.value: each.message for each in kubernetes.device_plugin(tree.case)}
    assert found.keys() == expected.keys()
    assert all(words in found[status] for status, words in expected.items())


@pytest.mark.parametrize(
    ("unit", "runs", "listens", "expected"),
    [
        (False, False, True, []),
        (True, True, True, [("ok", "runs, and the engine asks plugins")]),
        (False, True, True, [("ok", "runs, and the engine asks plugins")]),
        (True, True, False, [("warning", "no engine here asks plugins")]),
        (True, False, True, [("warning", "pods start without their devices")]),
    ],
)
def test_the_nri_plugins_state_is_reported(
    tree: Tree, unit: bool, runs: bool, listens: bool, expected: list[tuple[str, str]]
) -> None:
    """The engine starts pods without the plugin, so no other check reports that it is missing."""
    if unit:
        tree.write("/etc/systemd/system/gpuhook-nri.service", "")
    if listens:
        tree.write("/var/run/nri/nri.sock", "")
    if runs:
        tree.process(72, "gpuhook-nri")
    found = [*kubernetes.engines_plugin(tree.case)]
    assert [each.status.value for each in found] == [status for status, _ in expected]
    assert all(words in each.message for each, (_, words) in zip(found, expected, strict=True))


@pytest.mark.protects(
    "doctor-gate", "the doctor reports a device gate that gpu-py isn't configured for"
)
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("unit", ["", "ExecStart=/opt/gpuhook/bin/gpuhook nri --gate\n"])
@pytest.mark.parametrize("other", ["", "/usr/bin/nvidia-container-runtime", "/usr/bin/runc"])
def test_components_that_bypass_the_gate_are_reported(
    tree: Tree, runs: bool, gate: bool, unit: str, other: str
) -> None:
    """The plugin isn't enough: every component that allocates devices has to obey the gate."""
    tree.case.config.gate = gate
    tree.write("/var/run/nri/nri.sock", "")
    if unit:
        tree.write("/etc/systemd/system/gpuhook-nri.service", unit)
    if runs:
        tree.process(72, "gpuhook-nri")
    if other:
        table = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpus.options]\n'
        tree.write("/etc/containerd/config.toml", f'{table}BinaryName = "{other}"\n')
    said = [each.message for each in kubernetes.engines_plugin(tree.case)]
    assert any("config.toml has none" in each for each in said) == (bool(unit) and not gate)
    assert any("gives no container a device" in each for each in said) == (gate and not runs)
    named = f"pods may name the runtime gpus ({other})"
    assert any(named in each for each in said) == (gate and "nvidia" in other)


def test_missing_grpc_packages_are_named_in_the_remedy(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.write(f"{PLUGINS}/{REGISTRY}", "")
    [one] = kubernetes.device_plugin(tree.case)
    assert "pip install" not in one.remedy
    monkeypatch.setattr(kubernetes, "find_spec", lambda name: None)
    [one] = kubernetes.device_plugin(tree.case)
    assert "grpcio" in one.remedy
    assert said([one])["device-plugin"][0] == "note"
