from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.vendors.nvidia import own_files

Case = dict[str, Any]


@pytest.mark.vectors("application_profile", "application_profile.minors")
def test_gpu_minors_match_the_vectors(case: Case) -> None:
    nodes = [(name, kind == "c", minor) for name, kind, minor in case["input"]["dev_entries"]]
    assert own_files.gpu_minors(nodes) == tuple(case["expected"]["minors"] or ())


@pytest.mark.vectors("application_profile", "application_profile.content")
def test_application_profiles_match_the_vectors(case: Case) -> None:
    assert own_files.profile(case["input"]["minors"]) == case["expected"]["text"]


@pytest.mark.parametrize("name", ["nvidia", "nvidiactl", "nvidia-uvm", "nvidia0x", "xnvidia0", "0"])
def test_other_nodes_are_not_taken_for_gpus(name: str) -> None:
    assert own_files.gpu_minors([(name, True, 0)]) == ()


def test_without_a_gpu_there_is_no_profile() -> None:
    assert own_files.profile([]) is None
    assert own_files.profile([64, 255]) is None


@given(st.lists(st.integers(0, 300)))
def test_mask_has_one_bit_for_each_gpu_it_can_name(minors: list[int]) -> None:
    text = own_files.profile(minors)
    named = {minor for minor in minors if minor < 64}
    mask = int(text.partition('"EGLVisibleDGPUDevices",')[2].partition("]")[0], 16) if text else 0
    assert {bit for bit in range(70) if mask >> bit & 1} == named


@pytest.mark.vectors("params_file", "params_file")
def test_masked_params_match_the_vectors(case: Case) -> None:
    expected = case["expected"]["modified"]
    found = own_files.masked_params(case["input"]["contents"].encode())
    assert found == (None if expected is None else expected.encode())


@pytest.mark.parametrize(
    "content",
    [b"ModifyDeviceFiles: 0\n", b"ModifyDeviceFiles: 1 \n", b"XModifyDeviceFiles: 1", b"\xff"],
)
def test_params_without_the_modify_line_are_unchanged(content: bytes) -> None:
    assert own_files.masked_params(content) is None


@given(st.lists(st.sampled_from([b"ModifyDeviceFiles: 1", b"ModifyDeviceFiles: 0", b"", b"\xff"])))
def test_only_the_modify_device_files_line_is_changed(lines: list[bytes]) -> None:
    found = own_files.masked_params(b"".join(line + b"\n" for line in lines))
    if b"ModifyDeviceFiles: 1" in lines:
        assert found is not None
        expected = [b"ModifyDeviceFiles: 0" if line.endswith(b"1") else line for line in lines]
        assert found == b"".join(line + b"\n" for line in expected)
        assert own_files.masked_params(found) is None
    else:
        assert found is None
