"""The device plugin's options: their names as flags, as variables and in a file, and their values.

Names and meanings are those of NVIDIA's plugin, as far as it has them. A variable is called as
the flag is, in capitals and with _ for each -; our own begin with GPUHOOK_.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuhook.ground.errors import shown
from gpuhook.tools.kubernetes import settings as choices
from gpuhook.tools.kubernetes.settings import Settings, Sharing
from gpuhook.tools.vendors import parts
from gpuhook.tools.vendors.plugin_option import (
    CHOICE,
    FLAG,
    PATH,
    TEXT,
    WORDS,
    Kind,
    Option,
    seconds,
)
from gpuhook.vendors import registry

_SOCKET = "kubelet.sock"


def _socket(_: Option, text: str) -> str:
    folder, _slash, name = text.rpartition("/")
    if text and (name != _SOCKET or not folder.startswith("/")):
        raise ValueError(f"an absolute path that ends in /{_SOCKET}")
    return folder


_PLUGIN = ("flags", "plugin")

OWN = (
    Option(
        "device-list-strategy", "device_list_strategy", WORDS,
        "How a container is given its devices; several may be named.",
        (*_PLUGIN, "deviceListStrategy"), choices.STRATEGIES,
    ),
    Option(
        "device-id-strategy", "device_id_strategy", CHOICE, "What devices are called.",
        (*_PLUGIN, "deviceIDStrategy"), choices.ID_STRATEGIES,
    ),
    Option(
        "pass-device-specs", "pass_device_specs", FLAG,
        "Also give the device nodes themselves, with envvar and volume-mounts.",
        (*_PLUGIN, "passDeviceSpecs"),
    ),
    Option(
        "fail-on-init-error", "fail_on_init_error", FLAG,
        "End with status 1 if no device can be found at the start, instead of waiting for one.",
        ("flags", "failOnInitError"),
    ),
    Option(
        "shared-devices-allocation-policy", "shared_devices_allocation_policy", CHOICE,
        "Spread containers over shared devices, or fill one after the other.",
        (*_PLUGIN, "sharedDevicesAllocationPolicy"), choices.POLICIES,
    ),
    Option(
        "cdi-annotation-prefix", "cdi_annotation_prefix", TEXT,
        "What the keys of cdi-annotations begin with.", (*_PLUGIN, "cdiAnnotationPrefix"),
    ),
    Option(
        "driver-root", "driver_root", PATH,
        "Where the driver is installed, as the host sees it.  [default: as in config.toml]",
        ("flags", "nvidiaDriverRoot"), old=("nvidia-driver-root",),
    ),
    Option(
        "driver-root-ctr-path", "driver_root_ctr_path", PATH,
        "Where this process sees that folder, if it runs in a pod.",
        (*_PLUGIN, "containerDriverRoot"), old=("container-driver-root",),
    ),
    Option(
        "dev-root", "dev_root", PATH,
        "The folder above the nodes' /dev, as the host sees it.  [default: the driver root]",
        ("flags", "nvidiaDevRoot"), old=("nvidia-dev-root",),
    ),
    Option(
        "kubelet-socket", "kubelet_folder", Kind("a text", _socket),
        f"The kubelet's socket, whose name is {_SOCKET}; with an empty text nothing is "
        "registered.",
    ),
    Option(
        "driver-folder", "driver_folder", PATH,
        "With mounts: where gpuhook driver-folder keeps the driver's files, on the host.",
        ("gpuhook", "driverFolder"), is_ours=True,
    ),
    Option(
        "cdi-folder", "cdi_folder", PATH,
        "With cdi-cri and cdi-annotations: where CDI documents are kept, unless gpuhook install "
        "--cdi keeps them.", ("gpuhook", "cdiFolder"), is_ours=True,
    ),
    Option(
        "cdi-hook-path", "cdi_hook_path", PATH,
        "Where the host has the program gpuhook-cdi-hook that those documents name.  [default: "
        "beside this program]", ("gpuhook", "cdiHookPath"), is_ours=True,
    ),
    Option(
        "interval", "interval", seconds(0.1), "Seconds between two looks where no event comes.",
        ("gpuhook", "interval"), is_ours=True,
    ),
    Option(
        "recovery", "recovery", seconds(0),
        "Seconds without trouble after which a device is healthy again; 0: never.",
        ("gpuhook", "recovery"), is_ours=True,
    ),
)  # fmt: skip

# What vendors have options of their own, by name.
VENDORS: dict[str, parts.Plugin] = {
    name: plugin
    for name, names in registry.KNOWN.items()
    if (plugin := parts.plugin(names)) is not None
}


def _all() -> Iterator[Option]:
    """Yield the plugin's own options and every vendor's, in the order of the help."""
    others = [option for plugin in VENDORS.values() for option in plugin.OPTIONS]
    for own in OWN:
        yield from (option for option in others if option.before == own.flag)
        yield own
    yield from (option for option in others if not option.before)


OPTIONS = (*_all(),)


@dataclass(frozen=True)
class Ineffective:
    """An option of NVIDIA's that changes nothing here: why, and the values that need no word."""

    flag: str
    why: str
    place: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    old: tuple[str, ...] = ()


_DOCUMENTS = "gpuhook makes CDI documents with its own hook, which cdi-hook-path names"

INEFFECTIVE = (
    Ineffective("nvidia-cdi-hook-path", _DOCUMENTS, (*_PLUGIN, "nvidiaCDIHookPath")),
    Ineffective("nvidia-ctk-path", _DOCUMENTS, (*_PLUGIN, "nvidiaCTKPath")),
    Ineffective("cdi-feature-flags", _DOCUMENTS),
    Ineffective("cdi-disable-hooks", _DOCUMENTS),
    Ineffective(
        "mps-root", "gpuhook mps keeps the daemon and its folders on the node", ("flags", "mpsRoot")
    ),
    Ineffective(
        "device-discovery-strategy",
        "gpuhook finds out by itself which platform it is on",
        ("flags", "deviceDiscoveryStrategy"),
        ("auto",),
    ),
)
# All variables of the environment that say something, or could.
VARIABLES = (
    *(name for option in OPTIONS for name in option.variables),
    *(each.flag.upper().replace("-", "_") for each in INEFFECTIVE),
    *(name for plugin in VENDORS.values() for name in plugin.VARIABLES),
)
# Of NVIDIA's other program that reads the same file.
OF_OTHERS = (("flags", "gfd"), ("flags", "useNodeFeatureAPI"))


@dataclass
class Content:
    """What a file says: ``values`` by the options' flags; ``sharing`` by resource."""

    values: dict[str, Any] = field(default_factory=dict)
    sharing: dict[str, Sharing] = field(default_factory=dict)
    single_requests: bool = False
    warnings: list[str] = field(default_factory=list)


def wrong(where: str, value: object, why: ValueError) -> str:
    """Return the sentence about a value that an option can't have."""
    return f"{where} is {shown(value)} and must be {why}"


def default(option: Option) -> Any:
    """Return what holds where nothing sets an option, None where that can't be said in a word."""
    owners = [plugin.SETTINGS for plugin in VENDORS.values() if option in plugin.OPTIONS]
    return getattr((owners or [Settings])[0], option.field, None)
