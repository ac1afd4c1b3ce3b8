"""cgroup: OCI device rules, and the search for the cgroup folder of a process."""

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.cgroup import access, v2
from gpuhook.base.errors import CgroupError
from gpuhook.monitor.containers import cgroup_check

DENY_ALL: dict[str, Any] = {"allow": False, "access": "rwm"}
GPU0: dict[str, Any] = {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"}


def test_each_device_gives_one_cgroup_rule() -> None:
    assert access.device_rules([(195, 0)]) == [GPU0]
    assert access.device_rules([]) == []


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ([], False),
        ([DENY_ALL], False),
        ([DENY_ALL, GPU0], True),
        ([GPU0, DENY_ALL], False),
        ([GPU0, {"allow": False, "type": "b", "access": "rwm"}], True),
        ([GPU0, {"allow": False, "type": "c", "major": 195, "access": "w"}], False),
        ([GPU0, {"allow": False, "type": "c", "major": 195, "minor": 1, "access": "w"}], True),
        ([GPU0, {"allow": False, "type": "a"}], False),
        ([{"allow": True, "type": "a", "access": "rwm"}], True),
        ([{"allow": True, "access": "rwm"}], True),
        ([{"allow": True, "type": "c", "major": 195, "minor": -1, "access": "rwm"}], True),
        ([{"allow": True, "type": "c", "major": -1, "minor": None, "access": "rw"}], True),
        ([{"allow": True, "type": "u", "major": 195, "minor": 0, "access": "rw"}], True),
        ([{"allow": True, "type": "c", "major": 195, "minor": 0, "access": "r"}], False),
        (
            [
                {"allow": True, "type": "c", "major": 195, "access": "r"},
                {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "w"},
            ],
            True,
        ),
        ([{**GPU0, "type": "b"}], False),
        ([{**GPU0, "major": 196}], False),
        ([{**GPU0, "minor": 1}], False),
        ([{**GPU0, "major": "195"}], False),
        ([{**GPU0, "access": None}], False),
        ([{**GPU0, "allow": "yes"}], False),
        ([{**GPU0, "type": ["c"]}], False),
        ([None, "rw", 7, [GPU0], GPU0], True),
        (None, False),
        ({"allow": True}, False),
    ],
)
def test_the_last_matching_rule_decides_access(rules: object, allowed: bool) -> None:
    assert access.allowed(rules, [(195, 0)]) == ({(195, 0)} if allowed else set())


def test_a_rule_allows_only_the_access_it_names() -> None:
    assert access.allowed([GPU0], [(195, 0)], "r")
    assert not access.allowed([GPU0], [(195, 0)], "rwm")


def test_rules_for_many_devices_decide_as_for_each_alone() -> None:
    """The kernel applies one rule after another; the result must not depend on their order."""
    chance = random.Random(7)  # noqa: S311 - so that it is the same every time
    numbers = [None, -1, 1, 2]
    pairs = [(1, 1), (1, 2), (2, 1), (2, 2)]
    for _ in range(300):
        rules = [
            {
                "allow": chance.random() < 0.6,
                "type": chance.choice("acbu"),
                "major": chance.choice(numbers),
                "minor": chance.choice(numbers),
                "access": chance.choice(["r", "w", "rw", "rwm"]),
            }
            for _ in range(chance.randint(0, 6))
        ]
        assert access.allowed(rules, pairs) == {pair for pair in pairs if last_says(rules, pair)}


def last_says(rules: list[dict[str, Any]], pair: tuple[int, int]) -> bool:
    given = {"r": False, "w": False}
    for rule in rules:
        about = zip((rule["major"], rule["minor"]), pair, strict=True)
        if rule["type"] != "b" and all(each in (None, -1, number) for each, number in about):
            given.update(dict.fromkeys({"r", "w"}.intersection(rule["access"]), rule["allow"]))
    return all(given.values())


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(max_size=6), inner)),
    max_leaves=8,
)
loose_rules = st.dictionaries(
    st.sampled_from(["allow", "type", "major", "minor", "access"]),
    st.one_of(json_values, st.sampled_from(["a", "c", "rwm", True, 195])),
)


@given(st.one_of(json_values, st.lists(loose_rules)))
def test_malformed_rules_cause_no_crash(rules: object) -> None:
    assert access.allowed(rules, [(195, 0)]) <= {(195, 0)}


