"""Reading below a root: by openat2 and, where the kernel lacks it, component by component."""

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.container import kernel, rootfs
from gpuhook.base.container.rootfs import Rootfs


def no_openat2(*args: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.fixture(params=["openat2", "walk"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A method of path resolution: openat2, or component by component."""
    if request.param == "walk":
        monkeypatch.setattr(kernel, "openat2", no_openat2)
    way: str = request.param
    return way


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Rootfs]:
    base = tmp_path / "root"
    (base / "usr/lib").mkdir(parents=True)
    (base / "usr/lib/library").write_text("the image's")
    (base / "lib").symlink_to("usr/lib")
    (base / "absolute").symlink_to("/usr/lib/library")
    (base / "outside").symlink_to("../../../../../../../../../usr/lib/library")
    (base / "passwd").symlink_to("/etc/passwd")
    (base / "circle").symlink_to("circle")
    (base / "dangling").symlink_to("/nowhere/at/all")
    (base / "magic").symlink_to("/proc/self/root")
    os.mkfifo(base / "pipe")
    with Rootfs(str(base)) as found:
        yield found


@pytest.mark.protects(
    "confined",
    "path lookups are confined to the container's root",
    instead="return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)\nhow = b''",
)
@pytest.mark.protects(
    "absolute-links",
    "absolute symbolic links are resolved from the container's root, also along a path",
    instead='if target == "/" or stack.append(os.open("/", os.O_PATH)):',
)
@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/library", "usr/lib/library", "//usr/./lib//library", "/usr/../usr/lib/library",
        "/../../../../usr/lib/library", "/lib/library", "/lib/../lib/library", "/absolute",
        "/outside",
    ],
)  # fmt: skip
def test_paths_stay_inside(root: Rootfs, by: str, path: str) -> None:
    assert root.read_file(path, 100) == b"the image's"
    assert root.exists(path)


@pytest.mark.parametrize(
    "path", ["/passwd", "/circle", "/dangling", "/nothing", "/usr/lib/library/below", "/magic/etc"]
)
def test_missing_and_unresolvable_paths_read_as_empty(root: Rootfs, by: str, path: str) -> None:
    assert root.read_file(path, 100) is None
    assert root.stat(path) is None
    assert root.list_folder(path) == []


def test_folders_are_listed_and_opened_once(root: Rootfs, by: str) -> None:
    assert root.list_folder("/lib") == ["library"]
    assert "usr" in root.list_folder("/")
    assert root.list_folder("/lib/library") == []
    assert root.folder("/lib") == root.folder("/lib"), "one descriptor is enough"


def test_real_paths_are_resolved_below_the_root(root: Rootfs, by: str) -> None:
    assert root.real_path("/lib/library") == "/usr/lib/library"
    assert root.real_path("/outside") == "/usr/lib/library"
    assert root.real_path("/") == "/"


def test_a_file_longer_than_the_limit_is_refused(root: Rootfs, by: str) -> None:
    with pytest.raises(OSError, match="more than 3 bytes") as caught:
        root.read_file("/lib/library", 3)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.protects(
    "regular-file",
    "a path in a container that isn't a regular file isn't opened",
    instead="return reopen(fd)",
)
def test_a_path_that_is_no_regular_file_is_never_opened(
    tmp_path: Path, root: Rootfs, by: str
) -> None:
    """A node could be a watchdog's: opening it would be enough to restart the host."""
    opened = threading.Event()

    def write() -> None:
        os.close(os.open(tmp_path / "root/pipe", os.O_WRONLY))
        opened.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    for _ in range(50):
        assert root.read_file("/pipe", 100) is None
    assert not opened.wait(0.2), "the writer found a reader"
    os.close(os.open(tmp_path / "root/pipe", os.O_RDONLY | os.O_NONBLOCK))
    writer.join(10)
    assert opened.is_set(), "a reader would have been noticed"


def test_a_root_that_is_not_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, error in (("file", NotADirectoryError), ("nothing", FileNotFoundError)):
        with pytest.raises(error):
            Rootfs(str(tmp_path / name))


@pytest.mark.protects(
    "disturbed-lookup",
    "a path lookup that a concurrent rename disturbed is tried again",
    instead="_LOOKUP_ATTEMPTS = 1",
)
def test_interrupted_path_lookups_are_retried(
    root: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = kernel.syscall, [BlockingIOError(errno.EAGAIN, "again")] * 5

    def syscall(number: int, *args: object, path: str = "") -> int:
        if failures:
            raise failures.pop()
        return real(number, *args, path=path)

    monkeypatch.setattr(kernel, "syscall", syscall)
    assert root.exists("/lib/library")
    assert failures == []


NAMES = st.sampled_from(["a", "b", "c", ".", ".."])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
LINKS = st.builds(lambda start, path: start + path, st.sampled_from(["", "/"]), PATHS)
TREES = st.dictionaries(st.sampled_from(["a", "b", "c", "a/b", "b/a", "c/c"]), st.none() | LINKS)


def make(base: Path, tree: dict[str, str | None]) -> None:
    for name in sorted(tree):
        place, link = base / name, tree[name]
        if not place.parent.is_symlink() and not place.is_symlink():
            place.parent.mkdir(parents=True, exist_ok=True)
            if link is None:
                place.mkdir(exist_ok=True)
            elif not place.exists():
                place.symlink_to(link)


def outcome(look: Callable[[], int]) -> tuple[int, int] | str:
    try:
        fd = look()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    return status.st_dev, status.st_ino


@given(TREES, PATHS)
def test_openat2_and_the_stepwise_walk_find_the_same_file(
    tree: dict[str, str | None], path: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "root")
        base.mkdir()
        make(base, tree)
        with Rootfs(str(base)) as found:
            kernels = outcome(lambda: found.open(path))

            def by_steps() -> int:
                parent, name = rootfs.walk(found._fd, path, rootfs.enter)
                try:
                    return os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
                finally:
                    os.close(parent)

            steps = outcome(by_steps)
        inside = {(each.lstat().st_dev, each.lstat().st_ino) for each in (base, *base.rglob("*"))}
    assert steps == kernels
    assert isinstance(steps, str) or steps in inside
