"""What docker's --gpus asks for, and what Docker refuses."""

import pytest

from gpuhook.tools.vendors.nvidia.docker_gpus import variables

DEVICES = "NVIDIA_VISIBLE_DEVICES="
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES="


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", [f"{DEVICES}all"]),
        ("2", [f"{DEVICES}0,1"]),
        ("count=1", [f"{DEVICES}0"]),
        ("-1", [f"{DEVICES}all"]),
        ("0", [f"{DEVICES}void"]),
        ("device=0", [f"{DEVICES}0"]),
        ('"device=0,GPU-1"', [f"{DEVICES}0,GPU-1"]),
        ("device=", [DEVICES]),
        ("driver=nvidia,count=all", [f"{DEVICES}all"]),
        ("capabilities=video", [f"{DEVICES}0", f"{CAPABILITIES}video"]),
        (
            'all,"capabilities=utility,compute,gpu"',
            [f"{DEVICES}all", f"{CAPABILITIES}utility,compute"],
        ),
        ("all,capabilities=gpu", [f"{DEVICES}all"]),
        ("all,options=a", [f"{DEVICES}all"]),
    ],
)  # fmt: skip
def test_variables(value: str, expected: list[str]) -> None:
    assert variables(value) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "takes all, a number or names"),
        ("many", "takes all or a number, not 'many'"),
        ("device=0,1", "'\"device=0,1\"'"),
        ("1,2", "count twice"),
        ("gpu=1", "knows no 'gpu'"),
        ("driver=amd", "no driver 'amd'"),
        ("capabilities=tpu", "no driver with the capability 'tpu'"),
        ('"device=0', "takes all, a number or names"),
        ("1\n2", "takes all"),
    ],
)
def test_what_docker_refuses(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"--gpus") as caught:
        variables(value)
    assert reason in str(caught.value)
