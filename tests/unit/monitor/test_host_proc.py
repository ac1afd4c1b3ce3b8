"""/proc read as bytes, with any names of processes, cgroups and folders."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuhook.base.host import proc
from gpuhook.monitor.host import namespaces
from gpuhook.monitor.host.namespaces import NamespaceScan
from gpuhook.monitor.host.uevents import KernelEvents, listen, parse

# Bytes that Python's text methods take for the end of a line or for a blank, besides \n.
CUTTING = [
    b"\r", b"\r\r", b"\v", b"\f", b"\x1c", b"\x1d", b"\x1e", b"\x1f", b"\x85", "\x85".encode(),
    "\u2028".encode(), "\u2029".encode(), "\xa0".encode(), "\u3000".encode(),
]  # fmt: skip
names = st.one_of(
    st.binary(min_size=1, max_size=20),
    st.lists(st.sampled_from([*CUTTING, b"0::/", b"9 9 0:9 ", b" - ", b"\\040", b"\n", b"x"])).map(
        b"".join
    ),
).map(lambda name: name.replace(b"\0", b"").replace(b"/", b"") or b"x")


def as_mountinfo(path: bytes, characters: bytes = b" \t\n\\") -> bytes:
    """Return a path as the kernel's mangle() writes it into a mount table."""
    return b"".join(b"\\%03o" % each if each in characters else b"%c" % each for each in path)


def line(number: int, root: bytes, point: bytes, source: bytes) -> bytes:
    """Return a line of a mount table."""
    root, point = as_mountinfo(root), as_mountinfo(point)
    source = as_mountinfo(source, b" \t\n\\#")
    return b"%d 1 0:%d %s %s rw shared:%d - tmpfs %s rw\n" % (
        number, number, root, point, number, source,
    )  # fmt: skip


@pytest.mark.protects(
    "newline-alone",
    "lines of /proc files are separated only at newlines",
    instead="return data.splitlines()",
)
@given(names, names, names)
@example(b"\r\r", b"x\r0::", b"0:8")
def test_mounts_with_any_names_are_parsed(root: bytes, point: bytes, source: bytes) -> None:
    before, after = line(7, b"/", b"/", b"none"), line(9, b"/", b"/after", b"none")
    table = proc.Mounts(before + line(8, b"/" + root, b"/" + point, source) + after)
    assert [mount.id for mount in table] == [b"7", b"8", b"9"]
    found = table.find(b"8")
    assert found is not None
    assert proc.unescaped(found.root) == os.fsdecode(b"/" + root)
    assert proc.unescaped(found.point) == os.fsdecode(b"/" + point)
    assert (found.device, found.tags, found.kind) == (b"0:8", [b"shared:8"], b"tmpfs")
    for number in range(7, 10):
        assert table.has_device(b"0:%d" % number)
        assert table.has_group(b"shared:%d" % number)
    assert not table.has_device(b"0:1")
    assert not table.has_group(b"shared:1")
    assert table.below(b"7") == {b"7"}
    assert table.below(b"1") == {b"1", b"7", b"8", b"9"}
    assert [mount.id for mount in table.without({b"8"})] == [b"7", b"9"]
    assert [mount.id for mount in table.without(device=b"0:9")] == [b"7", b"8"]


@pytest.mark.protects(
    "newline-alone",
    "lines of /proc files are separated only at newlines",
    instead="return data.splitlines()",
)
@given(names)
@example(b"x\r0::/victim")
@example(b"x\x0b0::/victim")
def test_cgroups_with_any_names_are_parsed(name: bytes) -> None:
    name = name.replace(b"\n", b"")  # the kernel refuses newlines in these names
    text = b"12:cpu,devices:/a/%s\n1:name=systemd:/%s\n0::/%s/b\n" % (name, name, name)
    assert proc.cgroups(text) == {
        "cpu,devices": os.fsdecode(b"/a/" + name),
        "name=systemd": os.fsdecode(b"/" + name),
        "": os.fsdecode(b"/" + name + b"/b"),
    }


