"""Hostile images: links and damaged files, started for real by runc and crun."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle
from harness.driver import Driver
from harness.hostile import FOLDER, change_image, refused, start
from harness.prefork import ONE, RUNTIMES
from harness.sandbox import unshare_mounts
from harness.snapshot import nothing_left

RENAME_EXCHANGE = 2  # linux/fs.h


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    for name in ("x86_64-linux-gnu", "1.2.3", "ld.so.conf.d"):
        (folder / name).mkdir(parents=True)
    (folder / "ld.so.cache").write_text("")
    return folder


@pytest.mark.protects(
    "confined",
    "paths are confined to the container, and nothing is created on mounts of the host",
    instead="return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)\nhow = b''",
    also=("own-mount", "return MountPermissions(True, shared)"),
    only="links_in_the_image and runc-host",
)
@pytest.mark.parametrize(
    ("place", "text"),
    [
        (FOLDER, "VICTIM/x86_64-linux-gnu"),
        (FOLDER, "../../../../../../../../../../../../../..VICTIM"),
        ("usr/bin", "VICTIM"),
        ("lib/firmware/nvidia", "VICTIM"),
        ("run/nvidia-persistenced", "/proc/1/root/VICTIM"),
        ("run/nvidia-persistenced", "/proc/self/fd/0"),
        ("run/nvidia-persistenced", "/proc/self/cwd"),
        ("etc/ld.so.cache", "VICTIM/ld.so.cache"),
    ],
)
@RUNTIMES
def test_links_in_the_image_do_not_lead_to_the_host(
    bundle: GpuBundle, driver: Driver, victim: Path, place: str, text: str
) -> None:
    text = text.replace("VICTIM", str(victim))
    folder = os.path.dirname(place)
    change_image(bundle, f"mkdir -p {folder}; rm -rf {place}; ln -s {text} {place}")
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all")
    result = start(bundle, driver.root, victim)
    if result.status != 0:
        refused(result)


@contextmanager
def swapping(bundle: Bundle, name: str, link: str) -> Iterator[None]:
    """Swap a folder and a link repeatedly, from a second container on the same root."""
    change_image(bundle, f"ln -s {link} trap")
    pid = os.fork()
    if pid == 0:
        try:
            _swap(bundle, name)
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        change_image(bundle, f"test -d {name} && test ! -L {name} || mv -T trap {name}; rm -f trap")


def _swap(bundle: Bundle, name: str) -> None:
    libc = ctypes.CDLL(None)
    if bundle.namespace.pid is not None:
        with open(f"/proc/{bundle.namespace.pid}/ns/mnt", "rb") as file:
            libc.setns(file.fileno(), 0)
    unshare_mounts()
    os.chroot(bundle.root)
    while True:
        libc.renameat2(-100, name.encode(), -100, b"trap", RENAME_EXCHANGE)


@RUNTIMES
def test_a_second_container_that_swaps_folders_changes_nothing_outside(
    bundle: GpuBundle, driver: Driver, victim: Path
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    change_image(bundle, "rm -rf opt; mkdir opt")
    outcomes = set()
    # The container's own programs need their libraries, so the test swaps another folder.
    change_image(bundle, "mkdir -p lib/firmware; mv lib/firmware opt/firmware; ")
    change_image(bundle, "ln -s ../../opt/firmware usr/lib/firmware")
    with swapping(bundle, "opt", str(victim)), nothing_left(victim, pid=bundle.namespace.pid):
        for _ in range(15):
            outcomes.add(bundle.start().status)
    assert 0 in outcomes


@pytest.mark.parametrize(
    "script",
    [
        "printf garbage >etc/ld.so.cache",
        "printf 'ld.so-1.7.0\\0\\377\\377\\377\\377' >etc/ld.so.cache",
        "head -c 100 etc/ld.so.cache >x; mv x etc/ld.so.cache",
        "printf '\\377\\377\\377\\377' | dd of=etc/ld.so.cache bs=1 seek=20 conv=notrunc",
        "printf '\\377\\377\\377\\177' | dd of=etc/ld.so.cache bs=1 seek=52 conv=notrunc",
        "truncate -s 100G etc/ld.so.cache",
        "rm etc/ld.so.cache; mkfifo etc/ld.so.cache",
        "rm etc/ld.so.cache; mkdir etc/ld.so.cache",
        "rm etc/ld.so.cache; mknod etc/ld.so.cache c 10 130",
        "rm etc/ld.so.cache; ln -s ld.so.cache etc/ld.so.cache",
    ],
)
@ONE
def test_a_damaged_loader_cache_is_handled_or_refused_in_time(
    bundle: GpuBundle, driver: Driver, script: str
) -> None:
    change_image(bundle, script)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    begun = time.monotonic()
    result = start(bundle, driver.root)
    assert time.monotonic() - begun < 300
    if result.status != 0:
        refused(result, "ld.so.cache")
