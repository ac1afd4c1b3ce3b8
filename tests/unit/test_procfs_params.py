from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.procfs_params import masked

Case = dict[str, Any]


@pytest.mark.vectors("params_file", "params_file")
def test_masked(case: Case) -> None:
    expected = case["expected"]["modified"]
    found = masked(case["input"]["contents"].encode())
    assert found == (None if expected is None else expected.encode())


@pytest.mark.parametrize(
    "content",
    [b"ModifyDeviceFiles: 0\n", b"ModifyDeviceFiles: 1 \n", b"XModifyDeviceFiles: 1", b"\xff"],
)
def test_nothing_to_do(content: bytes) -> None:
    assert masked(content) is None


@given(st.lists(st.sampled_from([b"ModifyDeviceFiles: 1", b"ModifyDeviceFiles: 0", b"", b"\xff"])))
def test_only_that_line_changes(lines: list[bytes]) -> None:
    found = masked(b"".join(line + b"\n" for line in lines))
    if b"ModifyDeviceFiles: 1" in lines:
        assert found is not None
        expected = [b"ModifyDeviceFiles: 0" if line.endswith(b"1") else line for line in lines]
        assert found == b"".join(line + b"\n" for line in expected)
        assert masked(found) is None
    else:
        assert found is None
