"""Properties of a mount in the mount tables of a host and a container."""

import os
from pathlib import Path

import pytest

from gpuhook.base.container import mounts
from gpuhook.base.host import proc

HOST = """\
24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
25 24 0:5 / /dev rw,nosuid shared:2 - devtmpfs devtmpfs rw
90 24 0:70 / /var/lib/docker/overlay2/x/merged rw - overlay overlay rw
"""

CONTAINER = """\
124 99 8:1 / / rw,relatime master:1 - ext4 /dev/sda1 rw
195 190 0:82 / /var/lib/docker/overlay2/x/merged/dev/shm rw shared:78 - tmpfs tmpfs rw
125 124 0:5 / /dev rw,nosuid master:2 - devtmpfs devtmpfs rw
190 124 0:70 / /var/lib/docker/overlay2/x/merged rw - overlay overlay rw
191 190 0:81 / /var/lib/docker/overlay2/x/merged/dev rw - tmpfs tmpfs rw
192 190 8:1 /srv/volume /var/lib/docker/overlay2/x/merged/data rw shared:1 - ext4 /dev/sda1 rw
193 190 8:1 /srv/other /var/lib/docker/overlay2/x/merged/own rw shared:77 - ext4 /dev/sda1 rw
194 190 0:5 / /var/lib/docker/overlay2/x/merged/host\\040dev rw master:2 - devtmpfs devtmpfs rw
"""