class Proc:
    """A procfs with one container process, 7, and cgroup file systems next to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        (folder / "7").mkdir()
        (folder / "self").mkdir()
        self.memberships("self", "5:devices:/engine\n0::/engine\n")
        self.mounts()

    def memberships(self, pid: str, text: str) -> None:
        (self.path / pid / "cgroup").write_text(text)

    def mounts(self, *mounts: tuple[str, str, str, str]) -> None:
        lines = [
            f"{40 + n} 30 0:{n} {root} {self.path}/{point} rw,nosuid shared:{n} - {kind} {kind} "
            f"rw,{options}\n"
            for n, (root, point, kind, options) in enumerate(mounts)
        ]
        text = "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + "".join(lines) + "short line\n"
        (self.path / "self/mountinfo").write_text(text)

    def cgroup(self, name: str, *files: str) -> Path:
        folder = self.path / name
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).touch()
        return folder

    def find(self) -> tuple[int, str]:
        proc = str(self.path)
        return access._find(access._paths((self.path / "7/cgroup").read_bytes()), proc)


V2 = ("/", "cg", "cgroup2", "")


def allow(proc: Proc, devices: list[tuple[int, int]], written: dict[int, str] | None = None) -> str:
    """Allow process 7 the given devices."""
    process = os.open(proc.path / "7", os.O_PATH)
    try:
        return access.allow(process, devices, proc=str(proc.path), written=written)
    finally:
        os.close(process)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


# The process's cgroups; the mounts (root, place, kind, options); and the expected result: the
# version and the folder of the cgroup.
FOUND: dict[str, tuple[str, list[tuple[str, str, str, str]], int, str]] = {
    "hybrid is v1": (
        "5:devices:/docker/abc\n2:cpu,cpuacct:/x\n1:name=systemd:/y\n0::/z\n",
        [
            ("/", "unified", "cgroup2", "nsdelegate"),
            ("/", "cpu", "cgroup", "cpu,cpuacct"),
            ("/", "devices", "cgroup", "freezer,devices"),
        ],
        1, "devices/docker/abc",
    ),
    "v2": (
        "0::/system.slice/docker-abc.scope\n", [("/", "cg", "cgroup2", "nsdelegate")],
        2, "cg/system.slice/docker-abc.scope",
    ),
    "v1 that is mounted nowhere": (
        "5:devices:/\n0::/docker:abc\n", [("/", "cg", "cgroup2", "")], 2, "cg/docker:abc",
    ),
    "mounts of parts, and odd names": (
        "0::/kubepods/pod 1/abc\n",
        [
            ("/other", "other", "cgroup2", ""),
            ("/kubepods/pod", "sibling", "cgroup2", ""),
            ("/kubepods/pod\\0401", "c\\040g\\134roups", "cgroup2", ""),
        ],
        2, "c g\\roups/abc",
    ),
    "the mount's root itself": ("0::/pod\n", [("/pod", "cg", "cgroup2", "")], 2, "cg"),
    "a hidden mount": (
        "0::/pod\n", [("/", "first", "cgroup2", ""), ("/", "second", "cgroup2", "")],
        2, "second/pod",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "mounts", "version", "place"), FOUND.values(), ids=FOUND)
def test_the_cgroup_of_a_process_is_found(
    proc: Proc, text: str, mounts: list[tuple[str, str, str, str]], version: int, place: str
) -> None:
    proc.memberships("7", text)
    proc.cgroup("first/pod")  # a cgroup without the file by which it is recognized
    folder = proc.cgroup(place, "cgroup.procs" if version == 2 else "devices.allow")
    proc.mounts(*mounts)
    assert proc.find() == (version, str(folder))


def test_a_cgroup_outside_the_namespace_is_an_error_unless_mounted(proc: Proc) -> None:
    proc.memberships("7", "0::/../neighbour\n")
    proc.cgroup("neighbour", "cgroup.procs")
    proc.cgroup("cg", "cgroup.procs")
    proc.mounts(V2)
    with pytest.raises(CgroupError, match=r"no mounted cgroup file system shows .*\.\./neigh"):
        proc.find()
    folder = proc.cgroup("above/neighbour", "cgroup.procs")
    proc.mounts(("/..", "above", "cgroup2", ""))
    assert proc.find() == (2, str(folder))


def test_a_cgroup_without_a_mount_is_an_error(proc: Proc) -> None:
    proc.memberships("7", "5:devices:/abc\n0::/def\n")
    with pytest.raises(CgroupError, match=r"shows the container's cgroup /abc \(v1\) or /def"):
        allow(proc, [(195, 0)])


def test_a_process_that_has_ended_is_an_error(proc: Proc) -> None:
    with pytest.raises(CgroupError, match="can't be found"):
        allow(proc, [(195, 0)])


def test_nothing_is_written_without_devices_or_a_device_cgroup(proc: Proc) -> None:
    assert allow(proc, []) == "none-needed:no-devices"
    proc.memberships("7", "3:cpu:/x\n")
    assert allow(proc, [(195, 0)]) == "none-needed:no-cgroups"


def test_the_callers_own_cgroup_is_not_changed(proc: Proc) -> None:
    proc.memberships("7", "0::/engine\n")
    proc.cgroup("cg/engine", "cgroup.procs")
    proc.mounts(V2)
    assert allow(proc, [(195, 0)]) == "none-needed:shared"


def test_only_missing_v1_rules_are_written(proc: Proc) -> None:
    proc.memberships("7", "5:devices:/abc\n")
    folder = proc.cgroup("devices/abc", "devices.allow")
    (folder / "devices.list").write_text("c 1:3 rwm\nc 195:255 rw\nc 195:1 m\n")
    proc.mounts(("/", "devices", "cgroup", "devices"))
    devices = [(195, 255), (195, 1), (1, 3)]
    assert allow(proc, devices) == "v1"
    assert (folder / "devices.allow").read_text() == "c 195:1 rw"


def test_missing_rules_of_v1_parent_cgroups_are_found(proc: Proc) -> None:
    """Each cgroup has its own list. Other cgroups below belong to nested containers."""
    names = ("abc", "abc/init", "abc/init/scope", "abc/nested")
    folders = {name: proc.cgroup(f"devices/{name}", "devices.allow") for name in names}
    for name, folder in folders.items():
        has = "c 195:0 rw\n" if name == "abc" else ""
        (folder / "devices.list").write_text(f"c 1:3 rwm\n{has}")
    proc.mounts(("/", "devices", "cgroup", "devices"))
    proc.memberships("7", "5:devices:/abc/init/scope\n")
    process = os.open(proc.path / "7", os.O_PATH)
    try:
        missing = cgroup_check.missing(
            process, [(195, 0), (1, 3)], proc=str(proc.path), written={1: "/abc"}
        )
        assert missing == [(195, 0)]
    finally:
        os.close(process)
    assert allow(proc, [(195, 0)], {1: "/abc"}) == "v1"
    written = {name: (folder / "devices.allow").read_text() for name, folder in folders.items()}
    assert written == {
        "abc": "", "abc/init": "c 195:0 rw", "abc/init/scope": "c 195:0 rw", "abc/nested": "",
    }  # fmt: skip


class TestRefused:
    """EPERM from the kernel, whose meaning depends on the user namespace."""

    @pytest.fixture
    def refused(self, proc: Proc, monkeypatch: pytest.MonkeyPatch) -> Proc:
        proc.memberships("7", "0::/pod\n")
        proc.cgroup("cg/pod", "cgroup.procs")
        (proc.path / "self/ns").mkdir()
        (proc.path / "self/ns/user").touch()
        proc.mounts(V2)

        def refuse(folder: str, devices: object) -> int:
            raise PermissionError(errno.EPERM, "Operation not permitted", folder)

        monkeypatch.setattr(v2, "extend", refuse)
        return proc

    def test_a_refused_write_is_ignored_in_rootless_mode(self, refused: Proc) -> None:
        # The namespace's file doesn't have the inode number of the initial user namespace.
        assert allow(refused, [(195, 0)]) == "none-needed:rootless"

    def test_a_refused_write_is_an_error_in_the_initial_user_namespace(
        self, refused: Proc, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inode = (refused.path / "self/ns/user").stat().st_ino
        monkeypatch.setattr(access, "USER_NS_INIT_INO", inode)
        with pytest.raises(CgroupError, match=r"cgroup can't be given .*not permitted") as caught:
            allow(refused, [(195, 0)])
        assert "no-cgroups = true" in caught.value.remedy


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cgroup folders whose device programs were extended."""
    found: list[str] = []

    def extend(folder: str, devices: object) -> int:
        found.append(folder)
        return 1

    monkeypatch.setattr(v2, "extend", extend)
    return found


