"""Build a simulated root, or replace one: every vendor's in the same way."""

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import TypeVar

from gpuhook_simulate.place import MARKER, check_place, put_in_place
from gpuhook_simulate.tree import Tree

Made = TypeVar("Made")


def build(root: str, fill: Callable[[Tree], Made]) -> Made:
    """Make a root at that path, replacing a simulated one that is there; return what ``fill`` does.

    ``fill`` is given an empty tree beside it, which is put in place by one rename afterwards;
    when ``fill`` fails, nothing has changed. Raises SimulateError if the folder holds something
    else, or if this user or file system can't (no root, nodev mount).
    """
    root = os.path.realpath(root)
    check_place(root)
    os.makedirs(os.path.dirname(root), exist_ok=True)
    new = tempfile.mkdtemp(prefix=f".{os.path.basename(root)}.", dir=os.path.dirname(root))
    try:
        os.chmod(new, 0o755)  # noqa: S103 - a driver root is for everybody
        tree = Tree(new)
        made = fill(tree)
        tree.text(MARKER, "")
        put_in_place(new, root)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return made
