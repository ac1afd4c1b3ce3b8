"""The device plugin's options: their names as flags, as variables and in a file, and their values.

Names and meanings are those of NVIDIA's plugin, as far as it has them. A variable has the flag's
name, in capitals and with _ for each -; gpuhook's own begin with GPUHOOK_.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuhook.base.errors import shown
from gpuhook.cluster import vendor_parts
from gpuhook.cluster.device_plugin import settings as choices
from gpuhook.cluster.device_plugin.settings import Settings, Sharing
from gpuhook.cluster.plugin_option import (
    CHOICE,
    FLAG,
    PATH,
    TEXT,
    WORDS,
    Kind,
    PluginOption,
    seconds,
)
from gpuhook.vendors import registry

_SOCKET = "kubelet.sock"


def _socket(_: PluginOption, text: str) -> str:
    folder, _slash, name = text.rpartition("/")
    if text and (name != _SOCKET or not folder.startswith("/")):
        raise ValueError(f"an absolute path that ends in /{_SOCKET}")
    return folder


_PLUGIN = ("flags", "plugin")

OWN = (
    PluginOption(
        "device-list-strategy", "device_list_strategy", WORDS,
        "How a container gets its devices; several may be named.",
        (*_PLUGIN, "deviceListStrategy"), choices.STRATEGIES,
    ),
    PluginOption(
        "device-id-strategy", "device_id_strategy", CHOICE, "How devices are named.",
        (*_PLUGIN, "deviceIDStrategy"), choices.ID_STRATEGIES,
    ),
    PluginOption(
        "pass-device-specs", "pass_device_specs", FLAG,
        "With envvar and volume-mounts: also add the device nodes.",
        (*_PLUGIN, "passDeviceSpecs"),
    ),
    PluginOption(
        "fail-on-init-error", "fail_on_init_error", FLAG,
        "Exit with status 1 if no device is found at the start, instead of waiting for one.",
        ("flags", "failOnInitError"),
    ),
    PluginOption(
        "shared-devices-allocation-policy", "shared_devices_allocation_policy", CHOICE,
        "Spread containers over shared devices, or fill one after the other.",
        (*_PLUGIN, "sharedDevicesAllocationPolicy"), choices.POLICIES,
    ),
    PluginOption(
        "cdi-annotation-prefix", "cdi_annotation_prefix", TEXT,
        "Prefix of the keys of cdi-annotations.", (*_PLUGIN, "cdiAnnotationPrefix"),
    ),
    PluginOption(
        "driver-root", "driver_root", PATH,
        "Where the driver is installed, as the host sees it.  [default: as in config.toml]",
        ("flags", "nvidiaDriverRoot"), old=("nvidia-driver-root",),
    ),
    PluginOption(
        "driver-root-ctr-path", "driver_root_ctr_path", PATH,
        "Where this process sees that folder, if it runs in a pod.",
        (*_PLUGIN, "containerDriverRoot"), old=("container-driver-root",),
    ),
    PluginOption(
        "dev-root", "dev_root", PATH,
        "The folder above the nodes' /dev, as the host sees it.  [default: the driver root]",
        ("flags", "nvidiaDevRoot"), old=("nvidia-dev-root",),
    ),
    PluginOption(
        "kubelet-socket", "kubelet_folder", Kind("a text", _socket),
        f"The kubelet's socket, whose name is {_SOCKET}; an empty text registers nothing.",
    ),
    PluginOption(
        "driver-folder", "driver_folder", PATH,
        "With mounts: where gpuhook driver-folder keeps the driver's files, on the host.",
        ("gpuhook", "driverFolder"), is_ours=True,
    ),
    PluginOption(
        "cdi-folder", "cdi_folder", PATH,
        "With cdi-cri and cdi-annotations: the folder of the CDI specs, unless gpuhook install "
        "--cdi manages them.", ("gpuhook", "cdiFolder"), is_ours=True,
    ),
    PluginOption(
        "cdi-hook-path", "cdi_hook_path", PATH,
        "Host path of the program gpuhook-cdi-hook for those CDI specs.  [default: in this "
        "program's folder]", ("gpuhook", "cdiHookPath"), is_ours=True,
    ),
    PluginOption(
        "interval", "interval", seconds(0.1),
        "Polling interval in seconds when the kernel sends no events.",

        ("gpuhook", "interval"), is_ours=True,
    ),
    PluginOption(
        "recovery", "recovery", seconds(0),
        "Seconds without trouble after which a device is healthy again; 0: never.",
        ("gpuhook", "recovery"), is_ours=True,
    ),
    PluginOption(
        "metrics-listen", "metrics_listen", TEXT,
        "Serve metrics of allocations for Prometheus at this HOST:PORT.  [default: nowhere]",
        ("gpuhook", "metricsListen"), is_ours=True,
    ),
)  # fmt: skip

# The plugins of vendors with options of their own, by the vendor's name.
VENDORS: dict[str, vendor_parts.PluginModule] = {
    name: plugin
    for name, names in registry.BUILT_IN.items()
    if (plugin := vendor_parts.plugin(names)) is not None
}


def _all() -> Iterator[PluginOption]:
    """Yield the plugin's own options and every vendor's, in the order of the help."""
    others = [option for plugin in VENDORS.values() for option in plugin.OPTIONS]
    for own in OWN:
        yield from (option for option in others if option.before == own.flag)
        yield own
    yield from (option for option in others if not option.before)


OPTIONS = (*_all(),)


@dataclass(frozen=True)
class IneffectiveOption:
    """An option of NVIDIA's plugin without effect here: why, and the values without a warning."""

    flag: str
    why: str
    place: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    old: tuple[str, ...] = ()


