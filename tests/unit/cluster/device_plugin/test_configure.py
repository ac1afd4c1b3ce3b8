"""The device plugin's settings: their precedence, their errors, and the driver root they select."""

from dataclasses import replace
from pathlib import Path

import pytest
from plugin_settings import settings_of

from gpuhook.base.config.model import Config
from gpuhook.base.errors import ConfigError
from gpuhook.cluster.device_plugin.configure import apply, read
from gpuhook.cluster.device_plugin.options import OPTIONS, VENDORS
from gpuhook.cluster.device_plugin.settings import STRATEGIES, Settings
from gpuhook.cluster.device_plugin.status import FOLDER
from gpuhook.cluster.plugin_option import FLAG
from gpuhook.cluster.vendors.nvidia.plugin import PluginSettings


def test_without_settings_the_defaults_count() -> None:
    assert read({}, {}) == (settings_of(), [])


def test_flags_override_variables_and_variables_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("flags: {migStrategy: mixed}")
    file = {"CONFIG_FILE": str(path)}
    assert read({}, file)[0].vendors["nvidia"].mig_strategy == "mixed"
    assert (
        read({}, {**file, "MIG_STRATEGY": "single"})[0].vendors["nvidia"].mig_strategy == "single"
    )
    flags = {"mig-strategy": "none"}
    assert (
        read(flags, {**file, "MIG_STRATEGY": "single"})[0].vendors["nvidia"].mig_strategy == "none"
    )
    assert (
        read({"config-file": str(path)}, {"CONFIG_FILE": "/absent"})[0]
        .vendors["nvidia"]
        .mig_strategy
        == "mixed"
    )


EXAMPLES = {
    "mig-strategy": ("mixed", "mixed"),
    "device-list-strategy": ("envvar, cdi-cri,envvar", ("envvar", "cdi-cri")),
    "device-id-strategy": ("index", "index"),
    "imex-channel-ids": ("0,2", (0, 2)),
    "shared-devices-allocation-policy": ("packed", "packed"),
    "cdi-annotation-prefix": ("x/", "x/"),
    "kubelet-socket": ("/k0s/kubelet.sock", "/k0s"),
    "interval": ("2.5", 2.5),
    "recovery": ("0", 0.0),
    "metrics-listen": ("127.0.0.1:9837", "127.0.0.1:9837"),
    "xid": ("79=ignore, 13=fatal", {79: "ignore", 13: "fatal"}),
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_every_option_is_read_as_flag_and_as_variable(option: object) -> None:
    [one] = [each for each in OPTIONS if each is option]
    usual = ("true", True) if one.kind is FLAG else ("/some/path", "/some/path")
    text, value = EXAMPLES.get(one.flag, usual)
    found = [read({name: text}, {})[0] for name in (one.flag, *one.old)]
    found += [read({}, {name: text})[0] for name in one.variables]
    for settings in found:
        owner = settings if hasattr(settings, one.field) else settings.vendors["nvidia"]
        assert getattr(owner, one.field) == value
    assert one.is_ours == one.variables[0].startswith("GPUHOOK_")


@pytest.mark.protects(
    "plugin-memory-strategy",
    "memory shares are offered only by volume mounts, so that pods can't evade them",
)
@pytest.mark.parametrize(
    "strategy",
    [*(each for each in STRATEGIES if each != "volume-mounts"), "volume-mounts,envvar"],
)
def test_memory_shares_need_volume_mounts_as_the_only_strategy(
    tmp_path: Path, strategy: str
) -> None:
    path = tmp_path / "f"
    path.write_text("sharing: {memory: {resources: [{name: gpu, replicas: 2}]}}")
    flags = {"config-file": str(path)}
    with pytest.raises(ConfigError, match="needs volume-mounts as the only strategy"):
        read({**flags, "device-list-strategy": strategy}, {})
    found, _ = read({**flags, "device-list-strategy": "volume-mounts"}, {})
    assert found.sharing["nvidia.com/gpu"].memory == ("50%", "50%")


@pytest.mark.parametrize("word", ["1", "t", "T", "TRUE", "true", "True"])
def test_boolean_variables_accept_every_word_for_true(word: str) -> None:
    assert read({}, {"PASS_DEVICE_SPECS": word})[0].pass_device_specs


def test_empty_variables_keep_all_defaults_except_the_socket() -> None:
    empty = {name: "" for option in OPTIONS for name in option.variables}
    settings, _ = read({}, empty)
    assert settings == settings_of(register=False), "but that of the socket"


def test_an_empty_kubelet_socket_turns_registration_off() -> None:
    assert read({"kubelet-socket": ""}, {})[0] == settings_of(register=False)


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("mig-strategy", "all", "--mig-strategy is 'all' and must be one of none, single, mixed"),
        ("pass-device-specs", "yes", "true or false"),
        ("device-list-strategy", "envvar,", "one or several of envvar"),
        ("driver-root", "x", "an absolute path"),
        ("kubelet-socket", "/a/other.sock", "ends in /kubelet.sock"),
        ("kubelet-socket", "kubelet.sock", "an absolute path"),
        ("imex-channel-ids", "a", "numbers from 0"),
        ("interval", "0", "at least 0.1"),
        ("xid", "79", "NUMBER=ACTION"),
    ],
)
def test_an_invalid_option_or_variable_is_refused(flag: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({flag: text}, {})
    assert words in caught.value.cause
    variable = flag.upper().replace("-", "_")
    variable = {"INTERVAL": "GPUHOOK_INTERVAL", "XID": "GPUHOOK_XID"}.get(variable, variable)
    with pytest.raises(ConfigError, match=rf"\${variable} is "):
        read({}, {variable: text})


def test_options_without_effect_give_a_warning() -> None:
    _, warnings = read({"mps-root": "/x"}, {"NVIDIA_CDI_HOOK_PATH": "/usr/bin/nvidia-ctk"})
    assert [each.partition(" ")[0] for each in warnings] == ["$NVIDIA_CDI_HOOK_PATH", "--mps-root"]
    assert read({}, {"DEVICE_DISCOVERY_STRATEGY": "auto"})[1] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"device-list-strategy": "cdi-cri,cdi-annotations"}, "every name twice"),
        ({"device-list-strategy": "cdi-cri,volume-mounts"}, "devices twice"),
        (
            {"device-list-strategy": "cdi-cri", "pass-device-specs": "true"},
            "no effect with only CDI",
        ),
        ({"device-list-strategy": "cdi-cri", "gds-enabled": "true"}, "nvidia.com/gds"),
    ],
)
def test_conflicting_options_give_a_warning(flags: dict[str, str], words: str) -> None:
    [warning] = read(flags, {})[1]
    assert words in warning


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_valid_device_list_strategies_give_no_warning(strategy: str) -> None:
    assert read({"device-list-strategy": strategy}, {})[1] == []
    both = f"{strategy},envvar"
    assert read({"device-list-strategy": both}, {"PASS_DEVICE_SPECS": "1"})[1] == []


