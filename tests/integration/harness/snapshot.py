"""What a host looks like, so that a test can say that nothing changed."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def mount_table(text: str | None = None) -> list[str]:
    """Return the mounts as lines without the numbers that differ from mount to mount.

    What engines keep mounted for the next container is left out: network namespaces, and
    podman's storage on itself.
    """
    if text is None:
        text = Path("/proc/self/mountinfo").read_text()
    lines = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        root, point, options = before.split()[3:6]
        if not after.startswith("nsfs ") and not point.endswith("/root/overlay"):
            lines.append(f"{point} root={root} {options} {after}")
    return sorted(lines)


def tree(*folders: Path) -> dict[str, tuple[int, int, int, str]]:
    """Return everything below ``folders``: mode, device number, size and link target by path."""
    found = {}
    for folder in folders:
        for path in [folder, *folder.rglob("*")]:
            status = path.lstat()
            regular = stat.S_ISREG(status.st_mode)
            target = str(path.readlink()) if stat.S_ISLNK(status.st_mode) else ""
            size = status.st_size if regular else 0
            found[str(path)] = (status.st_mode, status.st_rdev, size, target)
    return found


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return what the files below ``folder`` hold by path; None for a folder."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in [folder, *folder.rglob("*")]
        if path.exists()
    }


@contextmanager
def nothing_left(*folders: Path, pid: int | None = None) -> Iterator[None]:
    """Assert at the end of the block that mounts and ``folders`` are as they were.

    The mount tables compared are ours and, with ``pid``, that process' too.
    """
    tables = [Path(f"/proc/{who}/mountinfo") for who in ("self", pid) if who is not None]
    before = [mount_table(table.read_text()) for table in tables], tree(*folders)
    yield
    for table, mounts in zip(tables, before[0], strict=True):
        now = mount_table(table.read_text())
        assert set(now) - set(mounts) == set(), "mounts were left"
        assert now == mounts
    assert dict(tree(*folders).items() ^ before[1].items()) == {}


def same_file(one: Path, other: Path) -> bool:
    """Tell whether both paths lead to one inode."""
    return os.path.samestat(one.stat(), other.stat())