def test_crun_systemd_scope_and_inner_cgroup_are_both_extended(
    proc: Proc, extended: list[str]
) -> None:
    scope = proc.cgroup("cg/machine.slice/libpod-abc.scope")
    inner = proc.cgroup("cg/machine.slice/libpod-abc.scope/container", "cgroup.procs")
    proc.mounts(V2)
    proc.memberships("7", "0::/machine.slice/libpod-abc.scope/container\n")
    assert allow(proc, [(195, 0)]) == "v2"
    assert extended == [str(inner), str(scope)]
    extended.clear()
    proc.cgroup("cg/machine.slice/other/container", "cgroup.procs")
    proc.memberships("7", "0::/machine.slice/other/container\n")
    allow(proc, [(195, 0)])
    assert extended == [f"{proc.path}/cg/machine.slice/other/container"]


def test_other_line_ends_in_a_cgroup_name_do_not_split_it(proc: Proc) -> None:
    """A cgroup's name may have any byte except a newline, so no other character ends a line."""
    victim = proc.cgroup("cg/victim", "cgroup.procs")
    proc.mounts(V2)
    for end in ("\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"):
        name = f"mine/x{end}0::"
        own = proc.cgroup(f"cg/{name}/victim", "cgroup.procs")
        (proc.path / "7/cgroup").write_bytes(f"0::/{name}/victim\n".encode())
        assert proc.find() == (2, str(own))
    assert proc.find() != (2, str(victim))


