"""What NVIDIA's variables say beside devices: IMEX, features, requirements, capabilities."""

from typing import Any

import pytest
from requests_made import mounts_request, request_for

from gpuhook.ground.errors import CapabilityError, RequestError


@pytest.mark.parametrize(
    ("value", "channels"),
    [
        ("0", (0,)),
        ("3,4,3", (3, 4)),
        ("1048575", (1048575,)),
        ("all", ()),
        ("0,all", ()),
        ("none", ()),
        ("void", ()),
        ("", ()),
    ],
)
def test_imex_channels(value: str, channels: tuple[int, ...]) -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=none", f"NVIDIA_IMEX_CHANNELS={value}")
    assert request_for(*env).options.imex_channels == channels


@pytest.mark.parametrize(
    "value", ["1048576", "-1", "+1", "01", "00", "0x1", "1.0", "²", "٣", "../0", "1/2", "9" * 99]
)
def test_imex_channels_are_strict(value: str) -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=none", f"NVIDIA_IMEX_CHANNELS={value}")
    with pytest.raises(RequestError, match="IMEX"):
        request_for(*env)


def test_imex_mounts_come_first_and_may_be_switched_off() -> None:
    env = ("NVIDIA_IMEX_CHANNELS=7",)

    def channels(*mounts: str, **settings: Any) -> tuple[int, ...]:
        found: tuple[int, ...] = mounts_request(*mounts, env=env, **settings).options.imex_channels
        return found

    assert channels("0", "imex/3", "imex/1", "imex/3") == (3, 1)
    assert channels("0") == (7,)
    assert channels("imex/all") == ()
    assert channels("0", accept_envvar_unprivileged=False) == ()
    features = {"ignore-imex-channel-requests": True}
    assert channels("0", "imex/x", features=features) == ()
    assert mounts_request("imex/0").devices is None


@pytest.mark.parametrize("value", ["", "true", "Enabled", "enabled ", "1"])
def test_features_need_the_exact_word(value: str) -> None:
    assert request_for("NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_GDS={value}").options.features == ()


FEATURES = {
    "NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled", "NVIDIA_GDRCOPY": "enabled",
    "NVIDIA_NVSWITCH": "enabled", "NVIDIA_REQUIRE_JETPACK": "csv-mounts=all",
}  # fmt: skip


@pytest.mark.parametrize("name", [*FEATURES, "NVIDIA_IMEX_CHANNELS"])
def test_features_are_heard_where_devices_are(name: str) -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=0", f"{name}={FEATURES.get(name, '3')}")
    heard = mounts_request("0", env=env)
    assert (heard.options.features or heard.options.imex_channels) != ()
    alone = mounts_request("0", env=env, accept_envvar_unprivileged=False)
    assert (alone.options.features, alone.options.imex_channels) == ((), ())
    assert alone.devices == ("0",)
    [why] = [reason for _, reason in alone.ignored if reason.startswith(name)]
    assert "the container is not privileged" in why


def test_requirements_disabled_by_configuration_as_by_environment() -> None:
    env = ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_REQUIRE_CUDA=cuda>=12")
    assert request_for(*env).options.requirements == ("cuda>=12",)
    by_config = request_for(*env, disable_require=True)
    by_env = request_for(*env, "NVIDIA_DISABLE_REQUIRE=T")
    assert by_config == by_env
    assert (by_env.options.requirements, by_env.options.requirements_disabled) == ((), True)
    for no in ("false", "0", "yes", "TRue", " true", ""):
        assert not request_for(*env, f"NVIDIA_DISABLE_REQUIRE={no}").options.requirements_disabled


def test_legacy_version_that_is_none_is_no_matter_when_requirements_are_off() -> None:
    assert request_for("CUDA_VERSION=foo", disable_require=True).devices == ("all",)


def test_unsupported_capability_is_named() -> None:
    with pytest.raises(CapabilityError, match="'display'"):
        request_for(
            "NVIDIA_VISIBLE_DEVICES=0",
            "NVIDIA_DRIVER_CAPABILITIES=utility,display",
            supported_driver_capabilities="compute,utility",
        )
