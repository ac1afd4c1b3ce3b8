"""Clear errors for a container that ends or isn't one, an old kernel and a misplaced hook."""

import ctypes
import importlib
import os
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.pids import in_own_pid_namespace, let_next_be
from harness.sandbox import (
    Sandbox,
    contents,
    in_child,
    mount,
    sandbox,
    unshare_mounts,
)
from harness.snapshot import mount_table

from gpuhook import inject as injection
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import GpuhookError, InjectError
from gpuhook.core.plan.operations import FILE_OPTIONS, BindFile, Plan

OPEN_TREE, MOVE_MOUNT, OPENAT2, MOUNT_SETATTR = 428, 429, 437, 442  # asm-generic/unistd.h
ENOSYS, EPERM = 38, 1


@pytest.fixture
def driver(tmp_path: Path, workspace: Path) -> Path:
    root = tmp_path / "driver"
    root.mkdir()
    (root / "library").write_text("the driver's")
    return root


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = tmp_path / "rootfs"
    (root / "dev").mkdir(parents=True)
    return root


def plan(driver: Path) -> Plan:
    return Plan([BindFile(str(driver), "/library", "/usr/lib/library", FILE_OPTIONS, "test")])


def refuse_call(number: int, error: int) -> Callable[[], None]:
    """Return a function that makes the kernel refuse a call, as an old kernel or seccomp does."""

    def work() -> None:
        # Load the call's number. If it matches, return the error; else allow the call.
        program = b"".join(
            struct.pack("=HBBI", *code)
            for code in (
                (0x20, 0, 0, 0),
                (0x15, 0, 1, number),
                (0x06, 0, 0, 0x00050000 | error),
                (0x06, 0, 0, 0x7FFF0000),
            )
        )
        buffer = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0  # PR_SET_SECCOMP

    return work


@pytest.mark.parametrize("call", [OPEN_TREE, MOVE_MOUNT, OPENAT2, MOUNT_SETATTR])
@pytest.mark.parametrize(("error", "words"), [(ENOSYS, "5.12"), (EPERM, "CAP_SYS_ADMIN")])
def test_a_kernel_that_refuses_a_call_causes_an_error_and_no_change(
    driver: Path, image: Path, call: int, error: int, words: str
) -> None:
    before = contents(image), mount_table()
    with sandbox(image) as box:
        with pytest.raises(InjectError) as caught:
            box.inject(plan(driver).operations, refuse_call(call, error))
        assert words in str(caught.value)
    assert (contents(image), mount_table()) == before


@pytest.mark.protects(
    "no-openat2",
    "paths in a root are resolved step by step on old kernels without openat2",
    instead="if True:",
)
def test_reading_a_root_works_on_an_old_kernel(driver: Path) -> None:
    def work() -> bytes | None:
        refuse_call(OPENAT2, ENOSYS)()
        with Rootfs(str(driver)) as root:
            return root.read_file("/library", 100)

    assert in_child(work) == b"the driver's"


@pytest.mark.protects(
    "no-import",
    "gpuhook imports no Python modules from a container's files",
    instead="enter(container.process)",
)
def test_no_python_module_is_imported_from_a_container(driver: Path, image: Path) -> None:
    """The container's folder has a module, and Python searches that folder."""
    (image / "stray.py").write_text("")
    sys_path, finders = sys.path[:], sys.meta_path[:]

    def importing(box: Sandbox, folder: str) -> bool:
        sys.path[:] = [folder]
        with injection.open_container(box.pid, str(box.root)) as container:
            injection.inject(plan(driver), container)
            try:
                importlib.import_module("stray")
            except ModuleNotFoundError:
                return False
        return True

    with sandbox(image) as box:
        assert not in_child(lambda: importing(box, str(image)))
    assert (sys.path, sys.meta_path) == (sys_path, finders)


def dying(box: Sandbox, driver: Path) -> None:
    """End the container after it was opened and before it is entered."""
    with injection.open_container(box.pid, str(box.root)) as container:
        made = plan(driver)
        injection.prepare(made)
        os.kill(box.pid, signal.SIGKILL)
        while _lives(box.pid):
            pass
        injection.apply(made, container)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.protects(
    "namespace-by-process",
    "a container is accessed only through a descriptor of its process",
    instead="return\nfd = -1",
)
def test_a_container_that_ends_meanwhile_is_refused(driver: Path, image: Path) -> None:
    """Its process id may belong to another process by then, which must not be touched."""
    before = contents(image), mount_table()
    with sandbox(image) as box, pytest.raises(InjectError, match="can't be entered"):
        in_child(lambda: dying(box, driver))
    assert (contents(image), mount_table()) == before