@pytest.fixture(params=["by both tables", "inside"])
def boundary(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> mounts.Boundary:
    """The boundary between both mount tables; mount ids are passed instead of descriptors.

    Inside, only the container's table exists, with its copies of the host's mounts.
    """
    inside = request.param == "inside"
    (tmp_path / "mountinfo").write_text(CONTAINER)
    (tmp_path / "host").write_text(CONTAINER if inside else HOST)
    made = mounts.Boundary.__new__(mounts.Boundary)
    made._inside = inside
    made._host = os.open(tmp_path / "host", os.O_RDONLY)
    made._container = os.open(tmp_path / "mountinfo", os.O_RDONLY)
    made._root = b"190"
    made._host_table, made._table, made._known = None, proc.Mounts(b""), {}
    monkeypatch.setattr(mounts, "mount_id", lambda fd: str(fd).encode())
    return made


@pytest.mark.protects(
    "shared-masters",
    "a mount in the master peer group of a host mount's copy counts as shared",
    instead="return Mounts(self._text[1:])",
    only="inside and verdicts",
)
@pytest.mark.parametrize(
    ("mount", "own", "shared"),
    [
        (190, True, False),  # the root itself, though the host has its filesystem mounted, too
        (191, True, False),  # a tmpfs that the runtime made
        (192, False, True),  # a volume whose peer is the host's root
        (193, False, False),  # a volume without a peer on the host
        (194, False, False),  # the host's /dev, which receives the host's mounts, not vice versa
        (195, True, False),  # the runtime's, without a peer on the host
        (19, False, False),  # no mount: 19 is only the beginning of other numbers
        (999, False, False),
    ],
)
def test_verdicts_tell_own_from_shared_mounts(
    boundary: mounts.Boundary, mount: int, own: bool, shared: bool
) -> None:
    verdict = boundary.verdict(mount)
    assert (verdict.own, verdict.shared) == (own, shared)
    assert boundary.verdict(mount) is verdict
    boundary.close()


def test_mounts_made_later_are_noticed(boundary: mounts.Boundary, tmp_path: Path) -> None:
    assert not boundary.verdict(300).own
    assert boundary.verdict(190).own
    with (tmp_path / "mountinfo").open("a") as table:
        table.write("301 190 0:99 / /merged/run rw - tmpfs tmpfs rw\n")
    assert boundary.verdict(301).own
    boundary.close()


APPTAINER = """\
24 1 8:1 / / rw,relatime master:1 - ext4 /dev/sda1 rw
25 24 0:66 / /srv/job rw,relatime master:3 - tmpfs tmpfs rw
200 24 0:57 / /session rw,nosuid master:80 - tmpfs tmpfs rw
190 200 0:58 / /session/final rw,nodev - overlay overlay rw
191 190 0:57 /dev /session/final/dev rw,nosuid master:80 - tmpfs tmpfs rw
192 190 8:1 /srv /session/final/data rw,nosuid master:1 - ext4 /dev/sda1 rw
193 190 0:66 / /session/final/job rw,nosuid master:3 - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("tables", "mount", "own"),
    [
        ([HOST], True, {190, 191}),
        ([HOST, "9 1 0:57 / /session rw - tmpfs tmpfs rw\n"], True, {190}),  # the host has it, too
        ([HOST, APPTAINER], True, {190}),  # this is the host's namespace
        ([HOST], False, {190}),  # the root is a folder among the host's mounts
        ([], True, {190}),  # the host's mounts are unknown
    ],
)
def test_the_roots_filesystem_is_own_unless_mounted_elsewhere(
    boundary: mounts.Boundary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tables: list[str],
    mount: bool,
    own: set[int],
) -> None:
    for name in ("mountinfo", "host"):
        (tmp_path / name).write_text(APPTAINER)
    boundary._inside = False
    monkeypatch.setattr(mounts, "is_mount", lambda folder: mount)
    boundary.adopt(190, [table.encode() for table in tables])
    assert {each for each in (190, 191, 192, 193) if boundary.verdict(each).own} == own
    boundary.close()


def test_the_root_of_a_mount_is_recognized() -> None:
    for path, expected in (("/proc", True), ("/proc/self", False), ("/", False)):
        folder = os.open(path, os.O_PATH)
        assert mounts.is_mount(folder) == expected
        os.close(folder)


def test_mounts_below_a_mount_are_found_in_any_table_order() -> None:
    """Newer kernels sort a mount table by other numbers."""
    lines = CONTAINER.encode().splitlines(keepends=True)
    for table in (proc.Mounts(b"".join(lines)), proc.Mounts(b"".join(reversed(lines)))):
        found = {b"190", b"191", b"192", b"193", b"194", b"195"}
        assert table.below(b"190") == found
        assert table.below(b"191") == {b"191"}
        assert table.below(b"7") == {b"7"}
        assert {mount.id for mount in mounts.outside(table, b"190")} == {b"124", b"125"}


def test_a_mount_id_matches_fdinfo() -> None:
    """The kernel reports the same id in fdinfo."""
    fd = os.open("/proc", os.O_PATH)
    try:
        told = Path(f"/proc/self/fdinfo/{fd}").read_text().split()
        assert mounts.mount_id(fd).decode() == told[told.index("mnt_id:") + 1]
    finally:
        os.close(fd)


FOLDER = """\
24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
25 24 0:5 / /dev rw shared:2 - devtmpfs devtmpfs rw
191 24 0:81 / /srv/root/dev rw - tmpfs tmpfs rw
192 24 8:1 /home /srv/root/home rw shared:1 - ext4 /dev/sda1 rw
193 24 0:5 / /srv/root/a\\040b rw shared:2 - devtmpfs devtmpfs rw
194 24 0:90 / /srv/root2 rw - tmpfs tmpfs rw
195 24 0:90 / /srv/root/more rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("mount", "own", "shared"),
    [
        (24, True, False),  # the mount of the folder itself, which is the host's
        (191, True, False),  # mounted only in the folder
        (192, False, True),  # a folder of the host
        (193, False, True),  # the same, at a path with a blank
        (195, False, False),  # also mounted outside the folder
    ],
)
def test_mounts_below_a_plain_folder_are_own_unless_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: int, own: bool, shared: bool
) -> None:
    (tmp_path / "mountinfo").write_text(FOLDER)
    made = mounts.Boundary.__new__(mounts.Boundary)
    made._inside = True
    made._host = made._container = os.open(tmp_path / "mountinfo", os.O_RDONLY)
    made._root = b"24"
    made._host_table, made._table, made._known = None, proc.Mounts(b""), {}
    monkeypatch.setattr(mounts, "mount_id", lambda fd: str(fd).encode())
    made.settle("/srv/root", [])
    assert made.verdict(mount) == mounts.MountPermissions(own, shared)
    assert made.mounted("/srv/root") == ["/dev", "/home", "/a b", "/more"]
    made._known.clear()
    made.settle("/srv/root", [HOST.encode(), b"99 1 0:81 / /x rw - tmpfs tmpfs rw\n"])
    assert made.verdict(191) == mounts.MountPermissions(False, False), "another has that filesystem"
    assert made.verdict(24) == mounts.MountPermissions(True, True), (
        "what is mounted there is seen elsewhere"
    )
    os.close(made._host)