@pytest.mark.protects(
    "newline-alone",
    "lines of /proc files are separated only at newlines",
    instead="return data.splitlines()",
)
@given(st.binary(min_size=1, max_size=15))
@example(b"x\rUid:\t0\t0")
@example(b"a b")
def test_processes_with_any_names_are_parsed(name: bytes) -> None:
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")  # as proc_task_name() does
    told = proc.status(b"Name:\t%s\nUmask:\t0022\nUid:\t7\t8\t9\t10\nGroups:\t\n" % escaped)
    assert told == {
        "Name": [os.fsdecode(escaped)], "Umask": ["0022"], "Uid": ["7", "8", "9", "10"],
        "Groups": [],
    }  # fmt: skip
    fields = proc.stat_fields(b"41 (%s) S 1 2 3\n" % name)
    assert fields == [b"S", b"1", b"2", b"3"]


@given(st.binary())
def test_any_bytes_are_parsed_without_an_error(data: bytes) -> None:
    """Entries in another form are skipped."""
    table = proc.Mounts(data)
    for mount in table:
        proc.unescaped(mount.root)
    table.find(b"1")
    table.has_device(b"0:1")
    table.has_group(b"shared:1")
    list(table.without(table.below(b"1"), b"0:1").as_copied())
    proc.cgroups(data)
    proc.status(data)
    proc.stat_fields(data)
    proc.words(data)


def test_malformed_mount_and_cgroup_lines_are_ignored() -> None:
    table = proc.Mounts(b"short\n1 2 0:3 / /a rw\nx 2 0:3 / / rw - a b c\n1 2 3 / / rw - a b c\n")
    assert list(table) == []
    assert table.find(b"1") is None
    assert proc.cgroups(b"nonsense\n0:/x\nx::/y\n1:cpu:relative\n:::\n") == {}


def test_only_the_escapes_of_mountinfo_are_decoded() -> None:
    assert proc.unescaped(rb"/a\040b\011c\012d\134e\043f") == "/a b\tc\nd\\e#f"
    assert proc.unescaped(rb"/a\015b\100c\04") == r"/a\015b\100c\04"


@pytest.mark.protects(
    "source-is-no-device",
    "a mount's source isn't mistaken for its device number",
    instead="return any(True for head in self._before(device))",
)
def test_a_user_chosen_mount_source_is_not_parsed_as_a_device() -> None:
    """The source of a user's FUSE mount may look like a device number or a peer group."""
    table = proc.Mounts(b"7 1 0:50 / /a rw master:3 - fuse 0:9 rw\n8 1 0:51 / /b rw - fuse  rw\n")
    assert not table.has_device(b"0:9")
    assert table.has_device(b"0:50")
    named = proc.Mounts(b"7 1 0:50 / /a rw master:3 - fuse shared:9 rw\n")
    assert not named.has_group(b"shared:9")
    assert named.as_copied().has_group(b"shared:3")
    assert [mount.source for mount in table] == [b"0:9", b""]


def test_id_maps_are_parsed() -> None:
    assert proc.id_map(b"         0       1000          1\n         1     100000      65536\n") == [
        (0, 1000, 1), (1, 100000, 65536),
    ]  # fmt: skip


