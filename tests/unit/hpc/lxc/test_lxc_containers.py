"""LXC containers: the config file of a container, and lines that follow the driver."""

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuhook.base.config.loader import loads
from gpuhook.base.errors import EngineError, FolderError, LostDeviceError
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.plan.operations import (
    FILE_OPTIONS,
    AllowDevice,
    BindDevice,
    BindFile,
    BindPart,
    Operation,
    Plan,
    Symlink,
)
from gpuhook.hpc import checks
from gpuhook.hpc.lxc import containers, lines
from gpuhook.hpc.lxc.containers import LxcContainer
from gpuhook.hpc.rootfs.requests import FolderRequest
from gpuhook.hpc.rootfs.work import WorkResult
from gpuhook.tools.cli import cli
from gpuhook.tools.doctor import engines
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Status
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.engines import installer
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.store import Store

NODE = DeviceNode("/dev/maker0", 240, 7, 0o660, 0, 44)
RULE = AllowDevice(NODE.numbers, "")
DEVICE = BindDevice("/", NODE, "")
OPTIONS = "bind,create=file,ro,nosuid,noexec 0 0"


def made(*operations: Operation, root: str | None = None) -> list[str]:
    """Return the lines of operations, without the names of settings."""
    found = lines.lines(Plan([*operations]), (), root, [2])
    return [line.partition(" = ")[2] for line in found]


# Lines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "keys"),
    [
        ("4:devices:/\n0::/\n", ["lxc.cgroup2", "lxc.cgroup"]),
        ("4:pids,devices:/\n", ["lxc.cgroup2", "lxc.cgroup"]),
        ("3:pids:/\n0::/a:devices\n", ["lxc.cgroup2"]),
    ],
)
def test_cgroup_v1_rules_are_written_only_on_hosts_with_cgroup_v1(
    monkeypatch: pytest.MonkeyPatch, groups: str, keys: list[str]
) -> None:
    """LXC 7 refuses cgroup v1 rules, so a container would not start."""
    monkeypatch.setattr("gpuhook.base.host.proc.read", lambda _: groups.encode())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = lines.lines(Plan([RULE]), (), None, lines.versions())
    assert found == [f"{key}.devices.allow = c 240:7 rw" for key in keys]
    found = lines.lines(Plan([RULE]), (), None, lines.versions(is_restricted=False))
    assert found == [f"{key}.devices.allow = c 240:7 rw" for key in keys[1:]]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lines.versions() == []


def test_a_device_is_allowed_by_path_unless_the_path_has_a_blank() -> None:
    assert made(RULE, DEVICE) == ["/dev/maker0 rw", f"/dev/maker0 dev/maker0 none {OPTIONS}"]
    spaced = BindDevice("/driver root", NODE, "")
    assert made(RULE, spaced)[0] == "c 240:7 rw", "LXC would take the rest for the access"


def test_paths_are_escaped_as_in_fstab() -> None:
    device = BindDevice("/a b\t\\c\nd", NODE, "")
    assert made(device) == [f"/a\\040b\\011\\134c\\012d/dev/maker0 dev/maker0 none {OPTIONS}"]


def test_only_a_required_file_is_mounted_without_the_optional_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    needed = BindFile(str(tmp_path), "/file", "/usr/lib/libm.so.1.2", FILE_OPTIONS, "")
    part = BindPart(str(tmp_path), "/file", "/usr/bin/smi", FILE_OPTIONS, "")
    folder = BindPart("", str(tmp_path), "/opt/maker", FILE_OPTIONS, "")
    link = Symlink("/usr/lib/libm.so.1", "libm.so.1.2", replace=True, reason="")
    ro, source = "ro,nosuid,nodev 0 0", f"{tmp_path}/file"
    assert made(needed, part, folder, link) == [
        f"{source} usr/lib/libm.so.1.2 none bind,create=file,{ro}",
        f"{source} usr/bin/smi none bind,create=file,optional,{ro}",
        f"{tmp_path} opt/maker none bind,create=dir,optional,{ro}",
        f"{source} usr/lib/libm.so.1 none bind,create=file,optional,{ro}",
    ]


