"""Volumes, shared mounts and leftovers in images, with the host's folders unchanged.

Each protection is also removed, and the harm that it prevents must then appear.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.commands import run
from harness.sandbox import (
    MS_BIND,
    MS_NODEV,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REMOUNT,
    MS_SHARED,
    Volume,
    contents,
    mount,
    sandbox,
    see_drivers,
)
from harness.snapshot import mount_table

from gpuhook.base.container import kernel, mounts
from gpuhook.base.errors import InjectError, VolumeError
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.plan.operations import (
    FILE_OPTIONS,
    BindDevice,
    BindFile,
    Operation,
    Symlink,
    UpdateLdCache,
)
from gpuhook.vendors.nvidia.own_files import MaskProc

LIBRARY = "libcuda.so.1.2.3"
FOLDER = "/usr/lib/x86_64-linux-gnu"
CACHE = UpdateLdCache((("libcuda.so.1", f"{FOLDER}/libcuda.so.1", 0x303),), "test")
LINK = Symlink(f"{FOLDER}/libcuda.so.1", LIBRARY, replace=True, reason="test")


@pytest.fixture
def driver(tmp_path: Path, workspace: Path) -> Path:
    root = tmp_path / "driver"
    for path in (f"usr/lib/{LIBRARY}", "run/daemon/socket"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("the driver's")
    (root / "dev").mkdir()
    os.mknod(root / "dev/nvidia0", 0o20666, os.makedev(195, 0))
    return root


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = tmp_path / "rootfs"
    for folder in ("dev", "etc", "run", "proc", FOLDER.lstrip("/")):
        (root / folder).mkdir(parents=True)
    return root


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


def make_private(root: Path) -> None:
    """Mount a root on itself without peers, as Docker mounts a container's root."""
    mount(root, root, "", MS_BIND)
    mount("", root, "", MS_PRIVATE)


def unmount(path: Path) -> None:
    run(["umount", path]).ok()


def library(driver: Path) -> Operation:
    return BindFile(str(driver), f"/usr/lib/{LIBRARY}", f"{FOLDER}/{LIBRARY}", FILE_OPTIONS, "test")


def device(driver: Path) -> Operation:
    return BindDevice(str(driver), DeviceNode("/dev/nvidia0", 195, 0), "test")


def socket(driver: Path) -> Operation:
    return BindFile(str(driver), "/run/daemon/socket", "/run/daemon/socket", FILE_OPTIONS, "test")


def no_volumes() -> None:
    """Remove a protection: treat volumes as the container's own folders."""
    judge = mounts.Boundary._judge

    def judged(self: mounts.Boundary, mount: bytes) -> mounts.MountPermissions:
        return mounts.MountPermissions(own=True, shared=judge(self, mount).shared)

    mounts.Boundary._judge = judged  # type: ignore[method-assign]


def no_sharing() -> None:
    """Remove a protection: also mount where the host sees it."""
    judge = mounts.Boundary._judge

    def judged(self: mounts.Boundary, mount: bytes) -> mounts.MountPermissions:
        return mounts.MountPermissions(own=judge(self, mount).own, shared=False)

    mounts.Boundary._judge = judged  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("place", "step"),
    [(FOLDER, library), (FOLDER, lambda _: LINK), ("/dev", device), ("/usr", library)],
)
def test_nothing_is_made_in_a_volume(
    driver: Path,
    image: Path,
    volume: Path,
    place: str,
    step: Callable[[Path], Operation],
) -> None:
    with sandbox(image, [Volume(volume, place)]) as box:
        operation = step(driver)
        if operation.optional:  # a link
            [skipped] = box.inject([operation])
            assert "would have to be made in a volume" in skipped
        else:
            with pytest.raises(VolumeError, match="volume"):
                box.inject([operation])
        assert contents(volume).keys() == {"."}
        box.inject([step(driver)], no_volumes)
        assert contents(volume).keys() != {"."}