def reusing(driver: Path, image: Path, strangers: Path) -> tuple[str, bool, bool]:
    """Give the container's process id to another process between opening and entering.

    Return the error, and whether the other process's mount namespace was entered, and changed.
    """
    with ExitStack() as stack:
        made = plan(driver)
        with sandbox(image) as box:
            container = stack.enter_context(injection.open_container(box.pid, str(image)))
            injection.prepare(made)
        let_next_be(box.pid)
        with sandbox(strangers) as stranger:
            assert stranger.pid == box.pid
            before = stranger.mounts(), contents(stranger.inside("/"))
            with pytest.raises(InjectError) as caught:
                injection.apply(made, container)
            ours, theirs = Path("/proc/self/ns/mnt"), Path(f"/proc/{stranger.pid}/ns/mnt")
            changed = (stranger.mounts(), contents(stranger.inside("/"))) != before
            return str(caught.value), ours.samefile(theirs), changed


@pytest.mark.protects(
    "namespace-by-process",
    "a mount namespace is opened by a descriptor of the process, not by its process ID",
    instead=(
        'path = os.readlink(f"/proc/self/fd/{process}").partition(" ")[0]\n'
        'fd = os.open(f"{path}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)'
    ),
)
def test_a_process_id_reused_by_another_container_is_refused(
    driver: Path, image: Path, tmp_path: Path
) -> None:
    strangers = tmp_path / "strangers"
    (strangers / "dev").mkdir(parents=True)
    before = contents(image), contents(strangers), mount_table()
    error, entered, changed = in_own_pid_namespace(lambda: reusing(driver, image, strangers))
    assert (entered, changed) == (False, False), error
    assert "can't be entered" in error
    assert (contents(image), contents(strangers), mount_table()) == before


def test_a_process_id_without_a_process_is_refused(image: Path, workspace: Path) -> None:
    with pytest.raises(InjectError, match="can't be opened"):
        in_child(lambda: injection.open_container(2**22 + 1, str(image)).close())


@pytest.mark.protects("hosts-root", "the host's own root is refused as a container's root")
@pytest.mark.parametrize("root", ["/", "/.", "/../.."])
def test_the_hosts_root_is_refused_as_a_container_root(workspace: Path, root: str) -> None:
    with pytest.raises(InjectError, match="the host's own"):
        in_child(lambda: injection.open_container(os.getpid(), root).close())


def in_our_namespace(driver: Path, image: Path, protected: bool) -> tuple[list[str], list[str]]:
    """Inject into a process without its own mount namespace; return the mounts before and after."""
    unshare_mounts()  # so that unprotected mounts disappear with this process
    mount("", "/", "", 1 << 18 | 16384)
    before = mount_table()
    if not protected:
        injection._refuse_host_namespace = lambda fd: None
    try:
        with injection.open_container(os.getpid(), str(image)) as container:
            # The image's folder is on a filesystem of the host, so it counts as a volume.
            injection.inject(plan(driver), container)
    except GpuhookError as error:
        assert "no mount namespace of its own" in str(error)  # noqa: PT017 - seen in a child
    return before, mount_table()


def test_a_process_in_the_hosts_namespace_changes_no_mounts(driver: Path, image: Path) -> None:
    before, after = in_child(lambda: in_our_namespace(driver, image, True))
    assert before == after
    assert contents(image).keys() == {".", "dev"}
    before, after = in_child(lambda: in_our_namespace(driver, image, False))
    assert before != after, "unprotected, the mount shows in the host's table"


@pytest.mark.protects(
    "root-by-namespace",
    "links in the path of a container's root are resolved in the container's namespace",
    instead='root = os.open(f"/proc/self/fd/{process}/root{root_path}", flags)',
)
def test_links_on_the_way_to_the_root_are_followed(
    driver: Path, image: Path, tmp_path: Path
) -> None:
    """/var/lib/containers may be a link to another disk, also an absolute one."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with sandbox(image) as box:

        def work() -> None:
            with injection.open_container(box.pid, f"{link}/rootfs") as container:
                injection.inject(plan(driver), container)

        in_child(work)
        assert box.read("/usr/lib/library") == "the driver's"
