"""Building and replacing of simulated roots, in the same way for all vendors."""

import os
from collections.abc import Callable
from typing import TypeVar

from gpuhook.base.errors import SimulateError
from gpuhook.base.host.files import check_way, remedy
from gpuhook_simulate.place import check_place, new_tree, put_in_place
from gpuhook_simulate.tree import Tree

Made = TypeVar("Made")


def build(root: str, fill: Callable[[Tree], Made]) -> Made:
    """Build a root at that path, replacing an existing simulated one; return ``fill``'s result.

    ``fill`` gets an empty tree in the same folder, which one rename then puts in place; if
    ``fill`` fails, nothing has changed. Raises SimulateError if the folder contains something
    else, or if the user or file system doesn't permit it (no root, nodev mount, no room), and
    UntrustedPathError if another user could redirect root.
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
            remedy(error, "Choose a folder in which root can create files and device nodes"),
        ) from error
    return made