def test_a_volume_over_etc_keeps_the_hosts_cache(driver: Path, image: Path, volume: Path) -> None:
    cache = volume / "ld.so.cache"
    cache.touch()
    with sandbox(image, [Volume(volume, "/etc")]) as box:
        box.inject([CACHE])
        assert "libcuda.so.1" in box.read("/etc/ld.so.cache")
        assert cache.read_bytes() == b""
    with sandbox(image, [Volume(volume, "/etc")]) as box:
        box.inject([CACHE], no_volumes)
        assert cache.read_bytes() != b""


@pytest.mark.protects(
    "cache-covered",
    "a read-only or mounted ld.so.cache is covered by a mount",
    instead='_CANT_REPLACE: "Final" = ()',
)
def test_a_cache_that_is_a_volume_is_covered_and_unchanged(
    driver: Path, image: Path, volume: Path
) -> None:
    cache = volume / "ld.so.cache"
    cache.touch()
    (image / "etc/ld.so.cache").touch()
    with sandbox(image, [Volume(cache, "/etc/ld.so.cache")]) as box:
        box.inject([CACHE])
        assert "libcuda.so.1" in box.read("/etc/ld.so.cache")
    assert cache.read_bytes() == b""


def test_a_volume_over_etc_without_a_cache_gets_none(
    driver: Path, image: Path, volume: Path
) -> None:
    with sandbox(image, [Volume(volume, "/etc")]) as box:
        [skipped] = box.inject([CACHE])
    assert "volume" in skipped
    assert contents(volume).keys() == {"."}


@pytest.mark.protects(
    "own-file", "a volume's file that already is the driver's file is left unchanged"
)
@pytest.mark.parametrize("propagation", [MS_PRIVATE, MS_SHARED], ids=["private", "shared"])
def test_the_hosts_folders_as_volumes_need_no_mounts(
    driver: Path, image: Path, propagation: int
) -> None:
    """With ``-v /usr/lib:/usr/lib -v /dev:/dev``, for example, all files are already present."""
    volumes = [
        Volume(driver / "usr/lib", FOLDER, propagation),
        Volume(driver / "dev", "/dev", propagation),
    ]
    make_private(image)
    before = contents(driver), mount_table()
    with sandbox(image, volumes, MS_SHARED) as box:
        table = box.mounts()
        box.inject([library(driver), device(driver)])
        assert mount_table(box.mounts()) == mount_table(table)
    assert (contents(driver), mount_table()) == before
    unmount(image)


def test_another_version_in_a_volume_is_covered(driver: Path, image: Path, volume: Path) -> None:
    (volume / LIBRARY).write_text("another")
    (volume / "libcuda.so.1").symlink_to(LIBRARY)
    before = contents(volume)
    with sandbox(image, [Volume(volume, FOLDER)]) as box:
        box.inject([library(driver), LINK])
        assert box.read(f"{FOLDER}/{LIBRARY}") == "the driver's"
    assert contents(volume) == before


def test_a_socket_in_a_volume_is_skipped(driver: Path, image: Path, volume: Path) -> None:
    with sandbox(image, [Volume(volume, "/run")]) as box:
        [skipped] = box.inject([socket(driver)])
    assert "/run/daemon/socket" in skipped
    assert contents(volume).keys() == {"."}


@pytest.mark.protects(
    "own-or-volume",
    "a tmpfs that was mounted for the container can be written to",
    instead="own = False",
)
def test_a_tmpfs_of_the_container_can_be_written_to(driver: Path, image: Path) -> None:
    def prepare() -> None:
        mount("tmpfs", image / "run", "tmpfs", 0)

    with sandbox(image, prepare=prepare) as box:
        assert box.inject([socket(driver)]) == []
        assert box.read("/run/daemon/socket") == "the driver's"
    assert list((image / "run").iterdir()) == []


