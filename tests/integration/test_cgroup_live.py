"""Devices allowed in live v1 and v2 cgroups, without any others."""

import os
import stat
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import pids
from harness.commands import Result
from harness.namespaces import Namespace, namespace

from gpuhook.base.cgroup import access, bpf, v2
from gpuhook.base.cgroup import device_program as program
from gpuhook.base.errors import CgroupError

MAJOR = 195
GIVEN, REFUSED = [(MAJOR, 0), (MAJOR, 255)], [(MAJOR, 1), (MAJOR, 2)]

# enum bpf_cmd and constants that only tests need (linux/bpf.h).
BPF_MAP_CREATE, BPF_LINK_CREATE = 0, 28
BPF_MAP_TYPE_ARRAY = 2
BPF_PSEUDO_MAP_FD = 1
LOAD_IMM_64 = 0x18
SINGLE, OVERRIDE, MULTI = 0, 1, 2

VERDICT = [program.instruction(program.SET_32, 0, imm=n) for n in (0, 1)]
DENY, PERMIT = (verdict + program.instruction(program.EXIT) for verdict in VERDICT)

OPENER = """
import errno, os, sys
for line in sys.stdin:
    try:
        os.close(os.open(line.strip(), os.O_RDWR | os.O_NONBLOCK))
        print("OK", flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""

STUBBORN_OPENER = """
import errno, os, sys
print("ready", flush=True)
tries, unexpected = 0, 0
while not os.path.exists(sys.argv[2]):
    tries += 1
    try:
        os.close(os.open(sys.argv[1], os.O_RDWR))
        unexpected += 1
    except OSError as error:
        unexpected += error.errno != errno.EPERM
