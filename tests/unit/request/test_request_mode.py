"""How a container gets its devices, by configuration and request."""

from typing import Any

import pytest

from gpuhook.config import loads
from gpuhook.errors import ConfigError, RequestError
from gpuhook.request import reader
from gpuhook.request.reader import Request, read_request

Case = dict[str, Any]

# What stands for NVIDIA's result; docs/differences.md says why.
NEAREST = {"legacy": "hook", "jit-cdi": "hook", "csv": "hook", "cdi": "cdi"}


@pytest.mark.vectors("mode", "mode.resolve")
def test_resolve(case: Case) -> None:
    given = case["input"]
    accept = str(given["accept_volume_mounts"]).lower()
    text = f"""
        accept-nvidia-visible-devices-as-volume-mounts = {accept}
        [nvidia-container-runtime]
        mode = "{given["mode"]}"
    """
    if given["mode"] == "not-auto":  # kept there until the container is created, then an error
        with pytest.raises(ConfigError, match=r"line 4: .*mode must be one of"):
            loads(text)
        return
    spec = {
        "process": {"env": [f"{name}={value}" for name, value in given["env"].items()]},
        "mounts": [
            {"source": "/dev/null", "destination": path} for path in given["devnull_mounts"]
        ],
    }
    config = loads(text)
    assert (
        reader.effective_mode(config.mode, read_request(spec, config))
        == NEAREST[case["expected"]["mode"]]
    )


@pytest.mark.parametrize(
    ("configured", "request_", "result"),
    [
        ("hook", Request(), "hook"),
        ("spec", Request(devices=("0",), selectors=("0",)), "spec"),
        ("auto", Request(devices=("0",), selectors=("0",)), "hook"),
        ("cdi", Request(devices=("0",), selectors=("0",)), "spec"),
        ("cdi", Request(devices=()), "cdi"),
        *[
            (word, Request(devices=("a.b/c=d",), cdi_devices=("a.b/c=d",)), "cdi")
            for word in ("hook", "spec", "auto", "cdi")
        ],
    ],
)
def test_mode_and_request(configured: str, request_: Request, result: str) -> None:
    assert reader.effective_mode(configured, request_) == result


def test_a_request_of_both_kinds_never_gets_here() -> None:
    spec = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0,0"]}}
    with pytest.raises(RequestError):
        read_request(spec, loads('nvidia-container-runtime.mode = "auto"'))
