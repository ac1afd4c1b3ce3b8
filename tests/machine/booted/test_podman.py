"""podman's containers at what needs the controllers of cgroup v2, and at what takes their GPUs."""

import pytest
from booted import Container, disturb

# What is done to a container of each way and low-level runtime, and whether it keeps its GPUs. crun
# writes v2's rules again at an update, from what podman tells it, which no device is in.
CASES = [
    (("runtime", "crun"), "update", False),
    (("precreate", "runc"), "update", True),
    (("prestart", "crun"), "set-property", False),
]


@pytest.mark.parametrize(
    ("way", "what", "keeps"),
    CASES,
    indirect=["way"],
    scope="module",
    ids=["-".join((*way, what)) for way, what, _ in CASES],
)
def test_access_outlives_or_comes_back(
    way: tuple[str, str], what: str, keeps: bool, of_podman: Container
) -> None:
    assert disturb(of_podman, what) == keeps
