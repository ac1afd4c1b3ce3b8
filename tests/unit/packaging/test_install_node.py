"""The engine process of a node, and an interpreter's move to another folder."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from fabricated import Tree

from gpuhook.base.config.loader import loads
from gpuhook.base.errors import ConfigError, EngineError

FOLDER = Path(__file__).parents[3] / "packaging/kubernetes/image"
SERVICE = "12:pids:/system.slice/containerd.service\n0::/system.slice/containerd.service\n"


@pytest.fixture(scope="module")
def installer() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(FOLDER)
        yield importlib.import_module("install_node")


@pytest.fixture
def machine(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine", lambda *_: b"")


@pytest.mark.parametrize(
    ("name", "status", "cgroup", "counts"),
    [
        ("containerd", {}, SERVICE, True),
        # As seen from a pod with its own cgroup namespace.
        ("containerd", {}, "0::/../../system.slice/k3s.service\n", True),
        ("containerd-shim", {}, SERVICE, False),
        ("containerd", {"Uid": "1000\t1000\t1000\t1000"}, SERVICE, False),
        ("containerd", {"Uid": "1000\t0\t0\t0"}, SERVICE, False),
        ("containerd", {"NSpid": "100\t1"}, SERVICE, False),
        ("containerd", {"CapEff": "00000000a80425fb"}, SERVICE, False),
        ("containerd", {}, "0::/user.slice/session-1.scope\n", False),
        ("containerd", {}, "0::/kubepods.slice/x.service\n", False),
    ],
)
def test_only_a_service_of_the_node_counts_as_its_engine(
    installer: ModuleType,
    machine: Tree,
    name: str,
    status: dict[str, str],
    cgroup: str,
    counts: bool,
) -> None:
    machine.process(100, f"/usr/bin/{name}", status=status)
    machine.write("/proc/100/cgroup", cgroup)
    (machine.root / "proc/101").mkdir()  # a process that has exited meanwhile
    found = installer.engines_running("containerd", str(machine.root))
    assert [process.pid for process in found] == ([100] if counts else [])


def test_an_interpreter_path_is_replaced_unless_too_long(
    installer: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/ld-linux.so.2").touch()
    module = installer.sys.modules["node_version"]
    monkeypatch.setattr(module, "SOURCE", str(tmp_path))
    space = module.PATH_LENGTH
    old = [f"{tmp_path}/lib/ld-linux.so.2".encode(), f"{tmp_path}/lib".encode()]
    new = [b"/opt/x/lib/ld-linux.so.2", b"/opt/x/lib"]
    before, after = (b"\0".join(each.ljust(space, b"\0") for each in paths) for paths in (old, new))
    assert module.moved(b"\x7fELF" + before, "/opt/x") == b"\x7fELF" + after
    assert module.moved(b"#!%s/bin/python3" % bytes(tmp_path), "/x") == b"#!/x/bin/python3"
    with pytest.raises(EngineError, match="too long"):
        module.moved(b"\x7fELF" + before, "/" + space * "x")


def test_containers_that_run_installed_programs_are_listed(
    installer: ModuleType, machine: Tree, tmp_path: Path
) -> None:
    """Without the node's folder, users of the files are unknown, which doesn't mean none."""
    tasks = tmp_path / "tasks"
    root = str(machine.root)

    def node(engine: str) -> object:
        return installer.Node("/opt/g", engine, "", "none", "", False, str(tasks))

    with pytest.raises(EngineError, match=f"{tasks} isn't here"):
        installer.users(node("containerd"), root)
    assert installer.users(node("none"), root) == []
    for container, runtime in {"a": "/opt/g/bin/gpu-py", "b": "runc", "c": "/opt/gg/x"}.items():
        (tasks / "k8s.io" / container).mkdir(parents=True)
        (tasks / "k8s.io" / container / "runtime").write_text(runtime)
    assert installer.users(node("containerd"), root) == ["container a"]
    machine.process(7, "/usr/bin/conmon", "-c", "x", "-r", "/opt/g/bin/gpu-py")
    machine.process(8, "/usr/bin/conmon", "-c", "y", "-r", "/usr/bin/runc", "/opt/g/bin/gpu-py")
    assert installer.users(node("crio"), root) == ["container a", "the container of process 7"]


@pytest.mark.protects(
    "tasks-of-the-node",
    "Kubernetes: removal is refused if it isn't known which containers use gpu-py",
)
def test_removal_is_refused_if_container_records_are_elsewhere(
    installer: ModuleType, machine: Tree, tmp_path: Path
) -> None:
    """k3s uses another folder, so the folder that the kubelet made lacks its containers."""
    node = installer.Node("/opt/g", "containerd", "", "none", "", False, str(tmp_path))
    shim = "/usr/bin/containerd-shim-runc-v2"
    machine.process(7, shim, "-namespace", "moby", "-id", "docker-s")
    assert installer.users(node, str(machine.root)) == []
    machine.process(8, shim, "-namespace", "k8s.io", "-id", "abc", "-address", "/run/k3s/c.sock")
    with pytest.raises(EngineError, match=r"doesn't have the container abc.*INSTALL_NODE_TASKS"):
        installer.users(node, str(machine.root))
    (tmp_path / "k8s.io/abc").mkdir(parents=True)
    assert installer.users(node, str(machine.root)) == []


READ = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("argv", "config", "said"),
    [
        ((), "", ""),
        (("--config", "/etc/containerd/config.toml"), "", ""),
        (("-c", READ), READ, ""),
        (("-c", READ), f"{READ}.tmpl", ""),
        (("-c", READ), "", "components/k3s "),
        (("--config", "/var/snap/microk8s/7/args/containerd.toml"), "", "components/microk8s "),
        (
            ("--config=/var/snap/microk8s/7/args/containerd.toml",),
            "/var/snap/microk8s/current/args/containerd-template.toml",
            "",
        ),
        (("--config", "/srv/x.toml"), "", "Set INSTALL_NODE_CONFIG to that file"),
        (("--config", "/var/run/docker/containerd/containerd.toml"), "", ""),
    ],
)
def test_a_config_file_that_containerd_does_not_read_is_refused(
    installer: ModuleType, machine: Tree, argv: tuple[str, ...], config: str, said: str
) -> None:
    """An installation in a file that nothing reads must not be reported as a success."""
    node = installer.Node("/opt/g", "containerd", config, "none", "", False)
    installer.check_file(node, str(machine.root))  # no containerd runs, or none is visible
    machine.process(7, "/usr/bin/containerd", *argv)
    machine.write("/proc/7/cgroup", SERVICE)
    if not said:
        installer.check_file(node, str(machine.root))
        return
    with pytest.raises(EngineError, match=said):
        installer.check_file(node, str(machine.root))
    machine.process(8, "/usr/bin/containerd")
    machine.write("/proc/8/cgroup", SERVICE)
    installer.check_file(node, str(machine.root))  # one containerd reads the file


@pytest.mark.parametrize("name", ["k3s", "rke2", "microk8s", "k0s"])
def test_a_distribution_name_sets_its_config_and_task_folders(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(installer, "install", lambda node: seen.append((node.config, node.tasks)))
    env = {"INSTALL_NODE_DISTRIBUTION": name}
    run = CliRunner().invoke
    assert run(installer.cli, ["install"], env=env).exit_code == 0
    own = {**env, "INSTALL_NODE_CONFIG": "/x", "INSTALL_NODE_TASKS": "/y"}
    assert run(installer.cli, ["install"], env=own).exit_code == 0
    [(config, tasks), given] = seen
    assert given == ("/x", "/y")
    assert config.endswith(".toml")
    assert tasks.startswith(("/run/k", "/var/snap/microk8s/common/run"))
    refused = run(installer.cli, ["install", "--restart=systemd"], env=env)
    assert "needs --unit" in refused.output + refused.stderr


@pytest.mark.protects(
    "strangers-conmon",
    "Kubernetes: the removal doesn't wait for another user's conmon process",
    instead="return host_processes.running(name, root, range(1 << 32), unseen=True)",
)
@pytest.mark.parametrize("option", [("-r",), ("--runtime",), ()])
@pytest.mark.parametrize(
    "status",
    [
        {"Uid": "1000\t1000\t1000\t1000"},
        {"Uid": "1000\t0\t0\t0"},
        {"NSpid": "7\t1"},
        {"CapEff": "00000000a80425fb"},
        {"State": "Z (zombie)"},
    ],
    ids=lambda status: " ".join(f"{key} {value}" for key, value in status.items()),
)
def test_another_users_conmon_is_ignored(
    installer: ModuleType, machine: Tree, status: dict[str, str], option: tuple[str, ...]
) -> None:
    node = installer.Node("/opt/g", "crio", "", "none", "", False)
    machine.process(7, "/tmp/conmon", *option, "/opt/g/bin/gpu-py", status=status)
    assert installer.users(node, str(machine.root)) == []


def test_a_set_user_id_program_does_not_count_as_conmon(
    installer: ModuleType, machine: Tree
) -> None:
    node = installer.Node("/opt/g", "crio", "", "none", "", False)
    machine.process(7, "/tmp/conmon", "-r", "/opt/g/bin/gpu-py")
    assert installer.users(node, str(machine.root)) == ["the container of process 7"]
    (machine.root / "proc/7/exe").chmod(0o4755)
    assert installer.users(node, str(machine.root)) == []


# The node's settings ------------------------------------------------------------------------------

SAFE = (
    "accept-nvidia-visible-devices-envvar-when-unprivileged=false",
    "accept-nvidia-visible-devices-as-volume-mounts=true",
)
UNSAFE = tuple(f"{key}={value}" for key, value in zip(
    (each.partition("=")[0] for each in SAFE), ("true", "false"), strict=True
))  # fmt: skip
OWN = """\
# the admin's
#accept-nvidia-visible-devices-as-volume-mounts = false
accept-nvidia-visible-devices-envvar-when-unprivileged = true   # as it was