@pytest.mark.protects(
    "own-or-volume",
    "a tmpfs of the host counts as a volume and isn't written to",
    instead="own = True",
)
def test_a_tmpfs_of_the_host_is_refused_as_a_volume(
    driver: Path, image: Path, volume: Path
) -> None:
    mount("tmpfs", volume, "tmpfs", 0)
    with sandbox(image, [Volume(volume, FOLDER)]) as box, pytest.raises(VolumeError):
        box.inject([library(driver)])
    assert list(volume.iterdir()) == []
    unmount(volume)


def leak(driver: Path, image: Path, **options: object) -> None:
    """Assert that a shared mount is refused, and that it would leak if it weren't."""
    with sandbox(image, **options) as box:  # type: ignore[arg-type]
        before, inside = mount_table(), mount_table(box.mounts())
        with pytest.raises(InjectError, match="shared with the host"):
            box.inject([library(driver)])
        assert mount_table() == before
        assert mount_table(box.mounts()) == inside
        box.inject([library(driver)], no_sharing)
        assert mount_table() != before


def test_a_shared_root_is_refused(driver: Path, image: Path) -> None:
    leak(driver, image, propagation=MS_SHARED)
    run(["umount", "-R", image]).ok()


def test_a_shared_volume_is_refused(driver: Path, image: Path, volume: Path) -> None:
    (volume / LIBRARY).write_text("another")
    make_private(image)
    volumes = [Volume(volume, FOLDER, MS_SHARED)]
    leak(driver, image, volumes=volumes, propagation=MS_SHARED)
    unmount(volume / LIBRARY)
    unmount(image)


def test_a_root_with_shared_propagation_and_no_peers_works(driver: Path, image: Path) -> None:
    """Docker does this for ``-v /x:/x:rshared``: its root is a mount private to the host."""
    make_private(image)
    before = mount_table()
    with sandbox(image, propagation=MS_SHARED) as box:
        box.inject([library(driver)])
        assert box.read(f"{FOLDER}/{LIBRARY}") == "the driver's"
        assert mount_table() == before
    unmount(image)


def read_only(root: Path) -> Callable[[], None]:
    return lambda: mount("", root, "", MS_BIND | MS_REMOUNT | MS_RDONLY)


@pytest.mark.protects(
    "cache-covered",
    "a read-only or mounted ld.so.cache is covered by a mount",
    instead='_CANT_REPLACE: "Final" = ()',
)
def test_a_read_only_root_without_mount_points_is_refused(driver: Path, image: Path) -> None:
    with (
        sandbox(image, prepare=read_only(image)) as box,
        pytest.raises(InjectError, match="Read-only file system") as caught,
    ):
        box.inject([library(driver)])
    assert "writable" in caught.value.remedy


@pytest.mark.protects(
    "cache-covered",
    "a read-only or mounted ld.so.cache is covered by a mount",
    instead='_CANT_REPLACE: "Final" = ()',
)
def test_a_read_only_root_with_mount_points_gets_the_driver(driver: Path, image: Path) -> None:
    for path in (f"{FOLDER}/{LIBRARY}", "/etc/ld.so.cache"):
        (image / path.lstrip("/")).touch()
    (image / f"{FOLDER}/libcuda.so.1".lstrip("/")).symlink_to(LIBRARY)
    before = contents(image)
    with sandbox(image, prepare=read_only(image)) as box:
        box.inject([library(driver), LINK, CACHE])
        assert box.read(f"{FOLDER}/libcuda.so.1") == "the driver's"
        assert "libcuda.so.1" in box.read("/etc/ld.so.cache")
    assert contents(image) == before


def both(folder: Path) -> None:
    (folder / LIBRARY).symlink_to("libcuda.so.1")
    (folder / "libcuda.so.1").write_text("image's")


def killed(folder: Path) -> None:
    (folder / ".libcuda.so.1.gpuhook").symlink_to("x")
    (folder / "libcuda.so.1").symlink_to("libcuda.so.9")


