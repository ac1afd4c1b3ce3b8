"""What records say of themselves."""

import pytest

from gpuhook.start.inventory.model import NOBODY, Node

GID = 44


@pytest.mark.parametrize(
    ("mode", "gid", "group"),
    [
        (0o660, GID, GID),
        (0o640, GID, GID),
        (0o664, GID, GID),
        (0o666, GID, 0),
        (0o644, GID, 0),
        (0o600, GID, 0),  # the group may do nothing, so nobody is put in it
        (0o660, 0, 0),
        (0o660, NOBODY, 0),
    ],
)
def test_the_group_that_may_use_a_node(mode: int, gid: int, group: int) -> None:
    assert Node("/dev/a", 1, 2, mode, 0, gid).group == group