[gpuhook]
missing-driver = "ignore"
"""


@pytest.fixture
def node(installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node for the functions about settings, with a place for the file of a ConfigMap."""
    monkeypatch.setattr(sys.modules["node_settings"], "GIVEN", str(tmp_path / "given.toml"))
    monkeypatch.setattr(sys.modules["node_plugin"], "GIVEN", str(tmp_path / "given.yaml"))
    folder = tmp_path / "opt"
    folder.mkdir()
    made = installer.Node(str(folder), "none", "", "none", "", False, settings=SAFE)
    units = tmp_path / "units"
    units.mkdir()
    return replace(made, settings_file=str(tmp_path / "etc/config.toml"), units=str(units))


def given_file() -> Path:
    return Path(sys.modules["node_settings"].GIVEN)


def is_safe(text: str) -> bool:
    config = loads(text)
    return config.accept_volume_mounts and not config.accept_envvar_unprivileged


@pytest.mark.parametrize("own", [OWN, "", None])
def test_an_admins_config_is_kept_and_restored_on_removal(
    installer: ModuleType, node: Any, own: str | None
) -> None:
    path = Path(node.settings_file)
    if own is not None:
        path.parent.mkdir()
        path.write_text(own)
        path.chmod(0o640)
    for _ in range(2):
        installer.settle(node)
        assert is_safe(path.read_text())
    if own:
        assert path.read_text().startswith("# the admin's\naccept")
        assert loads(path.read_text()).missing_driver == "ignore"
        assert path.stat().st_mode & 0o777 == 0o640
    installer.settle(replace(node, settings=UNSAFE))
    config = loads(path.read_text())
    assert (config.accept_envvar_unprivileged, config.accept_volume_mounts) == (True, False)
    installer.unsettle(node)
    assert (path.read_text() if path.exists() else None) == own
    installer.unsettle(node)  # nothing is left to do
    assert not os.listdir(node.folder)


