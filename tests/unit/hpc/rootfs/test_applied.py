"""Damaged records of a root folder that was given devices."""

import json
from pathlib import Path

import damaged
import pytest

from gpuhook.base.errors import FolderError
from gpuhook.hpc.rootfs.record import FolderIdentity, FolderRecord, MountRecord, load

OWNER = {"uid": 0, "gid": 0, "mode": 0o644}
PLACES = [
    {"path": "/a", "named": ["/a"], "written": False, "made": ["/a"], "was": {"is": "absent"}},
    {
        "path": "/b", "named": ["/b"], "written": False, "made": [], "link": "c",
        "was": {"is": "link", "target": "d", **OWNER},
    },
    {
        "path": "/c", "named": ["/c"], "written": True, "made": [],
        "was": {"is": "file", "data": "", "label": "", **OWNER},
    },
]  # fmt: skip


def test_a_damaged_record_is_refused_as_unreadable(tmp_path: Path) -> None:
    """It is refused before any change is rolled back by it, wherever it is damaged."""
    path = tmp_path / "note.json"
    noted = FolderRecord(
        str(path), "/root", FolderIdentity(1, 2, 3), "boot", 4, [["a", "b"]], PLACES
    )
    noted.save()
    noted.note_mount(MountRecord(1, 2, 3, 4))
    noted.note_written("/c", b"")
    assert load(str(path)) == noted
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        data = json.loads(line)
        for each in [*damaged.every(data, most=3), None, *damaged.without(data, *data)]:
            text = [*lines[:number], json.dumps(each), *lines[number + 1 :]]
            path.write_text("".join(f"{each}\n" for each in text))
            with pytest.raises(
                FolderError, match="the record of the folder's former state, can't be read"
            ):
                load(str(path))