def test_mount_targets_have_their_links_resolved_for_lxc(tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/real").touch()
    (tmp_path / "etc").mkdir()
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "usr/lib/link").symlink_to("/usr/real")
    (tmp_path / "out").symlink_to("/../../etc")
    for place, found in {
        "/lib/new/a": "usr/lib/new/a",
        "/lib/link": "usr/real",
        "/out/hostname": "etc/hostname",
        "/none/a": "none/a",
    }.items():
        op = BindPart("", "/etc/hostname", place, FILE_OPTIONS, "")
        [line] = made(op, root=str(tmp_path))
        assert line.split()[1] == found


# Containers --------------------------------------------------------------------------------------


def guest(prefix: Path, name: str = "box", **more: Any) -> LxcContainer:
    return containers.guest(FolderRequest(name, (("A", "0"),), **more), str(prefix))


def written(prefix: Path, path: str, text: str = "") -> Path:
    place = prefix / path[1:]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


def test_a_containers_config_file_is_found_or_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no LXC container box here: /etc/pve/lxc/box\.conf and"):
        guest(tmp_path)
    written(tmp_path, "/var/lib/lxc/box/config")
    assert guest(tmp_path).file == "/var/lib/lxc/box/config"
    written(tmp_path, "/etc/lxc/lxc.conf", "# x\nlxc.lxcpath = /srv/lxc/\n")
    with pytest.raises(EngineError, match="/srv/lxc/box/config don't exist"):
        guest(tmp_path)
    written(tmp_path, "/srv/lxc/101/config")
    assert guest(tmp_path, "101").file == "/srv/lxc/101/config"
    written(tmp_path, "/etc/pve/lxc/101.conf")
    assert guest(tmp_path, "101").file == "/etc/pve/lxc/101.conf", "Proxmox writes the other one"
    named = written(tmp_path, "/else/x.conf")
    assert guest(tmp_path, file=str(named)).file == "/else/x.conf"
    with pytest.raises(EngineError, match=r"/else/y\.conf doesn't exist"):
        guest(tmp_path, file=f"{tmp_path}/else/y.conf")
    for name in ("", "../box", "a b", "-a", "a\n"):
        with pytest.raises(EngineError, match="can't be an LXC container's name"):
            guest(tmp_path, name)


class Planned:
    """A driver with one device, and with a plan that the test sets."""

    def __init__(self) -> None:
        self.plan = Plan([RULE, DEVICE])
        self.roots: list[str | None] = []

    def __call__(self, rootfs: str | None, *_: object) -> tuple[WorkResult, Plan]:
        self.roots.append(rootfs)
        return WorkResult(environment=["A=b c"]), self.plan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    found = Planned()
    monkeypatch.setattr(containers, "planned", found)
    return found


@pytest.mark.parametrize(
    ("text", "root", "is_mapped"),
    [
        ("lxc.rootfs.path = dir:{}\n", True, False),
        ("lxc.rootfs.path = {}  \nlxc.idmap = u 0 100000 65536\n", True, True),
        ("lxc.rootfs.path = overlay:/a:{}\nlxc.idmap =\n", False, False),
        ("#lxc.rootfs.path = {}\n#lxc.idmap = u 0 1 1\n", False, False),
    ],
)
def test_root_folder_and_id_mapping_are_read_from_the_config(
    tmp_path: Path, planned: Planned, text: str, root: bool, is_mapped: bool
) -> None:
    (tmp_path / "root").mkdir()
    written(tmp_path, "/var/lib/lxc/box/config", text.format("/root"))
    found = containers.files(guest(tmp_path), f"{tmp_path}/state", str(tmp_path))
    assert planned.roots == [f"{tmp_path}/root" if root else None]
    assert [" host's group 44" in each for each in found.warnings] == [True] * is_mapped


