"""The device plugin's options: their names as flags, as variables and in a file, and their values.

Names and meanings are those of NVIDIA's plugin, as far as it has them. A variable is called as
the flag is, in capitals and with _ for each -; our own begin with GPUHOOK_.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuhook.ground.errors import listed, shown
from gpuhook.tools.kubernetes import settings as choices
from gpuhook.tools.kubernetes.settings import Sharing
from gpuhook.tools.vendors.parts import ACTIONS

FLAG, TEXT, CHOICE, WORDS = "true or false", "a text", "one of", "one or several of"
NUMBERS, PATH, SECONDS, XIDS = "numbers", "an absolute path", "a number of seconds", "NUMBER=ACTION"

_TRUE = ("1", "t", "T", "TRUE", "true", "True")  # as Go reads them
_FALSE = ("0", "f", "F", "FALSE", "false", "False")
_CHANNELS = 1 << 20  # the driver makes IMEX channels 0 to 1048575
_SOCKET = "kubelet.sock"


@dataclass(frozen=True)
class Option:
    """One option: ``field`` of Settings, ``place`` in NVIDIA's file, ``old`` names of the flag."""

    flag: str
    field: str
    kind: str
    help: str
    place: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    is_ours: bool = False

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of the environment that set it, the first that is set counts."""
        prefix = "gpuhook_" if self.is_ours else ""
        return tuple(f"{prefix}{each}".upper().replace("-", "_") for each in (self.flag, *self.old))


_PLUGIN = ("flags", "plugin")

OPTIONS = (
    Option(
        "mig-strategy", "mig_strategy", CHOICE,
        "How MIG devices are offered: not at all, as nvidia.com/gpu, or by their profiles.",
        ("flags", "migStrategy"), choices.MIG_STRATEGIES,
    ),
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
        "gdrcopy-enabled", "gdrcopy_enabled", FLAG, "Give GDRCopy's node with every GPU.",
        ("flags", "gdrcopyEnabled"),
    ),
    Option(
        "gds-enabled", "gds_enabled", FLAG, "Give GPUDirect Storage's nodes with every GPU.",
        ("flags", "gdsEnabled"),
    ),
    Option(
        "mofed-enabled", "mofed_enabled", FLAG, "Give InfiniBand's nodes with every GPU.",
        ("flags", "mofedEnabled"),
    ),
    Option(
        "imex-channel-ids", "imex_channel_ids", NUMBERS, "IMEX channels to give with every GPU.",
        ("imex", "channelIDs"),
    ),
    Option(
        "imex-required", "imex_required", FLAG,
        "Hand out no GPU while one of these channels is missing.", ("imex", "required"),
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
        "kubelet-socket", "kubelet_folder", TEXT,
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
        "interval", "interval", SECONDS, "Seconds between two looks where no event comes.",
        ("gpuhook", "interval"), is_ours=True,
    ),
    Option(
        "recovery", "recovery", SECONDS,
        "Seconds without trouble after which a device is healthy again; 0: never.",
        ("gpuhook", "recovery"), is_ours=True,
    ),
    Option(
        "xid", "xids", XIDS,
        f"What an XID does to its GPU, such as 109=fatal; the actions are {', '.join(ACTIONS)}.",
        ("gpuhook", "xids"), is_ours=True,
    ),
)  # fmt: skip


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
    Ineffective("mps-root", "gpuhook shares GPUs by time-slicing alone", ("flags", "mpsRoot")),
    Ineffective(
        "device-discovery-strategy",
        "gpuhook finds out by itself which platform it is on",
        ("flags", "deviceDiscoveryStrategy"),
        ("auto",),
    ),
)
# Of NVIDIA's other program that reads the same file.
OF_OTHERS = (("flags", "gfd"), ("flags", "useNodeFeatureAPI"))


@dataclass
class Content:
    """What a file says: ``values`` by the options' fields; ``sharing`` by resource."""

    values: dict[str, Any] = field(default_factory=dict)
    sharing: dict[str, Sharing] = field(default_factory=dict)
    single_requests: bool = False
    warnings: list[str] = field(default_factory=list)


# Values -----------------------------------------------------------------------------------------


def parse(option: Option, text: str) -> Any:
    """Return the value that a text stands for; ValueError, with what is expected, where none."""
    return _PARSERS[option.kind](option, text.strip())


def check(option: Option, value: Any) -> Any:
    """Return a value as Settings has it, of one that a file has; ValueError as ``parse``."""
    if option.kind in (NUMBERS, WORDS) and isinstance(value, list):
        return _PARSERS[option.kind](option, ",".join(map(str, value)))
    if option.kind == XIDS and isinstance(value, dict):
        return _xids(option, ",".join(f"{key}={each}" for key, each in value.items()))
    is_right = {
        FLAG: isinstance(value, bool),
        SECONDS: isinstance(value, (int, float)) and not isinstance(value, bool),
    }.get(option.kind, isinstance(value, str))
    if not is_right:
        raise ValueError(expected(option))
    return value if option.kind == FLAG else parse(option, str(value))


def expected(option: Option) -> str:
    """Return what an option's value has to be."""
    return f"{option.kind} {', '.join(option.choices)}".strip()


def _flag(option: Option, text: str) -> bool:
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(expected(option))
    return text in _TRUE


def _text(option: Option, text: str) -> Any:
    if option.field != "kubelet_folder" or not text:
        return text
    folder, _, name = text.rpartition("/")
    if name != _SOCKET or not folder.startswith("/"):
        raise ValueError(f"an absolute path that ends in /{_SOCKET}")
    return folder


def _choice(option: Option, text: str) -> str:
    if text not in option.choices:
        raise ValueError(expected(option))
    return text


def _words(option: Option, text: str) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",")]
    if not {*words} <= {*option.choices}:
        raise ValueError(expected(option))
    return tuple(dict.fromkeys(words))


def _numbers(_: Option, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")] if text else []
    numbers = [_number(word) for word in words]
    if not all(number is not None and number < _CHANNELS for number in numbers):
        raise ValueError(f"numbers from 0 to {_CHANNELS - 1}")
    return tuple(dict.fromkeys(number for number in numbers if number is not None))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _path(option: Option, text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError(expected(option))
    return text


def _seconds(option: Option, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number of seconds") from None
    least = 0.0 if option.field == "recovery" else 0.1
    if not least <= value <= 1e9:
        raise ValueError(f"a number of seconds, at least {least:g}")
    return value


def _xids(_: Option, text: str) -> dict[int, str]:
    found = {}
    for word in filter(None, (each.strip() for each in text.split(","))):
        name, _equals, action = (part.strip() for part in word.partition("="))
        number = _number(name)
        if number is None or action not in ACTIONS:
            raise ValueError(f"NUMBER=ACTION with an action of {listed([*ACTIONS])}")
        found[number] = action
    return found


_PARSERS: dict[str, Callable[[Option, str], Any]] = {
    FLAG: _flag,
    TEXT: _text,
    CHOICE: _choice,
    WORDS: _words,
    NUMBERS: _numbers,
    PATH: _path,
    SECONDS: _seconds,
    XIDS: _xids,
}


def wrong(where: str, value: object, why: ValueError) -> str:
    """Return the sentence about a value that an option can't have."""
    return f"{where} is {shown(value)} and must be {why}"
