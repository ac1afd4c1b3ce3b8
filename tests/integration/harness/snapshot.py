"""State of a host, so that a test can assert that nothing changed."""

import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from harness.commands import wait_until

# The tests' engines have all of their mounts below this folder.
ENGINES = "/run/gpuhook-test/"
_RUNC_ITSELF = re.compile(r"/runc\.[A-Za-z0-9]{6}$")


def mount_table(text: str | None = None) -> list[str]:
    """Return the mounts as lines without the numbers that differ from mount to mount.

    Mounts that engines keep for the next container are left out: network namespaces, and
    podman's storage on itself. A runc of Debian 12 mounts itself in its state folder for a
    moment at each start. If it is killed at that moment, this mount stays, and is left out,
    too.
    """
    if text is None:
        text = Path("/proc/self/mountinfo").read_text()
    lines = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        root, point, options = before.split()[3:6]
        is_kept = after.startswith("nsfs ") or point.endswith("/root/overlay")
        if not is_kept and not _RUNC_ITSELF.search(point):
            lines.append(f"{point} root={root} {options} {after}")
    return sorted(lines)


def tree(*folders: Path) -> dict[str, tuple[int, int, int, str]]:
    """Return mode, device number, size and link target of all below ``folders``, by path."""
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
    """Return the contents of the files below ``folder`` by path, with None for a folder."""
    return _contents([folder, *folder.rglob("*")])


def contents_now(before: Iterable[str]) -> dict[str, bytes | None]:
    """Return the current content of the files of ``contents``, ignoring an engine's additions."""
    return _contents(map(Path, before))


def _contents(paths: Iterable[Path]) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() else None for path in paths if path.exists()
    }


def _differences(table: Path, before: list[str]) -> tuple[list[str], list[str]]:
    """Return the mounts that are new, and the mounts that are gone."""
    now = mount_table(table.read_text())
    new = Counter(now) - Counter(before)
    gone = Counter(before) - Counter(now)
    return sorted(new.elements()), sorted(gone.elements())


@contextmanager
def nothing_left(*folders: Path, pid: int | None = None) -> Iterator[None]:
    """Check at the end of the block that mounts and ``folders`` are unchanged.

    This compares the mount table of this process and, with ``pid``, the one of that process.
    Engines tidy up after a container has exited. Their mounts for this container and for the
    one before may take a moment to disappear.
    """
    tables = [Path(f"/proc/{who}/mountinfo") for who in ("self", pid) if who is not None]
    before = [mount_table(table.read_text()) for table in tables], tree(*folders)
    yield
    for table, mounts in zip(tables, before[0], strict=True):
        with suppress(AssertionError):
            wait_until(partial(_nothing_new, table, mounts), "the engine has tidied up")
        new, gone = _differences(table, mounts)
        assert new == [], "mounts were left"
        assert [line for line in gone if not line.startswith(ENGINES)] == [], "mounts were lost"
    assert dict(tree(*folders).items() ^ before[1].items()) == {}


def _nothing_new(table: Path, before: list[str]) -> bool:
    return _differences(table, before)[0] == []