@pytest.mark.protects(
    "written-cgroup", "a container is repaired only in the cgroup that its record names"
)
def test_devices_are_allowed_only_in_the_recorded_cgroup(proc: Proc, extended: list[str]) -> None:
    """A process may have moved since then to a cgroup below, or to an unrelated one."""
    given = proc.cgroup("cg/docker/abc", "cgroup.procs")
    for name in ("docker/abc/init", "docker/abcd", "docker/victim"):
        proc.cgroup(f"cg/{name}", "cgroup.procs")
    proc.mounts(V2)
    for now in ("/docker/abc", "/docker/abc/init"):
        proc.memberships("7", f"0::{now}\n")
        assert allow(proc, [(195, 0)], {2: "/docker/abc"}) == "v2"
    assert extended == [str(given)] * 2
    for now in ("/docker/abcd", "/docker/victim", "/docker", "/docker/abc/../victim"):
        proc.memberships("7", f"0::{now}\n")
        with pytest.raises(CgroupError, match="but its devices were allowed in '/docker/abc'"):
            allow(proc, [(195, 0)], {2: "/docker/abc"})
    proc.memberships("7", "5:devices:/docker/abc\n")
    with pytest.raises(CgroupError, match="its devices were allowed in"):
        allow(proc, [(195, 0)], {2: "/docker/abc"})
    assert extended == [str(given)] * 2


def test_only_unambiguous_cgroup_paths_are_recorded() -> None:
    """A path that has another name in a different namespace isn't recorded."""
    assert access.places(b"5:devices:/a\n3:cpu:/b\n0::/c\n") == {1: "/a", 2: "/c"}
    assert access.places(b"5:devices:/\n0::/../c\n") == {}


@pytest.mark.protects(
    "first-cgroup",
    "the prefork server in a system container also leaves its caller's cgroup",
    instead="pass",
)
def test_outermost_cgroups_are_the_roots_and_the_cgroup_of_pid_1(proc: Proc) -> None:
    """The cgroup of pid 1 counts where a root below another cgroup accepts no process."""
    (proc.path / "1").mkdir()
    proc.memberships("1", "0::/init.scope\n")
    proc.mounts(("/", "v1", "cgroup", "devices"), V2, ("/below", "part", "cgroup2", ""))
    places = [f"{proc.path}/{name}" for name in ("v1", "cg/init.scope", "cg")]
    assert access.outermost(str(proc.path)) == [f"{place}/cgroup.procs" for place in places]
    proc.memberships("1", "0::/../elsewhere\n")
    assert len(access.outermost(str(proc.path))) == 2
