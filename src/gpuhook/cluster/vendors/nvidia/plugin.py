"""Options of the device plugin for NVIDIA GPUs, with the names of NVIDIA's own plugin."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuhook.base.errors import listed
from gpuhook.cluster.plugin_option import CHOICE, FLAG, Kind, PluginOption, number, numbers, words
from gpuhook.monitor.vendor_parts import ACTIONS
from gpuhook.monitor.vendors.nvidia import xids

DOMAIN = "nvidia.com"
NONE, SINGLE = "none", "single"
_CHANNELS = 1 << 20  # the driver makes IMEX channels 0 to 1048575


@dataclass(frozen=True)
class PluginSettings:
    """The values of the options; the fields have the flags' names.

    ``xids`` are the administrator's changes to the table of XIDs: number -> fatal, application or
    ignore. ``listens`` is False if all health checks are disabled.
    """

    mig_strategy: str = NONE
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    imex_channel_ids: tuple[int, ...] = ()
    imex_required: bool = False
    xids: Mapping[int, str] = field(default_factory=dict)
    listens: bool = True

    @property
    def features(self) -> tuple[str, ...]:
        """The features that every container with a GPU gets, named as in NVIDIA's CDI kinds."""
        switches = {
            "gds": self.gds_enabled,
            "mofed": self.mofed_enabled,
            "gdrcopy": self.gdrcopy_enabled,
        }
        return tuple(name for name, on in switches.items() if on)


SETTINGS = PluginSettings
VARIABLES = (xids.DISABLED, xids.ENABLED)


def _parse_xids(_: PluginOption, text: str) -> dict[int, str]:
    found = {}
    for word in filter(None, words(text)):
        name, _equals, action = (part.strip() for part in word.partition("="))
        xid = number(name)
        if xid is None or action not in ACTIONS:
            raise ValueError(f"NUMBER=ACTION with an action of {listed([*ACTIONS])}")
        found[xid] = action
    return found


_XIDS = Kind("NUMBER=ACTION", _parse_xids, "N=ACTION", (str, dict), several=True)
_NEXT = "shared-devices-allocation-policy"

OPTIONS = (
    PluginOption(
        "mig-strategy", "mig_strategy", CHOICE,
        "How MIG devices are offered: not at all, as nvidia.com/gpu, or by their profiles.",
        ("flags", "migStrategy"), (NONE, SINGLE, "mixed"), before="device-list-strategy",
    ),
    PluginOption(
        "gdrcopy-enabled", "gdrcopy_enabled", FLAG, "Add GDRCopy's node to every GPU.",
        ("flags", "gdrcopyEnabled"), before=_NEXT,
    ),
    PluginOption(
        "gds-enabled", "gds_enabled", FLAG, "Add GPUDirect Storage's nodes to every GPU.",
        ("flags", "gdsEnabled"), before=_NEXT,
    ),
    PluginOption(
        "mofed-enabled", "mofed_enabled", FLAG, "Add InfiniBand's nodes to every GPU.",
        ("flags", "mofedEnabled"), before=_NEXT,
    ),
    PluginOption(
        "imex-channel-ids", "imex_channel_ids", numbers(_CHANNELS),
        "IMEX channels to add to every GPU.", ("imex", "channelIDs"), before=_NEXT,
    ),
    PluginOption(
        "imex-required", "imex_required", FLAG,
        "Allocate no GPU while one of these channels is missing.", ("imex", "required"),
        before=_NEXT,
    ),
    PluginOption(
        "xid", "xids", _XIDS,
        f"Effect of an XID on its GPU, such as 109=fatal; the actions are {', '.join(ACTIONS)}.",
        ("gpuhook", "xids"), is_ours=True,
    ),
)  # fmt: skip


def settings(values: Mapping[str, Any], environ: Mapping[str, str]) -> PluginSettings:
    """Return the settings of options' values by field, and of the environment's health checks."""
    listens, by_environ = xids.policy(environ)
    actions = {**by_environ, **values.get("xids", {})}
    return PluginSettings(**{**values, "xids": actions, "listens": listens})


def advice(chosen: PluginSettings, *, by_cdi: bool) -> Iterator[str]:
    """Yield warnings about settings that conflict with each other."""
    names = [*chosen.features, *(["imex-channel"] if chosen.imex_channel_ids else [])]
    if by_cdi and names:
        wanted = ", ".join(f"{DOMAIN}/{name}" for name in names)
        yield (
            f"gpuhook generates no CDI specs of {wanted}: containers start only if "
            "others exist (nvidia-ctk cdi generate)"
        )