def test_health_check_variables_are_applied() -> None:
    environ = {"DP_DISABLE_HEALTHCHECKS": "all,68", "DP_ENABLE_HEALTHCHECKS": "13"}
    found: PluginSettings = read({}, {**environ, "GPUHOOK_XID": "13=application"})[0].vendors[
        "nvidia"
    ]
    assert not found.listens
    assert found.xids[13] == "application", "ours says more"
    assert read({}, {"DP_DISABLE_HEALTHCHECKS": "68"})[0].vendors["nvidia"].listens


def test_no_two_options_share_a_name() -> None:
    names = [name for option in OPTIONS for name in (option.flag, *option.old)]
    assert len(names) == len({*names})
    theirs = [option for plugin in VENDORS.values() for option in plugin.OPTIONS]
    assert {*theirs} <= {*OPTIONS}, "each is before one that there is"
    places = [option.place for option in OPTIONS if option.place]
    assert len(places) == len({*places})


def test_in_a_pod_the_driver_root_is_read_at_its_mounted_path(tmp_path: Path) -> None:
    config = Config()
    pod = Settings(driver_root="/run/nvidia/driver", driver_root_ctr_path=str(tmp_path))
    assert apply(pod, config) == replace(pod, state_dir=config.state_dir, status_dir=FOLDER)
    assert config.driver_root_of("nvidia") == str(tmp_path)


def test_in_a_pod_config_toml_names_the_hosts_driver_root(tmp_path: Path) -> None:
    config = Config()
    config.driver_root = "/srv/gpus"
    found = apply(Settings(driver_root_ctr_path=str(tmp_path)), config)
    assert found.driver_root == "/srv/gpus"
    assert config.driver_root_of("amd") == str(tmp_path)


def test_outside_a_pod_the_driver_root_is_used_directly(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    config = Config()
    config.root = "/srv/gpus"
    settings = Settings(driver_root_ctr_path=absent)
    assert apply(settings, config) == replace(
        settings, state_dir=config.state_dir, status_dir=FOLDER
    )
    assert config.root == "/srv/gpus"
    settings = Settings(driver_root="/run/nvidia/driver", driver_root_ctr_path=absent)
    assert apply(settings, config) == replace(
        settings, state_dir=config.state_dir, status_dir=FOLDER
    )
    assert config.root == "/run/nvidia/driver"