def test_later_config_edits_survive_the_removal(installer: ModuleType, node: Any) -> None:
    path = Path(node.settings_file)
    path.parent.mkdir()
    path.write_text(OWN)
    installer.settle(node)
    path.write_text(path.read_text().replace('"ignore"', '"fail"  # since May'))
    installer.settle(node)
    assert is_safe(path.read_text())
    installer.unsettle(node)
    left = path.read_text()
    assert '"fail"  # since May' in left
    assert loads(left).accept_envvar_unprivileged
    assert not loads(left).accept_volume_mounts


@pytest.mark.parametrize("own", [OWN, None])
def test_an_install_killed_midway_keeps_the_admins_settings(
    installer: ModuleType, node: Any, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    """A value that gpuhook set before doesn't count as an administrator's."""
    path = Path(node.settings_file)
    if own is not None:
        path.parent.mkdir()
        path.write_text(own)
    installer.settle(node)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["node_settings"], "_put_settings", lambda *_: None)
        installer.settle(replace(node, settings=UNSAFE))
    assert is_safe(path.read_text())
    installer.settle(replace(node, settings=UNSAFE))
    assert not is_safe(path.read_text())
    installer.unsettle(node)
    assert (path.read_text() if path.exists() else None) == own


def test_a_config_map_replaces_the_config_file_until_removal(
    installer: ModuleType, node: Any
) -> None:
    """The ConfigMap's settings override those of the manifest, and are removed at the end."""
    path, given = Path(node.settings_file), given_file()
    path.parent.mkdir()
    path.write_text(OWN)
    given.write_text('[nvidia-container-cli]\nroot = "/run/nvidia/driver"\n')
    installer.settle(node)
    assert loads(path.read_text()).driver_root == "/run/nvidia/driver"
    assert loads(path.read_text()).missing_driver == "fail"
    assert is_safe(path.read_text())
    given.write_text(f"{UNSAFE[0].replace('=', ' = ')}\n")
    path.write_text("# by hand\n")
    installer.settle(node)
    config = loads(path.read_text())
    assert (config.accept_envvar_unprivileged, config.accept_volume_mounts) == (True, True)
    given.unlink()
    installer.settle(node)
    assert loads(path.read_text()).missing_driver == "ignore"
    assert is_safe(path.read_text())
    installer.unsettle(node)
    assert path.read_text() == OWN


