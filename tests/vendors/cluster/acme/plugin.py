"""Options of the device plugin for ACME's NPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuhook.cluster.plugin_option import FLAG, PluginOption

VARIABLES = ()


@dataclass(frozen=True)
class PluginSettings:
    """Value of the option: whether only whole NPUs are offered."""

    whole: bool = False


SETTINGS = PluginSettings
OPTIONS = (
    PluginOption(
        "acme-whole", "whole", FLAG, "Hand out no part of an NPU.", ("acme", "whole"), is_ours=True
    ),
)


def settings(values: Mapping[str, Any], _: Mapping[str, str]) -> PluginSettings:
    """Return the settings with the option's values."""
    return PluginSettings(**values)


def advice(chosen: PluginSettings, *, by_cdi: bool) -> Iterator[str]:
    """Yield advice about the chosen settings."""
    if chosen.whole and by_cdi:
        yield "acme-whole keeps parts out of lists alone: their CDI devices are there"