@pytest.mark.parametrize(
    ("text", "is_restricted"),
    [
        ("lxc.arch = x\n", False),
        ("lxc.cgroup2.devices.deny = a\n", True),
        ("lxc.include = {}/common.conf\n", True),
        ("lxc.include = {}/common.conf\nlxc.include = {}/userns.conf\n", False),
        ("lxc.include = {}/userns.conf\nlxc.include = {}/more\n", True),
        ("lxc.include = {}/gpuhook-box.conf\n", False),
        ("lxc.include = {}/loop.conf\n", False),
    ],
)
def test_cgroup_v2_rules_are_written_only_where_others_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_restricted: bool
) -> None:
    """Without other rules, LXC would forbid the container everything but these devices."""
    rule = "lxc.cgroup2.devices.allow = c 1:3 rwm\n"
    for name, content in {
        "common.conf": f"lxc.cgroup2.devices.deny = a\n{rule}",
        "userns.conf": "lxc.cgroup2.devices.deny =\nlxc.cgroup2.devices.allow =\n",
        "more/a.conf": rule,
        "gpuhook-box.conf": rule,
        "loop.conf": f"lxc.include = {tmp_path}/loop.conf\n",
    }.items():
        written(tmp_path, f"/{name}", content)
    box = written(tmp_path, "/box/config", text.replace("{}", str(tmp_path)))
    assert containers._is_restricted(str(box), "") == is_restricted
    pve = "/etc/pve/lxc/1.conf"
    assert containers._is_restricted(f"{tmp_path}{pve}", str(tmp_path)), "not started yet"
    written(tmp_path, "/var/lib/lxc/1/config", box.read_text())
    assert containers._is_restricted(f"{tmp_path}{pve}", str(tmp_path)) == is_restricted


def test_a_proxmox_snapshot_section_is_ignored(tmp_path: Path, planned: Planned) -> None:
    written(tmp_path, "/etc/pve/lxc/1.conf", "arch: x\n\n[a]\nunprivileged: 1\n")
    assert containers.files(guest(tmp_path, "1"), str(tmp_path), str(tmp_path)).warnings == ()
    written(tmp_path, "/etc/pve/lxc/1.conf", "arch: x\nunprivileged: 1\n\n[a]\n")
    assert containers.files(guest(tmp_path, "1"), str(tmp_path), str(tmp_path)).warnings


def test_a_given_root_folder_that_is_no_folder_is_refused(tmp_path: Path, planned: Planned) -> None:
    written(tmp_path, "/var/lib/lxc/box/config")
    box = guest(tmp_path, rootfs=f"{tmp_path}/none")
    with pytest.raises(FolderError, match="none isn't a folder"):
        containers.files(box, str(tmp_path), str(tmp_path))
    assert planned.roots == []


class Host:
    """A container with devices, and gpuhook's state folder."""

    def __init__(self, folder: Path, name: str = "box") -> None:
        self.state = str(folder / "state")
        self.config = folder / name / "config"
        self.config.parent.mkdir()
        self.config.write_text("lxc.arch = x\n")
        self.included = Path(containers.included_file(name, self.state))
        self.container = containers.guest(FolderRequest(name, file=str(self.config)), "")

    def install(self) -> None:
        store = Store(self.state)
        ask = EngineRequest((), units=containers.files(self.container, self.state).units)
        with store.locked():
            installer.install(store, list(ENGINES["lxc"].install(ask).targets))
        containers.remember(self.state, self.container)

    def uninstall(self) -> None:
        store = Store(self.state)
        path = containers.file_of(self.state, self.container.name)
        with store.locked():
            installer.uninstall(store, [each for each in store.records() if each.config == path])
        containers.forget(self.state, [path])


@pytest.fixture
def host(tmp_path: Path, planned: Planned) -> Host:
    made = Host(tmp_path)
    made.install()
    return made


