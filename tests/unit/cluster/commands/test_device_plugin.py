"""gpuhook device-plugin: its options, and the output of --dry-run."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import paper
import pytest
from click.testing import CliRunner, Result
from plugin_settings import settings_of

from gpuhook.base.config.model import Config
from gpuhook.base.errors import ConfigError, DriverError, PluginError
from gpuhook.cluster.commands.device_plugin import device_plugin
from gpuhook.cluster.device_plugin import service
from gpuhook.cluster.device_plugin.options import INEFFECTIVE, OPTIONS
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.device_plugin.status import FOLDER
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory.model import Inventory
from gpuhook.monitor.followed import FollowedConfig


def run(*words: str, **environ: str) -> Result:
    with mock.patch.dict(os.environ, environ):
        return CliRunner().invoke(device_plugin, words, catch_exceptions=False)


@pytest.fixture
def empty(tmp_path: Path) -> str:
    """A configuration for a host without any driver."""
    path = tmp_path / "config.toml"
    (tmp_path / "root").mkdir()
    folder = f'state-dir = "{tmp_path}/state"'
    path.write_text(f'[gpuhook]\nroot = "{tmp_path}/root"\n{folder}\n')
    return str(path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, Config]]:
    """The options with which the service was started; nothing really starts."""
    found: list[tuple[Settings, Config]] = []

    def started(settings: Settings, config: Config, _: FollowedConfig) -> int:
        found.append((settings, config))
        return 3

    monkeypatch.setattr(service, "run", started)
    return found


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """A simulated machine with two AMD GPUs without device nodes; other vendors' drivers fail."""
    found = paper.machine("amd", tmp_path / "amd", 2)

    def inventory(_: Config, vendor: Vendor) -> Inventory:
        if vendor.names.NAME != "amd":
            raise DriverError("It fails", "Mend it")
        return found

    monkeypatch.setattr("gpuhook.cluster.commands.device_plugin._asked", inventory)
    return found


def test_options_files_and_variables_reach_the_service(
    started: list[Any], empty: str, tmp_path: Path
) -> None:
    file = tmp_path / "plugin.yaml"
    file.write_text("flags: {migStrategy: single, gdsEnabled: true}")
    done = run(
        "--config", empty, "--mig-strategy=mixed", "--pass-device-specs",
        "--device-list-strategy", "envvar", "--device-list-strategy=cdi-cri",
        "--fail-on-init-error=false", "--kubelet-socket=", "--xid", "13=fatal", "--xid=94=ignore",
        "--nvidia-driver-root", "/run/nvidia/driver",
        CONFIG_FILE=str(file), MIG_STRATEGY="none", DEVICE_ID_STRATEGY="index",
        DP_DISABLE_HEALTHCHECKS="68",
    )  # fmt: skip
    assert done.exit_code == 3, "that of the service"
    [(settings, config)] = started
    assert settings == settings_of(
        mig_strategy="mixed",
        pass_device_specs=True,
        device_list_strategy=("envvar", "cdi-cri"),
        device_id_strategy="index",
        fail_on_init_error=False,
        gds_enabled=True,
        register=False,
        driver_root="/run/nvidia/driver",
        xids={68: "ignore", 13: "fatal", 94: "ignore"},
        state_dir=config.state_dir,
        status_dir=FOLDER,
    )
    assert config.driver_root_of("nvidia") == "/run/nvidia/driver"
    assert "nvidia.com/gds" in done.stderr, "what goes badly together is said"


def test_every_option_is_accepted_and_ineffective_ones_give_a_warning(
    started: list[Any], empty: str
) -> None:
    names = {name for parameter in device_plugin.params for name in parameter.opts}
    for option in OPTIONS:
        assert {f"--{name}" for name in (option.flag, *option.old)} <= names
    for each in INEFFECTIVE:
        done = run("--config", empty, f"--{each.flag}", "x")
        assert f"--{each.flag} has no effect" in done.stderr
    assert len(started) == len(INEFFECTIVE)


def test_an_invalid_option_starts_nothing(started: list[Any], empty: str) -> None:
    with pytest.raises(ConfigError, match="--mig-strategy"):
        run("--config", empty, "--mig-strategy", "all")
    assert started == []


def test_a_dry_run_prints_devices_variables_and_nodes(
    amd: Inventory, empty: str, started: list[Any]
) -> None:
    with pytest.raises(DriverError):  # the other vendors' error, raised after the output
        run("--config", empty, "--dry-run")
    with mock.patch("gpuhook.cluster.commands.device_plugin.raise_last"):
        done = run("--config", empty, "--dry-run", "--pass-device-specs")
    lines = done.stdout.splitlines()
    first, second = (device.id for device in amd.devices)
    assert lines[1].split() == ["amd.com/gpu", first, "1", "-", "healthy"]
    assert lines[2].split()[1] == second
    assert f"  variable    AMD_VISIBLE_DEVICES={first}" in lines
    assert f"  node        {amd.root}/dev/kfd as /dev/kfd" in lines
    assert started == []


def test_a_dry_run_names_the_reason_of_an_unusable_device(amd: Inventory, empty: str) -> None:
    amd.nodes = ()
    with mock.patch("gpuhook.cluster.commands.device_plugin.raise_last"):
        done = run("--config", empty, "--dry-run")
    assert "there is no device node" in done.stdout
    assert "nothing: The device" in done.stdout


def test_a_dry_run_without_devices_is_an_error(amd: Inventory, empty: str) -> None:
    amd.devices = ()
    with pytest.raises(PluginError, match="no device to allocate"):
        run("--config", empty, "--dry-run")


def test_a_dry_run_without_a_driver_is_an_error(empty: str) -> None:
    with pytest.raises(DriverError):
        run("--config", empty, "--dry-run")
