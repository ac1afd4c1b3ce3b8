"""Settings of the device plugin, with NVIDIA's options given like the other fields."""

from dataclasses import fields
from typing import Any

from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.vendors.nvidia.plugin import PluginSettings

_NVIDIAS = {field.name for field in fields(PluginSettings)}


def settings_of(**facts: Any) -> Settings:
    """Return settings with these fields, each in the general part or in NVIDIA's."""
    own = {name: value for name, value in facts.items() if name not in _NVIDIAS}
    nvidias = {name: value for name, value in facts.items() if name in _NVIDIAS}
    return Settings(**own, vendors={"nvidia": PluginSettings(**nvidias)})