LEFTOVERS: dict[str, Callable[[Path], object]] = {
    "nothing": str,
    "empty file": lambda folder: (folder / LIBRARY).touch(),
    "full file": lambda folder: (folder / LIBRARY).write_text("of another driver"),
    "link to another version": lambda folder: os.symlink("libcuda.so.9", folder / "libcuda.so.1"),
    "absolute link": lambda folder: os.symlink("/opt/libcuda.so.9", folder / "libcuda.so.1"),
    "library named as its SONAME": lambda folder: (folder / "libcuda.so.1").write_text("image's"),
    "dangling link": lambda folder: os.symlink("/opt/not/there", folder / LIBRARY),
    "link to the SONAME": both,
    "a named pipe": lambda folder: os.mkfifo(folder / LIBRARY),
    "left by a killed run": killed,
}


@pytest.mark.protects("leftover-file", "temporary files of a killed run are removed")
@pytest.mark.protects(
    "soname-covered",
    "an image's file at the name of a SONAME link is covered by the driver's library",
)
@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_leftovers_in_an_image_are_replaced_or_covered(
    driver: Path, image: Path, leftover: str
) -> None:
    LEFTOVERS[leftover](image / FOLDER.lstrip("/"))
    with sandbox(image) as box:
        box.inject([library(driver), LINK, CACHE])
        for name in (LIBRARY, "libcuda.so.1"):
            assert box.read(f"{FOLDER}/{name}") == "the driver's"
        assert not list((image / "usr").rglob(".*.gpuhook"))


@pytest.mark.protects("folder-for-file", "a folder at the path of a file is refused")
@pytest.mark.parametrize("name", [LIBRARY, "libcuda.so.1"])
def test_a_folder_at_a_files_path_is_refused_and_named(
    driver: Path, image: Path, name: str
) -> None:
    (image / FOLDER.lstrip("/") / name).mkdir()
    before = contents(image)
    with sandbox(image) as box, pytest.raises(InjectError) as caught:
        box.inject([library(driver), LINK])
    assert f"the image has a folder at {FOLDER}/{name}" in caught.value.cause
    assert contents(image) == before


@pytest.mark.parametrize("merged", [True, False])
def test_firmware_is_mounted_with_and_without_merged_usr(
    driver: Path, image: Path, merged: bool
) -> None:
    if merged:
        (image / "lib").symlink_to("usr/lib")
    else:
        (image / "lib").mkdir()
    firmware = "/lib/firmware/nvidia/1.2.3/gsp.bin"
    with sandbox(image) as box:
        step = BindFile(str(driver), f"/usr/lib/{LIBRARY}", firmware, FILE_OPTIONS, "test")
        box.inject([step])
        place = f"/usr{firmware}" if merged else firmware
        assert box.read(place) == "the driver's"


@pytest.mark.protects(
    "label-kept", "a replaced file keeps its SELinux label where labels can be set"
)
def test_a_replaced_cache_keeps_its_label_owner_and_mode(driver: Path, image: Path) -> None:
    cache = image / "etc/ld.so.cache"
    cache.touch()
    label = b"system_u:object_r:ld_so_cache_t:s0\0"
    os.setxattr(cache, "security.selinux", label)
    with sandbox(image) as box:
        box.inject([CACHE])
    assert cache.stat().st_size > 0
    assert os.getxattr(cache, "security.selinux") == label


