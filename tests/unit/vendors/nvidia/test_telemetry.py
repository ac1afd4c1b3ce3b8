"""What the use of SMs is over the time since the last question."""

import pytest

from gpuhook.tools.vendors.nvidia.telemetry import mean

S = 1_000_000  # a second


@pytest.mark.parametrize(
    ("samples", "now", "expected", "end"),
    [
        ([], 10 * S, {}, 10 * S),
        ([(10 * S, 1, 60)], 10 * S, {1: 0.6}, 10 * S),
        # Since then, nobody knows.
        ([(9 * S + 500_000, 1, 60)], 10 * S, {1: 0.6}, 9 * S + 500_000),
        # It did nothing in the second half.
        ([(5 * S, 1, 60)], 10 * S, {1: 0.3}, 10 * S),
        ([(5 * S, 1, 20), (10 * S, 1, 60)], 10 * S, {1: 0.4}, 10 * S),
        ([(10 * S, 1, 60), (10 * S, 2, 40), (5 * S, 2, 20)], 10 * S, {1: 0.6, 2: 0.3}, 10 * S),
        # The driver's clock is ahead.
        ([(12 * S, 1, 50)], 10 * S, {1: 0.5}, 12 * S),
    ],
)
def test_mean(samples: list[tuple[int, int, int]], now: int, expected: object, end: int) -> None:
    used, until = mean(samples, 0, now)
    assert {pid: round(share, 6) for pid, share in used.items()} == expected
    assert until == end