@pytest.mark.parametrize("text", ["[", "disable-require = 3\n", "[gpuhook]\nroot = 'x'\n"])
def test_a_config_map_with_an_error_changes_nothing(
    installer: ModuleType, node: Any, text: str
) -> None:
    given_file().write_text(text)
    with pytest.raises(ConfigError):
        installer.settle(node)
    assert not os.path.exists(node.settings_file)
    assert not os.listdir(node.folder)


def test_a_damaged_config_file_does_not_stop_the_removal(
    installer: ModuleType, node: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    installer.settle(node)
    Path(node.settings_file).write_text("[")
    installer.unsettle(node)
    assert Path(node.settings_file).read_text() == "["
    assert "stays as it is" in capsys.readouterr().out


@pytest.mark.protects(
    "runtime-settings", "Kubernetes: node settings are kept while gpu-py is a runtime of the engine"
)
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("given", [None, "[gpuhook]\nmissing-driver = 'ignore'\n"])
def test_settings_of_a_node_with_an_installed_runtime_are_kept(
    installer: ModuleType, node: Any, given: str | None, older: bool
) -> None:
    """Another overlay over base would let every pod with gpu-py choose its own GPUs."""
    if given:
        given_file().write_text(given)
    installer.settle(replace(node, engine="containerd"))
    if older:  # the record was written before the engine was noted in it
        record = json.loads(Path(node.settings_record).read_text())
        del record["engine"]
        Path(node.settings_record).write_text(json.dumps(record))
    before = Path(node.settings_file).read_text()
    with pytest.raises(EngineError, match=r"gpu-py is a runtime.*overlays/remove first"):
        installer.install(replace(node, settings=()))
    assert Path(node.settings_file).read_text() == before
    installer.unsettle(node)
    installer.refuse_runtime(replace(node, settings=()))
    # Settings that were written without an engine belong to no runtime.
    installer.settle(node)
    installer.refuse_runtime(replace(node, settings=()))


def test_settings_are_not_written_if_the_programs_cannot_be(
    installer: ModuleType, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, the older programs keep the settings that they know."""

    def refuse(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(installer, "put_version", refuse)
    with pytest.raises(OSError, match="No space"):
        installer.install(node)
    assert not os.path.exists(node.settings_file)


# What it leaves -----------------------------------------------------------------------------------


def test_cdi_specs_that_name_a_removed_hook_are_removed(installer: ModuleType, node: Any) -> None:
    """Without their hook, these specs start no container, and they hide specs of other vendors."""
    documents = Path(node.folder).parent / "cdi"
    (documents / "folder.yaml").mkdir(parents=True)
    ours = f"{node.folder}/bin"
    for name, folder in {"ours.yaml": ours, "claim.json": ours, "o.yaml": "/bin"}.items():
        (documents / name).write_text(f'{{"path": "{folder}/gpuhook-cdi-hook"}}')
    installer.remove(replace(node, documents=str(documents)), patient=False)
    assert {each.name for each in documents.iterdir()} == {"folder.yaml", "o.yaml"}


def test_pauses_between_process_scans_grow_with_scan_time(
    installer: ModuleType, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each scan reads all of /proc, and containers may run for days."""
    now, pauses = [0.0], list[float]()

    def look(_: object) -> list[str]:
        now[0] += len(pauses)
        return ["a"] if len(pauses) < 3 else []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(installer, "time", clock)
    monkeypatch.setattr(installer, "users", look)
    installer.wait_for_users(node)
    assert pauses == [0.5, 50.0, 100.0]


# The plugin's unit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("mixed", '"A=mixed"'),
        ("", '"A="'),
        ("two words", '"A=two words"'),
        ('a "word" \\ 5%d', '"A=a \\"word\\" \\\\ 5%%d"'),
    ],
)
def test_a_variable_is_quoted_for_a_systemd_unit(
    installer: ModuleType, value: str, expected: str
) -> None:
    """The rules are those of systemd.syntax(7) for quotes and systemd.unit(5) for specifiers."""
    assert sys.modules["node_plugin"].quoted("A", value) == expected