@pytest.mark.protects(
    "label-kept", "a replaced file keeps its SELinux label where labels can be set"
)
def test_a_cache_is_written_where_no_label_can_be_set(
    driver: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On podman's mounts with SELinux (context=), no label can be set.

    The test simulates this without SELinux.
    """

    def refuse(fd: int, label: bytes) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    cache = image / "etc/ld.so.cache"
    cache.touch()
    monkeypatch.setattr(os, "getxattr", lambda *_: b"system_u:object_r:container_file_t:s0\0")
    monkeypatch.setattr(kernel, "set_label", refuse)
    with sandbox(image) as box:
        box.inject([CACHE])
    assert cache.stat().st_size > 0


@pytest.mark.protects(
    "nodev-cleared",
    "a device node can be opened even if its host filesystem is mounted with nodev",
    instead="cleared = 0",
)
def test_a_node_from_a_nodev_filesystem_can_be_opened(driver: Path, image: Path) -> None:
    """/run and /tmp are often mounted nodev, but the container must be able to open the node."""
    mount("tmpfs", driver / "dev", "tmpfs", MS_NODEV)
    os.mknod(driver / "dev/nvidia0", 0o20666, os.makedev(195, 0))
    with sandbox(image) as box:
        box.inject([device(driver)])
        with pytest.raises(OSError, match="No such device or address"):
            box.read("/dev/nvidia0")
    unmount(driver / "dev")


@pytest.mark.protects(
    "modify-device-files",
    "ModifyDeviceFiles is switched off in the driver parameters that containers see",
    instead='_KEEPS = b"ModifyDeviceFiles: 1"',
)
@pytest.mark.protects("proc-read-only", "the masked /proc/driver/nvidia is read-only")
def test_a_shared_proc_shows_only_selected_gpus_and_is_unchanged(
    driver: Path, image: Path, tmp_path: Path
) -> None:
    """The masked folder shows only selected GPUs, is read-only and belongs to this container."""
    proc = driver / "proc/driver/nvidia"
    gpus = [proc / f"gpus/0000:{bus}:00.0/information" for bus in ("1b", "43")]
    mig = [proc / f"capabilities/gpu0/mig/gi{gi}/access" for gi in (1, 2)]
    for path in (*gpus, *mig):
        path.parent.mkdir(parents=True)
        path.write_text("facts")
    (proc / "params").write_text("ModifyDeviceFiles: 1\nDeviceFileMode: 438\n")
    (proc / "version").write_text("1.2.3")
    place = image / "proc/driver/nvidia"
    binds = ("gpus/0000:1b:00.0", "capabilities/gpu0/mig/gi1/access")
    step = MaskProc(str(driver), ("params", "version", "registry"), binds, "test")

    def prepare() -> None:
        mount("tmpfs", image / "proc", "tmpfs", 0)
        (place / "gpus/0000:43:00.0").mkdir(parents=True)
        (place / "params").write_text("ModifyDeviceFiles: 1")

    before = contents(driver), contents(image), mount_table()
    with sandbox(image, prepare=prepare) as box:
        box.inject([step], lambda: see_drivers("nvidia"))
        shown = contents(box.inside("/proc/driver/nvidia"))
        assert {path for path, found in shown.items() if found[-1]} == {
            "params",
            "version",
            "gpus/0000:1b:00.0/information",
            "capabilities/gpu0/mig/gi1/access",
        }
        assert shown["params"][-1] == b"ModifyDeviceFiles: 0\nDeviceFileMode: 438\n"
        for name in ("params", "new", "gpus/0000:1b:00.0/information"):
            with pytest.raises(OSError, match="Read-only"):
                os.open(box.inside(f"/proc/driver/nvidia/{name}"), os.O_WRONLY | os.O_CREAT)
        assert (contents(driver), contents(image), mount_table()) == before


def test_proc_is_not_masked_where_the_kernel_has_no_driver(driver: Path, image: Path) -> None:
    """The image's own file at that path shows nothing about the host."""
    (image / "proc/driver/nvidia").mkdir(parents=True)
    step = MaskProc(str(driver), ("version",), (), "test")
    with sandbox(image) as box:
        before = box.mounts()
        box.inject([step], lambda: see_drivers("rtc"))
        assert box.mounts() == before
        box.inject([step], lambda: see_drivers("nvidia"))
        assert box.mounts() != before
