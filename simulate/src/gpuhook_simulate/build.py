"""Build a simulated root, or replace one: every vendor's in the same way."""

import os
from collections.abc import Callable
from typing import TypeVar

from gpuhook.ground.errors import SimulateError
from gpuhook.ground.host.files import check_way, remedy
from gpuhook_simulate.place import check_place, new_tree, put_in_place
from gpuhook_simulate.tree import Tree

Made = TypeVar("Made")


def build(root: str, fill: Callable[[Tree], Made]) -> Made:
    """Make a root at that path, replacing a simulated one that is there; return what ``fill`` does.

    ``fill`` is given an empty tree beside it, which is put in place by one rename afterwards;
    when ``fill`` fails, nothing has changed. Raises SimulateError if the folder holds something
    else, or if this user or file system can't (no root, nodev mount, no room), and
    UntrustedPathError where another user could lead root elsewhere.
    """
    check_way(root)  # protects: simulated-way
    root = os.path.realpath(root)
    check_place(root)
    try:
        with new_tree(root) as new:
            made = fill(Tree(new))
            put_in_place(new, root)
    except OSError as error:
        raise SimulateError(
            f"{root} can't be built: {error.strerror}",
            remedy(error, "Choose a folder in which root can make files and device nodes"),
        ) from error
    return made