def test_a_variable_with_a_newline_is_refused_for_a_unit(installer: ModuleType) -> None:
    with pytest.raises(EngineError, match="The variable A of the installer"):
        sys.modules["node_plugin"].quoted("A", "x\nExecStartPre=/bin/sh")


# The engine's restart -----------------------------------------------------------------------------

SOCKETS = """\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 7 /run/containerd/containerd.sock.ttrpc
0000000000000000: 00000003 00000000 00000000 0001 03 8 /run/containerd/containerd.sock
0000000000000000: 00000003 00000000 00000000 0001 03 9
"""
LISTENING = "0000000000000000: 00000002 00000000 00010000 0001 01 6 /run/containerd/containerd.sock"


@pytest.mark.parametrize(("more", "expected"), [("", False), (LISTENING, True)])
def test_an_engine_counts_as_ready_when_its_socket_listens(
    installer: ModuleType, machine: Tree, more: str, expected: bool
) -> None:
    machine.process(100, "/usr/bin/containerd")
    machine.write("/proc/100/cgroup", SERVICE)
    machine.write("/proc/100/net/unix", SOCKETS + more)
    root = str(machine.root)
    [process] = installer.engines_running("containerd", root)
    assert installer.serves("containerd", process, root) == expected


def test_a_slowly_restarting_engine_is_awaited(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A container that exits while no engine runs has neither log nor status."""
    old, new = (type("P", (), {"pid": pid}) for pid in (1, 2))
    looks = iter([[old], [], [], [new], [new]])
    listening = iter([True, False, True])
    words = tmp_path / "last-words"
    words.touch()
    monkeypatch.setattr(installer, "engines_running", lambda _: next(looks))
    monkeypatch.setattr(installer, "serves", lambda *_: next(listening))
    monkeypatch.setattr(installer.host_processes, "send", lambda *_: True)
    monkeypatch.setattr(installer, "RESTART_SECONDS", -1.0)
    monkeypatch.setattr(installer, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(sys.modules["node"], "LAST_WORDS", str(words))
    installer.restart_by_signal("containerd")
    assert words.read_text().count("doesn't serve") == 1
    said = capsys.readouterr()
    assert said.err.count("systemctl start containerd") == 1
    assert said.out.endswith("containerd was restarted\n")


def test_a_variable_sets_the_folder_of_containerds_tasks(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(installer, "remove", lambda node, **_: seen.append(node.tasks))
    for settings in ({}, {"INSTALL_NODE_TASKS": "/run/k3s/tasks"}):
        assert CliRunner().invoke(installer.cli, ["remove"], env=settings).exit_code == 0
    assert seen == ["/run/containerd/io.containerd.runtime.v2.task", "/run/k3s/tasks"]


def test_an_operating_system_error_is_reported_as_one_sentence(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/closed")

    words = tmp_path / "last-words"
    words.touch()
    monkeypatch.setattr(sys.modules["node"], "LAST_WORDS", str(words))
    monkeypatch.setattr(installer, "remove", refuse)
    monkeypatch.setattr(sys, "argv", ["install-node", "remove"])
    with pytest.raises(SystemExit) as ended:
        installer.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("install-node: ")
    assert "Permission denied: '/closed'" in said
    assert said.count("\n") == 1
    assert words.read_text() == said


@pytest.mark.protects(
    "node-gate",
    "installing the NRI plugin as a gate also enables the gate in config.toml",
    instead="pass",
)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nri"], ("gpuhook.gate=true",)),
        (["--nri", "--settings", "gpuhook.gate=false"], ("gpuhook.gate=false",)),
        (["--nri", "--settings", "mode=spec"], ("mode=spec", "gpuhook.gate=true")),
        ([], ()),
    ],
)
def test_installing_the_nri_plugin_sets_the_gate_setting(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    expected: tuple[str, ...],
) -> None:
    """gpu-py reads this setting, and gives no devices while the engine's plugin doesn't run."""
    made: list[Any] = []
    monkeypatch.setattr(installer, "install", made.append)
    done = CliRunner().invoke(installer.cli, ["install", *words])
    assert done.exit_code == 0, done.output
    assert made[0].settings == expected
