"""Creation of entries in a folder whose owner changes it at the same time."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.container import entries, kernel

OWNER = (4242, 4242)


@pytest.mark.protects(
    "given-by-descriptor",
    "a created file's owner is set through its descriptor, not by its name",
    instead="os.chown(temporary, *owner, dir_fd=parent, follow_symlinks=False)",
)
@pytest.mark.protects(
    "given-link",
    "a created link's owner is changed only if the link hasn't been replaced meanwhile",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
@pytest.mark.parametrize("kind", ["file", "link"])
def test_only_the_created_entry_is_given_to_the_folders_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The folder's owner replaces the new entry by a hard link to a file of root."""
    victim = tmp_path / "victim"
    victim.write_text("root's")
    name = f"create_{kind}"
    create: Callable[..., Any] = getattr(kernel, name)

    def replaced(parent: int, temporary: str, *args: Any) -> Any:
        made = create(parent, temporary, *args)
        os.unlink(temporary, dir_fd=parent)
        os.link(victim, temporary, dst_dir_fd=parent)
        return made

    monkeypatch.setattr(kernel, name, replaced)
    parent = os.open(tmp_path, os.O_PATH)
    try:
        if kind == "file":
            entries.put_file(parent, "new", b"data", 0o644, OWNER, None)
        else:
            with pytest.raises(OSError, match="replaced while"):
                entries.put_link(parent, "new", "target", OWNER)
        assert victim.stat().st_uid == 0
        monkeypatch.undo()
        entries.put_link(parent, "made", "target", OWNER)
        entries.put_file(parent, "filled", b"data", 0o4755, OWNER, None)
    finally:
        os.close(parent)
    for name in ("made", "filled"):
        assert (tmp_path / name).lstat().st_uid == OWNER[0]
    assert (tmp_path / "filled").stat().st_mode & 0o7777 == 0o4755
