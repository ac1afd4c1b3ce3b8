"""Limits of MPS: a container's own settings can only lower them, whatever their values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.vendors.nvidia.mps import smaller_memory, smaller_percentage

GIB = 1 << 30
MOST = {0: 8 * GIB, 1: 4 * GIB}
IDS = {"GPU-a": 0, "GPU-b": 1}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", "0=8192M,1=4096M"),
        ("0=2G", "0=2048M,1=4096M"),
        ("GPU-b=1G,0=9G", "0=8192M,1=1024M"),
        ("0=16G,1=4T", "0=8192M,1=4096M"),
        ("2=1G", "0=8192M,1=4096M"),
        ("0=0,1=50%", "0=8192M,1=4096M"),
        ("0=1K", "0=8192M,1=4096M"),
        ("9" * 5000 + "=1G", "0=8192M,1=4096M"),
        ("0=" + "9" * 5000, "0=8192M,1=4096M"),
    ],
)
def test_a_containers_own_memory_limits_only_lower_the_limits(asked: str, expected: str) -> None:
    assert smaller_memory(asked, MOST, IDS) == expected


@given(st.text() | st.from_regex(r"[01]=[0-9]{1,6}[KMGT]?(,[01]=[0-9]{1,6}[KMGT]?)*"))
def test_memory_limits_never_grow(asked: str) -> None:
    for part in smaller_memory(asked, MOST, IDS).split(","):
        place, size = part.split("=")
        assert 0 < int(size.removesuffix("M")) << 20 <= MOST[int(place)]


@given(st.text() | st.from_regex(r"[0-9.]{1,20}"), st.integers(1, 100))
def test_thread_percentages_never_grow(asked: str, most: int) -> None:
    assert 0 < float(smaller_percentage(asked, most)) <= most
