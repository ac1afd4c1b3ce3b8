"""Device access of podman's containers after podman update, which needs cgroup v2's controllers."""

import pytest
from booted import CRUN_IS_OLD, Container, disturb

# Whether a container keeps its GPUs at podman update, for each way and low-level runtime. crun
# writes cgroup v2's device rules again from podman's data, which doesn't include GPUs. crun 1.8
# doesn't write them again.
CASES = [(("runtime", "crun"), CRUN_IS_OLD), (("precreate", "runc"), True)]


@pytest.mark.parametrize(
    ("way", "keeps"),
    CASES,
    indirect=["way"],
    scope="module",
    ids=["-".join(way) for way, _ in CASES],
)
def test_podman_update_keeps_device_access_only_where_expected(
    way: tuple[str, str], keeps: bool, of_podman: Container
) -> None:
    assert disturb(of_podman, "update") == keeps