def test_included_lines_follow_the_driver_and_are_removed_by_uninstall(
    host: Host, planned: Planned
) -> None:
    before = host.config.read_text()
    assert f"lxc.include = {host.included}\n" in before
    assert "lxc.environment = A=b c\n" in host.included.read_text()
    assert containers.refresh(host.state) == ([], [])
    planned.plan = Plan([RULE])
    assert containers.refresh(host.state) == ([str(host.included)], [])
    assert "lxc.mount.entry" not in host.included.read_text()
    assert host.config.read_text() == before
    host.uninstall()
    assert host.config.read_text() == "lxc.arch = x\n"
    assert not Path(host.state).exists()
    assert containers.refresh(host.state) == ([], [])


def test_one_failing_container_does_not_affect_others(
    host: Host, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Host(tmp_path, "other")
    other.install()
    planned.plan = Plan([RULE])
    files = containers.files

    def failing(container: LxcContainer, *more: str) -> containers.LxcFiles:
        if container.name == "box":
            raise LostDeviceError("GPU 1 has fallen off the bus", "Look at dmesg")
        return files(container, *more)

    monkeypatch.setattr(containers, "files", failing)
    changed, [error] = containers.refresh(host.state)
    assert (changed, error.cause) == ([str(other.included)], "GPU 1 has fallen off the bus")
    other.uninstall()
    assert other.config.read_text() == "lxc.arch = x\n"
    assert host.included.exists()
    with pytest.raises(EngineError, match="has added no devices to an LXC container 'other'"):
        containers.file_of(host.state, "other")


def test_a_destroyed_container_is_left_alone_and_can_be_removed(
    host: Host, planned: Planned
) -> None:
    host.config.unlink()
    host.config.parent.rmdir()
    planned.plan = Plan([RULE])
    assert containers.refresh(host.state) == ([], [])
    host.uninstall()
    assert not host.config.parent.exists()
    assert not Path(host.state).exists()


def test_two_containers_with_one_name_are_refused(host: Host, tmp_path: Path) -> None:
    other = written(tmp_path, "/else/box/config")
    container = containers.guest(FolderRequest("box", file=str(other)), "")
    with pytest.raises(EngineError, match=f"The container box of {host.config} has devices"):
        containers.files(container, host.state)


def test_the_doctor_reports_stale_and_missing_lines(
    host: Host, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(Machine(), loads(""), str(tmp_path))
    monkeypatch.setattr(checks, "state_folder", lambda _: host.state)
    monkeypatch.setattr(containers, "every_file", lambda: [str(host.config)])

    def found() -> list[tuple[Status, str]]:
        return [(each.status, each.message) for each in checks.lxc(case)]

    [(status, text)] = found()
    assert (status, "1 LXC container with devices" in text) == (Status.OK, True)
    planned.plan = Plan([RULE])
    [(status, text)] = found()
    assert (status, "LXC container box are out of date" in text) == (Status.WARNING, True)
    os.unlink(host.included)
    (status, text), _ = found()
    assert status is Status.FAILURE
    assert f"{host.config} includes {host.included}, which doesn't exist" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["install", "--engine=lxc"], "--container and --engine lxc need each other."),
        (["install", "--engine=docker", "--container=a"], "--container and --engine lxc need"),
        (["install", "--engine=lxc", "--engine=docker", "--container=a"], "need each other."),
        (["install", "--engine=docker", "-e", "A=0"], "need --machine or --container."),
        (["uninstall", "--container=a"], "--container needs --engine lxc, without --config."),
        (["uninstall", "--engine=lxc", "--container=a", "--config=/x"], "without --config."),
    ],
)
def test_lxc_options_without_those_they_need_are_refused(
    tmp_path: Path, words: list[str], said: str
) -> None:
    done = CliRunner().invoke(cli, [*words, f"--prefix={tmp_path}"])
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_the_doctor_reports_an_engine_that_is_not_found(engine: str, tmp_path: Path) -> None:
    case = Case(Machine(str(tmp_path)), loads(""), str(tmp_path))
    case.engine = engine
    [found] = engines.engine_found(case)
    assert found.message.endswith(" was not found")
