"""Contracts of every vendor's modules for commands, which mypy checks here."""

from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

import gpuhook
from gpuhook.cluster.vendor_parts import ClaimConfig, Labels, PluginModule
from gpuhook.cluster.vendors.amd import labels as amd_labels
from gpuhook.cluster.vendors.nvidia import claim_config as nvidia_claim_config
from gpuhook.cluster.vendors.nvidia import labels as nvidia_labels
from gpuhook.cluster.vendors.nvidia import plugin as nvidia_plugin
from gpuhook.core import contract
from gpuhook.metrics.vendor_parts import ExporterSeries, TelemetryModule
from gpuhook.metrics.vendors.nvidia import exporter_series as nvidia_exporter_series
from gpuhook.metrics.vendors.nvidia import telemetry as nvidia_telemetry
from gpuhook.monitor.vendor_parts import DeviceSettings, EventsModule, Links
from gpuhook.monitor.vendors.nvidia import events as nvidia_events
from gpuhook.monitor.vendors.nvidia import links as nvidia_links
from gpuhook.monitor.vendors.nvidia import settings as nvidia_settings
from gpuhook.tools.driver_folder import DriverFolder
from gpuhook.tools.vendors.nvidia import driver_folder as nvidia_driver_folder
from gpuhook.vendors import registry
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors import simulator

TELEMETRY: tuple[TelemetryModule, ...] = (nvidia_telemetry,)
CLAIM_CONFIGS: tuple[ClaimConfig, ...] = (nvidia_claim_config,)
SETTINGS: tuple[DeviceSettings, ...] = (nvidia_settings,)
EVENTS: tuple[EventsModule, ...] = (nvidia_events,)
LABELS: tuple[Labels, ...] = (amd_labels, nvidia_labels)
LINKS: tuple[Links, ...] = (nvidia_links,)
DRIVER_FOLDERS: tuple[DriverFolder, ...] = (nvidia_driver_folder,)
EXPORTER_SERIES: tuple[ExporterSeries, ...] = (nvidia_exporter_series,)
PLUGINS: tuple[PluginModule, ...] = (nvidia_plugin,)

FOLDER = Path(gpuhook.__file__).parent


def test_every_vendor_module_for_commands_is_checked() -> None:
    known = (*CLAIM_CONFIGS, *TELEMETRY, *DRIVER_FOLDERS, *EVENTS, *LABELS,
             *LINKS, *EXPORTER_SERIES, *PLUGINS, *SETTINGS)  # fmt: skip
    compared = {str(getattr(each, "__name__", "")) for each in known}
    kinds = (
        "claim_config",
        "driver_folder",
        "telemetry",
        "events",
        "labels",
        "links",
        "exporter_series",
        "plugin",
        "settings",
    )
    paths = [path for kind in kinds for path in FOLDER.glob(f"*/vendors/[a-z]*/{kind}*")]
    there = {f"{path.parent.name}.{path.stem}" for path in paths}
    named = {".".join(name.split(".")[3:]) for name in compared}  # gpuhook.PART.vendors.
    assert named == there


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugin_options_match_the_settings_fields(plugin: PluginModule) -> None:
    assert {option.field for option in plugin.OPTIONS} <= {*vars(plugin.settings({}, {}))}
    assert plugin.settings({}, {}) == plugin.SETTINGS()


@pytest.mark.parametrize("names", registry.BUILT_IN.values(), ids=registry.BUILT_IN)
def test_every_vendor_but_nvidia_has_a_simulator(names: ModuleType) -> None:
    """NVIDIA's simulator is a package with commands of its own."""
    found = getattr(simulator(names), "simulate", None)
    assert (found is None) == (names.NAME == "nvidia")
    if found is not None:
        *asked, made = get_type_hints(found).values()
        assert asked == [Tree, int, dict[str, str]]
        assert made == list[str]


OBLIGATORY = (
    "NAME", "TITLE", "NOUN", "ID_TITLE", "VARIABLES", "KIND", "TYPES", "DRIVER_WORDS",
    "LOST_REMEDY",
)  # fmt: skip


@pytest.mark.parametrize("names", registry.BUILT_IN.values(), ids=registry.BUILT_IN)
def test_vendor_constants_have_the_expected_types(names: ModuleType) -> None:
    """Nine constants are required; ``registry.complete`` has defaults for the others."""
    plain = ModuleType("plain")
    for word in OBLIGATORY:
        setattr(plain, word, getattr(names, word))
    completed = vars(registry.complete(plain))
    for word, value in vars(names).items():
        if word.isupper() and word not in contract.OPTIONAL_NAMES:
            assert type(value) is type(completed[word]), word