def test_a_file_is_not_read_without_bound(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(b"x" * 100)
    folder = os.open(tmp_path, os.O_PATH)
    try:
        assert proc.read("table", folder, 100) == b"x" * 100
        with pytest.raises(OSError, match="larger than 99 bytes"):
            proc.read("table", folder, 99)
    finally:
        os.close(folder)


def test_our_own_proc_files_are_parsed_correctly() -> None:
    """The kernel reports the same facts in other files."""
    mounts = list(proc.Mounts(proc.read("/proc/self/mountinfo")))
    told = Path("/proc/self/mounts").read_bytes().split(b"\n")[:-1]
    assert [mount.point for mount in mounts] == [each.split(b" ")[1] for each in told]
    status = proc.status(proc.read("/proc/self/status"))
    assert status["Pid"] == [str(os.getpid())]
    assert int(proc.stat_fields(proc.read("/proc/self/stat"))[1]) == os.getppid()


# Namespaces -----------------------------------------------------------------------------------


def test_each_mount_namespace_is_read_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        other.stdout.readline()
        look = NamespaceScan(600)
        ours = look.namespaces()[os.readlink("/proc/self/ns/mnt")]
        assert {str(os.getpid()), str(other.pid)} <= {*ours}
        assert ours == sorted(ours, key=int)
        assert look.is_whole
        lines = (look.table(str(other.pid)) or b"").splitlines()
        assert b"/" in [line.split()[4] for line in lines]
        other.communicate(b"\n")
    assert look.table(str(other.pid)) is None
    assert look.is_whole


def test_no_namespaces_are_read_after_the_time_limit() -> None:
    look = NamespaceScan(0)
    assert look.is_whole
    assert look.namespaces() == {}
    assert not look.is_whole


def test_a_mount_table_that_is_too_long_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_MAX_TABLE", 10)
    look = NamespaceScan(600)
    assert look.table("self") == b""
    assert not look.is_whole


# The kernel's events --------------------------------------------------------------------------


def test_a_kernel_event_is_parsed() -> None:
    data = b"add@/module/nvidia\0ACTION=add\0DEVPATH=/module/nvidia\0SUBSYSTEM=module\0A=b=c\0"
    [event] = parse(data)
    assert event == {
        "ACTION": "add",
        "DEVPATH": "/module/nvidia",
        "SUBSYSTEM": "module",
        "A": "b=c",
    }


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes_of_a_kernel_event_are_parsed(data: bytes) -> None:
    [event] = parse(data)
    assert all(isinstance(each, str) for pair in event.items() for each in pair)


def test_reading_kernel_events_does_not_block() -> None:
    events = KernelEvents(listen())
    try:
        assert isinstance([*events.read()], list)
        assert events.fileno() >= 0
    finally:
        events.close()


def _status(parent: int, *ids: int) -> bytes:
    return f"Name:\tx\nPPid:\t{parent}\nNSpid:\t{' '.join(map(str, ids))}\n".encode()


@pytest.mark.parametrize(
    ("known", "owner"),
    [
        ({"self": _status(7, 12)}, "self"),
        # A hook in its container's pid namespace, with the /proc of the parent namespace.
        ({"self": _status(11, 12, 3), "11": _status(7, 11, 1), "7": _status(1, 7)}, "7"),
        ({"self": b"Name:\tx\nPPid:\t7\n"}, "self"),  # a kernel that reports no NSpid
        ({}, ""),  # a /proc without this process
    ],
)
def test_the_pid_namespace_of_the_mounted_proc_is_found(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, bytes], owner: str
) -> None:
    def read(path: str) -> bytes:
        if (entry := path.split("/")[2]) not in known:
            raise FileNotFoundError(path)
        return known[entry]

    def stat(path: str) -> SimpleNamespace:
        if not known:
            raise FileNotFoundError(path)
        return SimpleNamespace(st_ino=4711 if path == f"/proc/{owner}/ns/pid" else 4712)

    monkeypatch.setattr(proc, "read", read)
    monkeypatch.setattr(proc, "os", SimpleNamespace(stat=stat, fsdecode=os.fsdecode))
    assert proc.pids() == (4711 if owner else 0)


def test_the_initial_pid_namespace_is_recognised_without_a_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is visible in /proc, so no status is read."""
    first = SimpleNamespace(st_ino=proc.FIRST_PIDS)
    monkeypatch.setattr(proc, "os", SimpleNamespace(stat=lambda _: first))
    monkeypatch.delattr(proc, "read")
    assert proc.pids() == proc.FIRST_PIDS