print(tries, unexpected)
"""

ALLOW = """
import os, sys
from gpuhook.base.cgroup import access
print(access.allow(os.open(f"/proc/{sys.argv[1]}", os.O_PATH), [(195, 0), (195, 255)]))
"""


def mount_point(kind: str, option: str) -> Path | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fstype, _source, options = right.split(" ")
        if fstype == kind and option in options.split(","):
            return Path(left.split(" ")[4])
    return None


class Opener:
    """A process that opens device nodes on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for major, minor in GIVEN + REFUSED:
            os.mknod(self.node(minor), stat.S_IFCHR | 0o666, os.makedev(major, minor))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", OPENER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        self.entry = os.open(f"/proc/{self.process.pid}", os.O_PATH)

    @property
    def pid(self) -> int:
        return self.process.pid

    def node(self, minor: int) -> Path:
        return self.folder / f"node{minor}"

    def opens(self, devices: list[tuple[int, int]]) -> set[str]:
        """Return the result of open() for the devices: ENXIO is a device without a driver."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        results = set()
        for _major, minor in devices:
            self.process.stdin.write(f"{self.node(minor)}\n")
            self.process.stdin.flush()
            results.add(self.process.stdout.readline().strip())
        return results

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        if self.entry >= 0:
            os.close(self.entry)
            self.entry = -1


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    made = Opener(tmp_path)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def new_cgroup(parent: Path, opener: Opener) -> Iterator[Path]:
    """Make a cgroup that contains the opener; remove it at the end."""
    folder = parent / f"gpuhook-test-{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(opener.pid))
        yield folder
    finally:
        opener.close()
        folder.rmdir()


@pytest.fixture
def v1_cgroup(opener: Opener) -> Iterator[Path]:
    parent = mount_point("cgroup", "devices")
    if parent is None:
        pytest.skip("this machine has no devices controller of cgroup v1")
    with new_cgroup(parent, opener) as folder:
        yield folder


@pytest.fixture
def v2_cgroup(opener: Opener) -> Iterator[Path]:
    parent = mount_point("cgroup2", "rw")
    if parent is None:
        pytest.skip("this machine has no cgroup v2 tree")
    with new_cgroup(parent, opener) as folder:
        yield folder


@pytest.fixture(scope="module")
def pure_v2() -> Iterator[Namespace]:
    with namespace("v2") as entered:
        yield entered


class Attached:
    """The device programs of one cgroup, as the kernel lists them."""

    def __init__(self, folder: Path) -> None:
        self.what = str(folder)
        self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def add(self, code: bytes, flags: int = MULTI) -> int:
        """Attach a program; return its id."""
        fd = bpf.load_program(code, False, self.what)
        try:
            before = set(self.ids)
            attr = bpf._attr("=IIII", self.fd, fd, bpf.BPF_CGROUP_DEVICE, flags)
            bpf._bpf(bpf.BPF_PROG_ATTACH, attr, self.what)
            return (set(self.ids) - before).pop()
        finally:
            os.close(fd)

    @property
    def ids(self) -> tuple[int, ...]:
        return bpf.attached_programs(self.fd, self.what)[1]

    @property
    def flags(self) -> int:
        return bpf.attached_programs(self.fd, self.what)[0]

    def code(self, number: int) -> bytes:
        fd = bpf.open_program(number, self.what)
        try:
            return bpf.describe_program(fd, self.what).instructions
        finally:
            os.close(fd)


@pytest.fixture
def attached(v2_cgroup: Path) -> Iterator[Attached]:
    made = Attached(v2_cgroup)
    yield made
    os.close(made.fd)


# v1.


def test_v1_gives_exactly_the_devices(v1_cgroup: Path, opener: Opener) -> None:
    assert opener.opens(GIVEN + REFUSED) == {"ENXIO"}
    (v1_cgroup / "devices.deny").write_text("a")
    assert opener.opens(GIVEN + REFUSED) == {"EPERM"}
    assert access.allow(opener.entry, GIVEN) == "v1"
    assert opener.opens(GIVEN) == {"ENXIO"}
    assert opener.opens(REFUSED) == {"EPERM"}
    listed = (v1_cgroup / "devices.list").read_text().splitlines()
    assert listed == ["c 195:0 rw", "c 195:255 rw"]
    assert access.allow(opener.entry, GIVEN) == "v1"
    assert (v1_cgroup / "devices.list").read_text().splitlines() == listed


def giving_to_one_that_has_ended(group: Path) -> None:
    """Allow devices by the open /proc entry of a process that exited and whose number is reused."""
    with pids.process() as number:
        entry = os.open(f"/proc/{number}", os.O_PATH)
    with pids.process_numbered(number):
        (group / "cgroup.procs").write_text(str(number))
        with pytest.raises(CgroupError, match="can't be found"):
            access.allow(entry, GIVEN)


@pytest.mark.protects(
    "cgroup-by-process",
    "a container's cgroup is found through a descriptor of its process, not by PID",
    instead=(
        'paths = _paths(_read(os.readlink(f"/proc/self/fd/{process}").split()[0] + "/cgroup"))'
    ),
)
def test_an_ended_process_is_given_no_devices(v1_cgroup: Path) -> None:
    """The process' number may be reused, and the new process' cgroup must get no devices."""
    (v1_cgroup / "devices.deny").write_text("a")
    pids.in_own_pid_namespace(lambda: giving_to_one_that_has_ended(v1_cgroup))
    assert (v1_cgroup / "devices.list").read_text() == ""


def test_a_refusing_v1_parent_is_named(v1_cgroup: Path, opener: Opener) -> None:
    (v1_cgroup / "devices.deny").write_text("c 195:255 rwm")
    child = v1_cgroup / "child"
    child.mkdir()
    try:
        (child / "cgroup.procs").write_text(str(opener.pid))
        (child / "devices.deny").write_text("a")
        with pytest.raises(CgroupError, match=rf"not permitted: '{child}/devices\.allow'"):
            access.allow(opener.entry, GIVEN)
    finally:
        (v1_cgroup / "cgroup.procs").write_text(str(opener.pid))
        child.rmdir()


def test_a_rootless_v1_caller_needs_no_change(v1_cgroup: Path, opener: Opener) -> None:
    (v1_cgroup / "devices.deny").write_text("a")
    argv = ["unshare", "-U", "-r", sys.executable, "-c", ALLOW, str(opener.pid)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none-needed:rootless"


# Tests with cgroup v2 that call the code as the hook does.


def allow_in(entered: Namespace, opener: Opener, *prefix: str) -> Result:
    return entered.run(*prefix, sys.executable, "-c", ALLOW, str(opener.pid))


def test_v2_gives_exactly_the_devices(
    attached: Attached, opener: Opener, pure_v2: Namespace
) -> None:
    attached.add(DENY)
    assert opener.opens(GIVEN + REFUSED) == {"EPERM"}
    assert allow_in(pure_v2, opener).ok().stdout == "v2\n"
    assert opener.opens(GIVEN) == {"ENXIO"}
    assert opener.opens(REFUSED) == {"EPERM"}
    assert len(attached.ids) == 1
    assert attached.flags == MULTI


def test_a_v2_cgroup_without_a_program_is_unchanged(
    attached: Attached, opener: Opener, pure_v2: Namespace
) -> None:
    assert allow_in(pure_v2, opener).ok().stdout == "none-needed:no-program\n"
    assert attached.ids == ()
    assert opener.opens(GIVEN + REFUSED) == {"ENXIO"}


def test_a_rootless_v2_caller_needs_no_change(
    attached: Attached, opener: Opener, pure_v2: Namespace
) -> None:
    attached.add(DENY)
    result = allow_in(pure_v2, opener, "unshare", "-U", "-r").ok()
    assert result.stdout == "none-needed:rootless\n"


# Tests with cgroup v2 that look at each attached program.


def test_every_program_is_extended(attached: Attached, v2_cgroup: Path, opener: Opener) -> None:
    for code in (DENY, program.allow_rules(REFUSED) + DENY, PERMIT):
        attached.add(code)
    assert opener.opens(GIVEN + REFUSED) == {"EPERM"}
    assert v2.extend(str(v2_cgroup), GIVEN) == 3
    assert opener.opens(GIVEN) == {"ENXIO"}
    assert opener.opens(REFUSED) == {"EPERM"}
    assert v2.extend(str(v2_cgroup), REFUSED[:1]) == 3
    assert opener.opens([*GIVEN, REFUSED[0]]) == {"ENXIO"}
    assert opener.opens(REFUSED[1:]) == {"EPERM"}


def test_the_old_instructions_follow_the_added_ones(attached: Attached, v2_cgroup: Path) -> None:
    attached.add(DENY)
    v2.extend(str(v2_cgroup), GIVEN)
    (number,) = attached.ids
    assert attached.code(number) == program.allow_rules(GIVEN) + DENY


def test_extending_twice_changes_nothing(attached: Attached, v2_cgroup: Path) -> None:
    attached.add(DENY)
    v2.extend(str(v2_cgroup), GIVEN)
    before = attached.ids
    assert v2.extend(str(v2_cgroup), GIVEN) == 1
    assert attached.ids == before


@pytest.mark.parametrize("flags", [SINGLE, OVERRIDE])
def test_a_single_attached_program_is_extended_and_keeps_its_flags(
    attached: Attached, v2_cgroup: Path, opener: Opener, flags: int
) -> None:
    attached.add(DENY, flags)
    assert v2.extend(str(v2_cgroup), GIVEN) == 1
    assert (attached.flags, len(attached.ids)) == (flags, 1)
    assert opener.opens(GIVEN) == {"ENXIO"}
    assert opener.opens(REFUSED) == {"EPERM"}


def test_a_program_held_by_a_link_is_extended(
    attached: Attached, v2_cgroup: Path, opener: Opener
) -> None:
    fd = bpf.load_program(DENY, False, attached.what)
    attr = bpf._attr("=IIII", fd, attached.fd, bpf.BPF_CGROUP_DEVICE, 0)
    link = bpf._bpf(BPF_LINK_CREATE, attr, attached.what)
    os.close(fd)
    try:
        attached.add(DENY)
        assert opener.opens(GIVEN + REFUSED) == {"EPERM"}
        assert v2.extend(str(v2_cgroup), GIVEN) == 2
        assert opener.opens(GIVEN) == {"ENXIO"}
        assert opener.opens(REFUSED) == {"EPERM"}
    finally:
        os.close(link)
    assert len(attached.ids) == 1


def test_a_program_with_maps_is_refused(attached: Attached, v2_cgroup: Path) -> None:
    attr = bpf._attr("=IIIII", BPF_MAP_TYPE_ARRAY, 4, 4, 1, 0)
    fd = bpf._bpf(BPF_MAP_CREATE, attr, attached.what)
    try:
        load = program.instruction(LOAD_IMM_64, 2, BPF_PSEUDO_MAP_FD, imm=fd) + bytes(8)
        number = attached.add(load + PERMIT)
    finally:
        os.close(fd)
    with pytest.raises(CgroupError, match="uses maps or is hidden"):
        v2.extend(str(v2_cgroup), GIVEN)
    assert attached.ids == (number,)


def test_verifier_message_is_included_in_the_error(v2_cgroup: Path) -> None:
    with pytest.raises(PermissionError, match=r"R0 !read_ok"):
        bpf.load_program(program.instruction(program.EXIT), False, str(v2_cgroup))


def test_devices_that_are_not_given_stay_closed_throughout(
    attached: Attached, v2_cgroup: Path, opener: Opener, tmp_path: Path
) -> None:
    attached.add(DENY)
    end = tmp_path / "end"
    argv = [sys.executable, "-I", "-S", "-c", STUBBORN_OPENER, str(opener.node(1)), str(end)]
    join = lambda: (v2_cgroup / "cgroup.procs").write_text(str(os.getpid()))  # noqa: E731
    stubborn = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=join)  # noqa: PLW1509
    assert stubborn.stdout is not None
    try:
        assert stubborn.stdout.readline() == "ready\n"
        for minor in range(3, 103):
            v2.extend(str(v2_cgroup), [(MAJOR, minor)])
        end.touch()
        tries, unexpected = stubborn.stdout.readline().split()
    finally:
        stubborn.kill()
        stubborn.communicate()
    assert int(tries) > 100
    assert unexpected == "0"


# Tests with cgroup v2 in which calls fail.

Attach = Callable[[int, int, int, int, str], None]


def test_a_failure_halfway_is_undone(
    attached: Attached, v2_cgroup: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [attached.add(DENY), attached.add(DENY)]
    calls: list[int] = []
    attach: Attach = bpf.attach_program

    def fail_second(cgroup_fd: int, fd: int, flags: int, replaces: int, what: str) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(22, "Invalid argument", what)
        attach(cgroup_fd, fd, flags, replaces, what)

    monkeypatch.setattr(bpf, "attach_program", fail_second)
    with pytest.raises(OSError, match="Invalid argument"):
        v2.extend(str(v2_cgroup), GIVEN)
    assert len(calls) == 3
    assert sorted(attached.ids) == sorted(before)
    assert opener.opens(GIVEN) == {"EPERM"}


def test_a_program_replaced_meanwhile_is_extended_again(
    attached: Attached, v2_cgroup: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached.add(DENY)
    attach: Attach = bpf.attach_program
    raced: list[int] = []

    def race(cgroup_fd: int, fd: int, flags: int, replaces: int, what: str) -> None:
        if not raced:
            other = bpf.load_program(program.allow_rules([(1, 3)]) + DENY, False, what)
            raced.append(other)
            attach(cgroup_fd, other, flags, replaces, what)
        attach(cgroup_fd, fd, flags, replaces, what)

    monkeypatch.setattr(bpf, "attach_program", race)
    try:
        assert v2.extend(str(v2_cgroup), GIVEN) == 1
    finally:
        for fd in raced:
            os.close(fd)
    (number,) = attached.ids
    expected = program.allow_rules(GIVEN) + program.allow_rules([(1, 3)]) + DENY
    assert attached.code(number) == expected
    assert opener.opens(GIVEN) == {"ENXIO"}


def test_a_constantly_replaced_program_causes_an_error(
    attached: Attached, v2_cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached.add(DENY)

    def gone(*args: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(bpf, "attach_program", gone)
    with pytest.raises(CgroupError, match="keep being replaced by another program"):
        v2.extend(str(v2_cgroup), GIVEN)


def test_no_descriptor_is_left_open(attached: Attached, v2_cgroup: Path) -> None:
    attached.add(DENY)
    before = os.listdir("/proc/self/fd")
    v2.extend(str(v2_cgroup), GIVEN)
    v2.extend(str(v2_cgroup), GIVEN)
    with suppress(OSError):
        v2.extend(f"{v2_cgroup}/absent", GIVEN)
    assert os.listdir("/proc/self/fd") == before


def test_the_bpf_info_structures_have_the_kernels_sizes() -> None:
    assert struct.calcsize(bpf.LINK_INFO) == 32
    assert struct.calcsize(bpf.PROG_INFO) == 88
