"""Which process counts as the node's engine, and how an interpreter is moved to another folder."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from fabricated import Tree

from gpuhook.ground.errors import EngineError

FILE = Path(__file__).parents[3] / "packaging/kubernetes/image/install_node.py"
SERVICE = "12:pids:/system.slice/containerd.service\n0::/system.slice/containerd.service\n"


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_node", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine", lambda *_: b"")


@pytest.mark.parametrize(
    ("name", "status", "cgroup", "counts"),
    [
        ("containerd", {}, SERVICE, True),
        # From a cgroup namespace of the pod's own.
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
def test_only_a_service_of_the_node_is_its_engine(
    installer: ModuleType,
    machine: Tree,
    name: str,
    status: dict[str, str],
    cgroup: str,
    counts: bool,
) -> None:
    machine.process(100, f"/usr/bin/{name}", status=status)
    machine.write("/proc/100/cgroup", cgroup)
    (machine.root / "proc/101").mkdir()  # one that has ended meanwhile
    found = installer.engines_running("containerd", str(machine.root))
    assert [process.pid for process in found] == ([100] if counts else [])


def test_an_interpreter_is_moved_within_its_room(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/ld-linux.so.2").touch()
    monkeypatch.setattr(installer, "SOURCE", str(tmp_path))
    room = installer.PATH_LENGTH
    old = [f"{tmp_path}/lib/ld-linux.so.2".encode(), f"{tmp_path}/lib".encode()]
    new = [b"/opt/x/lib/ld-linux.so.2", b"/opt/x/lib"]
    before, after = (b"\0".join(each.ljust(room, b"\0") for each in paths) for paths in (old, new))
    assert installer.moved(b"\x7fELF" + before, "/opt/x") == b"\x7fELF" + after
    assert installer.moved(b"#!%s/bin/python3" % bytes(tmp_path), "/x") == b"#!/x/bin/python3"
    with pytest.raises(EngineError, match="too long"):
        installer.moved(b"\x7fELF" + before, "/" + room * "x")


def test_who_needs_our_programs(installer: ModuleType, machine: Tree, tmp_path: Path) -> None:
    """Where the node's folder isn't mounted, nobody knows: it isn't "nobody"."""
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
def test_a_strangers_conmon_is_not_waited_for(
    installer: ModuleType, machine: Tree, status: dict[str, str], option: tuple[str, ...]
) -> None:
    node = installer.Node("/opt/g", "crio", "", "none", "", False)
    machine.process(7, "/tmp/conmon", *option, "/opt/g/bin/gpu-py", status=status)
    assert installer.users(node, str(machine.root)) == []


def test_a_set_user_id_program_is_no_conmon(installer: ModuleType, machine: Tree) -> None:
    node = installer.Node("/opt/g", "crio", "", "none", "", False)
    machine.process(7, "/tmp/conmon", "-r", "/opt/g/bin/gpu-py")
    assert installer.users(node, str(machine.root)) == ["the container of process 7"]
    (machine.root / "proc/7/exe").chmod(0o4755)
    assert installer.users(node, str(machine.root)) == []


def test_the_folder_of_notes_is_named_by_its_variable(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(installer, "remove", lambda node, **_: seen.append(node.tasks))
    for settings in ({}, {"INSTALL_NODE_TASKS": "/run/k3s/tasks"}):
        assert CliRunner().invoke(installer.cli, ["remove"], env=settings).exit_code == 0
    assert seen == ["/run/containerd/io.containerd.runtime.v2.task", "/run/k3s/tasks"]


def test_what_the_system_refuses_is_a_sentence(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/closed")

    monkeypatch.setattr(installer, "remove", refuse)
    monkeypatch.setattr(sys, "argv", ["install-node", "remove"])
    with pytest.raises(SystemExit) as ended:
        installer.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("install-node: ")
    assert "Permission denied: '/closed'" in said
    assert said.count("\n") == 1
