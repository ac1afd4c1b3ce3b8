from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook import application_profile

Case = dict[str, Any]


@pytest.mark.vectors("application_profile", "application_profile.minors")
def test_minors(case: Case) -> None:
    nodes = [(name, kind == "c", minor) for name, kind, minor in case["input"]["dev_entries"]]
    assert application_profile.minors(nodes) == tuple(case["expected"]["minors"] or ())


@pytest.mark.vectors("application_profile", "application_profile.content")
def test_content(case: Case) -> None:
    assert application_profile.content(case["input"]["minors"]) == case["expected"]["text"]


@pytest.mark.parametrize("name", ["nvidia", "nvidiactl", "nvidia-uvm", "nvidia0x", "xnvidia0", "0"])
def test_other_nodes_are_no_gpus(name: str) -> None:
    assert application_profile.minors([(name, True, 0)]) == ()


def test_without_a_gpu_there_is_no_profile() -> None:
    assert application_profile.content([]) is None
    assert application_profile.content([64, 255]) is None


@given(st.lists(st.integers(0, 300)))
def test_mask_has_one_bit_for_each_gpu_it_can_name(minors: list[int]) -> None:
    text = application_profile.content(minors)
    named = {minor for minor in minors if minor < 64}
    mask = int(text.partition('"EGLVisibleDGPUDevices",')[2].partition("]")[0], 16) if text else 0
    assert {bit for bit in range(70) if mask >> bit & 1} == named
