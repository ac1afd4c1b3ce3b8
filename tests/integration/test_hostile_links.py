"""Links in an image never lead out of it, even if they appear during an injection.

Each attack also runs without the protection, and must then work. Otherwise the test would
prove nothing.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.sandbox import contents, in_child, sandbox, see_drivers, unshare_mounts
from harness.snapshot import mount_table

from gpuhook import inject as injection
from gpuhook.base.container import kernel, mounts
from gpuhook.base.container.changes import ContainerRootfs
from gpuhook.base.errors import InjectError, VolumeError
from gpuhook.core.plan.operations import (
    FILE_OPTIONS,
    BindFile,
    Operation,
    Symlink,
    UpdateLdCache,
    WriteFile,
)
from gpuhook.vendors.nvidia.own_files import MaskProc

LIBRARY = "libcuda.so.1.2.3"
FOLDER = "/usr/lib/x86_64-linux-gnu"
FIRMWARE = "/lib/firmware/nvidia/1.2.3/gsp.bin"

# Every path that an injection changes, and each folder above it.
TARGETS = [
    "usr",
    "usr/lib",
    "usr/lib/x86_64-linux-gnu",
    f"usr/lib/x86_64-linux-gnu/{LIBRARY}",
    "usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "lib",
    "lib/firmware",
    "lib/firmware/nvidia",
    "lib/firmware/nvidia/1.2.3",
    "lib/firmware/nvidia/1.2.3/gsp.bin",
    "dev/nvidia0",
    "etc",
    "etc/ld.so.cache",
    "etc/ld.so.conf.d",
    "etc/ld.so.conf.d/00-compat.conf",
    "run",
    "run/nvidia-persistenced",
    "run/nvidia-persistenced/socket",
    "proc",
    "proc/driver",
    "proc/driver/nvidia",
]

# How a link may name the victim's path. Magic links lead to the hook's own folders.
ROUTES = {
    "absolute": "{victim}",
    "relative": "../../../../../../../../../../../..{victim}",
    "own root": "/proc/self/root{victim}",
    "first process": "/proc/1/root{victim}",
    "descriptor": "/proc/self/fd/{descriptor}",
    "working folder": "/proc/self/cwd",
    "circle": "{itself}",
}

RENAME_EXCHANGE = 2  # linux/fs.h
RACES = 4000


@pytest.fixture
def driver(tmp_path: Path, workspace: Path) -> Path:
    root = tmp_path / "driver"
    for path in (f"usr/lib/{LIBRARY}", "gsp.bin", "socket", "proc/driver/nvidia/version"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("the driver's")
    return root


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the host with files that an attacker would like to change."""
    folder = tmp_path / "victim"
    for path in (f"lib/{LIBRARY}", "ld.so.cache", "00-compat.conf", "gsp.bin"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("the host's")
    (folder / "ld.so.cache").write_text("")  # gpuhook would refuse a file that isn't a cache
    for name in ("x86_64-linux-gnu", "nvidia/1.2.3", "1.2.3", "ld.so.conf.d", "driver"):
        (folder / name).mkdir(parents=True)
    return folder


def operations(driver: Path) -> list[Operation]:
    source = str(driver)
    return [
        MaskProc(source, ("version",), (), "test"),
        BindFile(source, f"/usr/lib/{LIBRARY}", f"{FOLDER}/{LIBRARY}", FILE_OPTIONS, "test"),
        BindFile(source, "/gsp.bin", FIRMWARE, FILE_OPTIONS, "test"),
        BindFile(source, "/socket", "/run/nvidia-persistenced/socket", FILE_OPTIONS, "test"),
        BindFile(source, "/gsp.bin", "/dev/nvidia0", FILE_OPTIONS, "test"),
        Symlink(f"{FOLDER}/libcuda.so.1", LIBRARY, replace=True, reason="test"),
        WriteFile("/etc/ld.so.conf.d/00-compat.conf", "ours", 0o644, "test"),
        UpdateLdCache((("libcuda.so.1", f"{FOLDER}/libcuda.so.1", 0x303),), "test"),
    ]


def put_link(root: Path, target: str, text: str) -> None:
    place = root / target
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(text)


def everything(victim: Path) -> tuple[list[str], object]:
    return mount_table(), contents(victim)


def no_boundary() -> None:
    """Remove the second line of defence: treat every mount as the container's own."""
    own = mounts.MountPermissions(own=True, shared=False)
    mounts.Boundary.verdict = lambda self, fd: own  # type: ignore[method-assign]


def follow_anything() -> None:
    """Remove the confinement: resolve paths as open(2) does."""

    def openat2(dir_fd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)

    kernel.openat2 = openat2


def without_any_defence() -> None:
    no_boundary()
    follow_anything()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("target", TARGETS)
def test_links_out_of_the_root_are_not_followed(
    tmp_path: Path, driver: Path, victim: Path, target: str, route: str
) -> None:
    root = tmp_path / "rootfs"
    descriptor = os.open(victim, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    text = ROUTES[route].format(victim=victim, descriptor=descriptor, itself=f"/{target}")
    for folder in ("dev", "proc"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    if target == "proc":
        (root / "proc").rmdir()
    if not target.startswith("dev/"):
        put_link(root, target, text)
    before = everything(victim)

    def begin() -> None:
        see_drivers("nvidia")
        os.chdir(victim)

    try:
        with sandbox(root) as box:
            if target.startswith("dev/"):
                put_link(box.inside("/"), target, text)
            try:
                box.inject(operations(driver), begin)
            except InjectError as error:
                assert error.remedy  # noqa: PT017 - either outcome is fine, if it is clear
            inside = mount_table(box.mounts())
    finally:
        os.close(descriptor)
    assert everything(victim) == before
    assert [line for line in inside if line.startswith(str(victim))] == []


@pytest.mark.parametrize(
    "target", ["usr/lib/x86_64-linux-gnu", "etc", "lib/firmware", "run/nvidia-persistenced"]
)
def test_without_confinement_a_link_out_of_the_root_is_followed(
    tmp_path: Path, driver: Path, victim: Path, target: str
) -> None:
    """Even without confinement, the mount table shows that the victim isn't the container's."""
    root = tmp_path / "rootfs"
    for folder in ("dev", "proc"):
        (root / folder).mkdir(parents=True)
    put_link(root, target, str(victim))
    before = contents(victim)
    with sandbox(root) as box:
        try:
            noticed = box.inject(operations(driver), follow_anything)
        except VolumeError as error:
            noticed = [str(error)]
        assert any("volume" in text for text in noticed)
        assert contents(victim) == before
        box.inject(operations(driver), without_any_defence)
    assert contents(victim) != before


@contextmanager
def swapping(root: Path, name: str, link: str) -> Iterator[None]:
    """Swap a folder of a root and a link as fast as possible, as another container would."""
    trap = root / "trap"
    trap.symlink_to(link)
    libc = ctypes.CDLL(None)
    first, second = str(root / name).encode(), str(trap).encode()
    pid = os.fork()
    if pid == 0:
        unshare_mounts()
        while True:
            libc.renameat2(-100, first, -100, second, RENAME_EXCHANGE)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def forget_places(container: ContainerRootfs) -> None:
    """Make every step resolve its path again, so that an attacker has more chances in the race."""
    for fd in (*container._places.values(), *container._held):
        os.close(fd)
    container._places.clear()
    container._held.clear()
    container._folder_verdicts.clear()


def race(pid: int, root: Path, victim: Path) -> dict[str, int]:
    """Repeat the steps of an injection in one process; count the outcomes."""
    outcomes = {"done": 0, "refused": 0, "outside": 0}
    outside = {os.stat(path).st_ino for path in (victim, *victim.rglob("*"))}
    with injection.open_container(pid, str(root)) as container:
        fd = os.open("ns/mnt", os.O_RDONLY, dir_fd=container.process)
        kernel.enter_mount_namespace(fd, "")
        for number in range(RACES):
            forget_places(container)
            try:
                place = container.mount_point(f"{FOLDER}/placeholder-{number % 50}")
                if place is not None:
                    os.close(place)
                container.make_link(f"{FOLDER}/link", f"to-{number % 2}", replace=True)
                container.replace_file(f"{FOLDER}/file", b"data", 0o644)
                outcomes["done"] += 1
            except (OSError, InjectError):
                outcomes["refused"] += 1
            places = [os.fstat(fd).st_ino for fd in container._places.values()]
            outcomes["outside"] += bool(outside.intersection(places))
            container.journal.roll_back()
    return outcomes


@pytest.mark.parametrize("route", ["{victim}", "../../../../../../../../..{victim}"])
def test_folders_constantly_swapped_for_links_change_nothing_outside(
    tmp_path: Path, victim: Path, route: str
) -> None:
    root = tmp_path / "rootfs"
    (root / FOLDER.lstrip("/")).mkdir(parents=True)
    (root / "dev").mkdir()
    before = everything(victim)
    with sandbox(root) as box, swapping(root, "usr/lib", route.format(victim=victim)):
        outcomes = in_child(lambda: race(box.pid, root, victim))
    assert everything(victim) == before
    assert outcomes["outside"] == 0
    assert outcomes["done"] > RACES // 100


def swap_before(call: str, folder: Path, victim: Path, earlier: int) -> None:
    """Replace a folder by a link once, immediately before a kernel call uses the folder.

    ``earlier`` such calls come first.
    """
    real = getattr(kernel, call)
    calls = []

    def swapped(*words: object) -> object:
        calls.append(words)
        if len(calls) <= earlier:
            return real(*words)
        setattr(kernel, call, real)
        folder.rename(folder.with_name("away"))
        folder.symlink_to(victim)
        return real(*words)

    setattr(kernel, call, swapped)


LINK = f"{FOLDER}/libcuda.so.1"
COMPAT = "/etc/ld.so.conf.d/00-compat.conf"
# Case -> the operation, the call that uses a folder, and what is in it then (CVE-2026-24260).
MOMENTS: dict[str, tuple[Operation, str, str]] = {
    "soname link": (
        Symlink(LINK, LIBRARY, replace=True, reason="test"), "create_link", "libcuda.so.1",
    ),
    "soname link replaced": (
        Symlink(f"{FOLDER}/libold.so.1", LIBRARY, replace=True, reason="test"),
        "create_link", "libold.so.1",
    ),
    "compat file": (WriteFile(COMPAT, "ours", 0o644, "test"), "create_file", "00-compat.conf"),
    "parent folder": (
        WriteFile("/etc/ld.so.conf.d/made/by/us", "ours", 0o644, "test"), "create_folder", "made",
    ),
}  # fmt: skip


@pytest.mark.protects(
    "link-by-folder",
    "a soname link is created in the folder that was checked, even if its path changes",
    instead=(
        "entries.make(self.owner, kernel.create_link, kernel.AT_FDCWD, "
        'os.readlink(f"/proc/self/fd/{parent}") + f"/{name}", target)'
    ),
    only="during_the_hook and soname and not replaced",
)
@pytest.mark.protects(
    "relink-by-folder",
    "a SONAME link is replaced in the checked folder even if the path is swapped",
    instead=(
        "make(owner, kernel.create_link, kernel.AT_FDCWD, "
        'os.readlink(f"/proc/self/fd/{parent}") + f"/{temporary}", target)'
    ),
    only="during_the_hook and replaced",
)
@pytest.mark.protects(
    "file-by-folder",
    "the CUDA compatibility file is created in the same folder that was checked",
    instead=(
        "fd = make(owner, kernel.create_file, kernel.AT_FDCWD, "
        'os.readlink(f"/proc/self/fd/{parent}") + f"/{temporary}", 0o600)'
    ),
    only="during_the_hook and compat",
)
@pytest.mark.protects(
    "folder-by-folder",
    "a missing folder is created in the same parent folder that was checked",
    instead=(
        "entries.make(self.owner, kernel.create_folder, kernel.AT_FDCWD, "
        'os.readlink(f"/proc/self/fd/{held}") + f"/{name}")'
    ),
    only="during_the_hook and parent",
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_folder_swapped_for_a_link_during_the_hook_is_not_followed(
    tmp_path: Path, victim: Path, moment: str
) -> None:
    """The swap comes after gpuhook checks the folder and before it creates anything in it."""
    operation, call, made = MOMENTS[moment]
    earlier = int("replaced" in moment)  # the operation first tries whether the link is missing
    root = tmp_path / "rootfs"
    for place in (FOLDER, "/etc/ld.so.conf.d", "/dev"):
        (root / place.lstrip("/")).mkdir(parents=True)
    (root / f"{FOLDER}/libold.so.1".lstrip("/")).symlink_to("another")
    folder = root / (FOLDER if "link" in moment else "/etc/ld.so.conf.d").lstrip("/")
    before = everything(victim)
    with sandbox(root) as box:
        box.inject([operation], lambda: swap_before(call, folder, victim, earlier))
    assert folder.is_symlink(), "nothing was swapped"
    assert everything(victim) == before
    assert made in os.listdir(folder.with_name("away"))


def check_then_open() -> None:
    """Confine like a program that first resolves a path and then uses the result."""

    def openat2(dir_fd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
        root = os.readlink(f"/proc/self/fd/{dir_fd}")
        found = os.path.realpath(f"{root}/{path}")
        if not found.startswith(root):
            raise OSError(40, "leads out of the root", path)
        return os.open(f"{root}/{path}", flags | os.O_CLOEXEC, mode)

    kernel.openat2 = openat2


def test_a_check_before_the_use_loses_the_race(tmp_path: Path, victim: Path) -> None:
    root = tmp_path / "rootfs"
    (root / FOLDER.lstrip("/")).mkdir(parents=True)
    (root / "dev").mkdir()

    def careless() -> int:
        no_boundary()
        check_then_open()
        return race(box.pid, root, victim)["outside"]

    with sandbox(root) as box, swapping(root, "usr/lib", str(victim)):
        assert any(in_child(careless) for _ in range(20))