_DOCUMENTS = "gpuhook generates CDI specs with its own hook, which cdi-hook-path sets"

INEFFECTIVE = (
    IneffectiveOption("nvidia-cdi-hook-path", _DOCUMENTS, (*_PLUGIN, "nvidiaCDIHookPath")),
    IneffectiveOption("nvidia-ctk-path", _DOCUMENTS, (*_PLUGIN, "nvidiaCTKPath")),
    IneffectiveOption("cdi-feature-flags", _DOCUMENTS),
    IneffectiveOption("cdi-disable-hooks", _DOCUMENTS),
    IneffectiveOption(
        "mps-root", "gpuhook mps runs the daemon and owns its folders", ("flags", "mpsRoot")
    ),
    IneffectiveOption(
        "device-discovery-strategy",
        "gpuhook detects the platform itself",
        ("flags", "deviceDiscoveryStrategy"),
        ("auto",),
    ),
)
# All environment variables that set an option, or could.
VARIABLES = (
    *(name for option in OPTIONS for name in option.variables),
    *(each.flag.upper().replace("-", "_") for each in INEFFECTIVE),
    *(name for plugin in VENDORS.values() for name in plugin.VARIABLES),
)
# Options of NVIDIA's other program that reads the same file.
OF_OTHERS = (("flags", "gfd"), ("flags", "useNodeFeatureAPI"))


@dataclass
class Content:
    """A file's content: ``values`` by the options' flags; ``sharing`` by resource."""

    values: dict[str, Any] = field(default_factory=dict)
    sharing: dict[str, Sharing] = field(default_factory=dict)
    single_requests: bool = False
    warnings: list[str] = field(default_factory=list)


def wrong(where: str, value: object, why: ValueError) -> str:
    """Return the sentence about an option's invalid value."""
    return f"{where} is {shown(value)} and must be {why}"


def default(option: PluginOption) -> Any:
    """Return an option's default, None if it has no fixed one."""
    owners = [plugin.SETTINGS for plugin in VENDORS.values() if option in plugin.OPTIONS]
    return getattr((owners or [Settings])[0], option.field, None)
