"""Every vendor's modules for commands keep their contracts: mypy compares them here."""

from pathlib import Path

import pytest

import gpuhook
from gpuhook.cluster.vendor_parts import ClaimConfig, Labels, Plugin
from gpuhook.cluster.vendors.amd import labels as amd_labels
from gpuhook.cluster.vendors.nvidia import claim_config as nvidia_claim_config
from gpuhook.cluster.vendors.nvidia import labels as nvidia_labels
from gpuhook.cluster.vendors.nvidia import plugin as nvidia_plugin
from gpuhook.metrics.vendor_parts import MakersSeries, Readings, Telemetry
from gpuhook.metrics.vendors.amd import telemetry as amd_telemetry
from gpuhook.metrics.vendors.intel_gpu import telemetry as intel_gpu_telemetry
from gpuhook.metrics.vendors.nvidia import makers_series as nvidia_makers_series
from gpuhook.metrics.vendors.nvidia import telemetry as nvidia_telemetry
from gpuhook.monitor.vendor_parts import DeviceSettings, Events, Links
from gpuhook.monitor.vendors.nvidia import events as nvidia_events
from gpuhook.monitor.vendors.nvidia import links as nvidia_links
from gpuhook.monitor.vendors.nvidia import settings as nvidia_settings
from gpuhook.tools.vendor_parts import DriverFolder
from gpuhook.tools.vendors.nvidia import driver_folder as nvidia_driver_folder
from gpuhook_simulate import vendors as simulators
from gpuhook_simulate.vendors import Simulator, amd, ascend, gaudi, intel_gpu, intel_npu, neuron

SIMULATORS: tuple[Simulator, ...] = (
    amd, ascend, gaudi, intel_gpu, intel_npu, neuron,
)  # fmt: skip
READINGS: tuple[Readings, ...] = (amd_telemetry, intel_gpu_telemetry)
TELEMETRY: tuple[Telemetry, ...] = (nvidia_telemetry,)
CLAIM_CONFIGS: tuple[ClaimConfig, ...] = (nvidia_claim_config,)
SETTINGS: tuple[DeviceSettings, ...] = (nvidia_settings,)
EVENTS: tuple[Events, ...] = (nvidia_events,)
LABELS: tuple[Labels, ...] = (amd_labels, nvidia_labels)
LINKS: tuple[Links, ...] = (nvidia_links,)
DRIVER_FOLDERS: tuple[DriverFolder, ...] = (nvidia_driver_folder,)
MAKERS_SERIES: tuple[MakersSeries, ...] = (nvidia_makers_series,)
PLUGINS: tuple[Plugin, ...] = (nvidia_plugin,)

FOLDER = Path(gpuhook.__file__).parent


def test_none_is_forgotten() -> None:
    known = (*CLAIM_CONFIGS, *READINGS, *TELEMETRY, *DRIVER_FOLDERS, *EVENTS, *LABELS,
             *LINKS, *MAKERS_SERIES, *PLUGINS, *SETTINGS)  # fmt: skip
    compared = {str(getattr(each, "__name__", "")) for each in known}
    kinds = (
        "claim_config",
        "driver_folder",
        "telemetry",
        "events",
        "labels",
        "links",
        "makers_series",
        "plugin",
        "settings",
    )
    paths = [path for kind in kinds for path in FOLDER.glob(f"*/vendors/[a-z]*/{kind}*")]
    there = {f"{path.parent.name}.{path.stem}" for path in paths}
    named = {".".join(name.split(".")[3:]) for name in compared}  # gpuhook.PART.vendors.
    assert named == there


@pytest.mark.parametrize("plugin", PLUGINS)
def test_options_set_fields(plugin: Plugin) -> None:
    assert {option.field for option in plugin.OPTIONS} <= {*vars(plugin.settings({}, {}))}
    assert plugin.settings({}, {}) == plugin.SETTINGS()


def test_no_simulator_is_forgotten() -> None:
    compared = {str(getattr(each, "__name__", "")).rpartition(".")[2] for each in SIMULATORS}
    there = {path.stem for path in Path(simulators.__file__).parent.glob("[a-z]*")}
    # Those of declared vendors are made for each; NVIDIA's is a folder.
    assert compared == there - {"declared", "nvidia"}
