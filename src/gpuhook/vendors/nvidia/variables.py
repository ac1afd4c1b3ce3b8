"""Variables with which containers request NVIDIA GPUs, and the grammar of their values.

Driver capabilities select the parts of the driver that a container needs. IMEX channels are the
numbers of /dev/nvidia-caps-imex-channels/*. Requirements are an image's conditions on the host;
their grammar is in ``requirements``.
"""

from gpuhook import __version__
from gpuhook.base.errors import CapabilityError, RequestError, RequirementError, listed, shown
from gpuhook.base.oci.jsontext import Record
from gpuhook.core.request import sources
from gpuhook.core.request.reader import decided, is_legacy
from gpuhook.vendors.nvidia import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.core.request.reader import RequestReader

DRIVER_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
IMEX_CHANNELS = "NVIDIA_IMEX_CHANNELS"
MIG_CONFIG = "NVIDIA_MIG_CONFIG_DEVICES"
MIG_MONITOR = "NVIDIA_MIG_MONITOR_DEVICES"
REQUIRE = "NVIDIA_REQUIRE_"  # followed by the requirement's subject
DISABLE_REQUIRE = "NVIDIA_DISABLE_REQUIRE"
CUDA_VERSION, _REQUIRE_CUDA = names.LEGACY
# A program's own MPS limits: percentage of the threads, and memory by device.
MPS_LIMITS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
FEATURES = ("gds", "mofed", "gdrcopy", "nvswitch")  # NVIDIA_GDS=enabled and so on

# Every variable of a container that NVIDIA's toolkit reads (1.20.2), except NVIDIA_REQUIRE_* and
# those of old images. Others that begin alike have no effect here, perhaps because they are newer.
KNOWN = frozenset({
    *names.VARIABLES, *names.MEMORY_VARIABLES, DRIVER_CAPABILITIES, IMEX_CHANNELS, MIG_CONFIG,
    MIG_MONITOR, DISABLE_REQUIRE, *(f"NVIDIA_{name.upper()}" for name in FEATURES),
})  # fmt: skip
_FAMILIES = ("NVIDIA_GPU_", "NVIDIA_VISIBLE_", "NVIDIA_DRIVER_", "NVIDIA_IMEX_", "NVIDIA_MIG_")
_OF_SERVICES = ("_SERVICE_", "_PORT")  # in variables that Kubernetes sets for services

CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
DEFAULT_CAPABILITIES = ("compute", "utility")

CHANNELS = 1 << 20  # the driver makes IMEX channels 0 to 1048575
_CHANNEL_DIGITS = len(str(CHANNELS))

_REQUIRE_JETPACK = f"{REQUIRE}JETPACK"  # tunes Tegra's mounts and requires nothing
CSV_MOUNTS = "csv-mounts"  # requested by _REQUIRE_JETPACK: the entries of all Tegra lists
_UINT32 = 1 << 32


class NvidiaOptions(Record):
    """A container's requests in addition to GPUs.

    ``capabilities`` are the parts of the driver, sorted; ``requirements`` the image's
    conditions, ignored if ``requirements_disabled``; ``imex_channels`` are numbers; ``mig_config``
    and ``mig_monitor`` the devices whose MIG it manages (None: none); ``features`` the requested
    drivers of other vendors, sorted. ``mps`` are the fields of ``mps.MpsRequest``, () if no device
    is shared by MPS.
    """

    capabilities: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    requirements_disabled: bool = False
    imex_channels: tuple[int, ...] = ()
    mig_config: str | None = None
    mig_monitor: str | None = None
    features: tuple[str, ...] = ()
    mps: tuple[str, ...] = ()

    def to_json(self) -> "dict[str, Any]":
        """Return the fields, except those of MPS, which operations describe."""
        found = super().to_json()
        del found["mps"]
        return found

    def facts(self) -> list[tuple[str, str]]:
        """Return the facts for display, each with its title."""
        disabled = " (disabled)" if self.requirements_disabled else ""
        return [
            ("Capabilities", ", ".join(self.capabilities) or "none"),
            ("Requirements", (", ".join(self.requirements) or "none") + disabled),
        ]


def read(reading: "RequestReader", options: NvidiaOptions) -> None:
    """Fill in the options of a container; RequestError or a subclass for invalid values.

    A container that requests no device never causes an error.
    """
    disabled = reading.config.disable_require or sources.is_true(reading.env.get(DISABLE_REQUIRE))
    options.requirements_disabled = disabled
    if reading.devices is None:
        try:
            options.requirements = () if disabled else asked_requirements(reading.env)
            options.imex_channels = imex_channels(_imex_names(reading))
        except RequestError as error:
            reading.ignored.append(("environment", error.cause))
        return
    value = reading.env.get(DRIVER_CAPABILITIES)
    supported = supported_capabilities(reading.config.supported_driver_capabilities)
    options.capabilities = granted_capabilities(value, reading.legacy, supported)
    if unknown := unknown_words(value):
        reading.warnings.append(_left_out(unknown, options.capabilities))
    if others := unknown_variables(reading.env):
        verb = "isn't a variable" if len(others) == 1 else "aren't variables"
        reading.warnings.append(
            f"{listed(tuple(map(shown, others)))} {verb} that gpuhook {__version__} knows, "
            f"and {'has' if len(others) == 1 else 'have'} no effect"
        )
    options.requirements = () if disabled else asked_requirements(reading.env)
    options.mig_config = _mig(reading, MIG_CONFIG)
    options.mig_monitor = _mig(reading, MIG_MONITOR)
    options.imex_channels = imex_channels(_imex_names(reading))
    asked = {name: feature_variable(name) for name in FEATURES}
    enabled = {name: each for name, each in asked.items() if reading.env.get(each) == "enabled"}
    if reading.env.get(_REQUIRE_JETPACK) == f"{CSV_MOUNTS}=all":
        enabled[CSV_MOUNTS] = _REQUIRE_JETPACK
    heard = reading.hears_environment(enabled.values())
    options.features = tuple(sorted(enabled)) if heard else ()  # protects: feature-policy
    config = reading.config
    if config.mps_devices:  # protects: mps-any-capability
        limits = (reading.env.get(name, "") for name in MPS_LIMITS)
        options.mps = (config.mps_devices, config.state_dir, config.mode, *limits)


def unknown_variables(env: "dict[str, str]") -> tuple[str, ...]:
    """Return the names that look like variables of NVIDIA's toolkit, and aren't known."""
    return tuple(
        name
        for name in env
        if name.startswith(_FAMILIES)
        and name not in KNOWN
        and not any(part in name for part in _OF_SERVICES)
    )


def feature_variable(name: str) -> str:
    """Return the variable that requests a feature with the value enabled."""
    return f"NVIDIA_{name.upper()}"


def _imex_names(reading: "RequestReader") -> tuple[str, ...] | None:
    if reading.config.feature("ignore-imex-channel-requests"):
        return None
    if reading.config.accept_volume_mounts and reading.mounts.imex:
        return decided(list(reading.mounts.imex))
    names = decided(reading.names_in([IMEX_CHANNELS]) if IMEX_CHANNELS in reading.env else [])
    return names if names and reading.hears_environment([IMEX_CHANNELS]) else None


def _mig(reading: "RequestReader", variable: str) -> str | None:
    """Return a request for MIG management, which needs a privileged container."""
    value = reading.env.get(variable)
    if value and not reading.is_privileged():
        raise RequestError(
            f"{variable} is set in a container that is not privileged",
            f"Start the container with CAP_SYS_ADMIN (--privileged) or unset {variable}",
        )
    return value or None


# Driver capabilities -------------------------------------------------------------------------


def split_capabilities(value: str) -> tuple[str, ...]:
    """Return the words of a comma list, trimmed and sorted, without duplicates and empty ones."""
    return tuple(sorted({word for part in value.split(",") if (word := part.strip())}))


def common_capabilities(asked: tuple[str, ...], supported: tuple[str, ...]) -> tuple[str, ...]:
    """Return the intersection, sorted; ``all`` in either matches every word of the other."""
    if "all" in supported:
        return tuple(sorted(asked))
    if "all" in asked:
        return tuple(sorted(supported))
    return tuple(sorted(set(asked) & set(supported)))


def supported_capabilities(setting: str) -> tuple[str, ...]:
    """Return the capabilities that the setting supported-driver-capabilities allows, sorted.

    Unknown words were refused when the configuration was read.
    """
    return common_capabilities(CAPABILITIES, split_capabilities(setting))


def granted_capabilities(
    value: str | None, legacy: bool, supported: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the capabilities, sorted, that a container gets.

    ``value`` is NVIDIA_DRIVER_CAPABILITIES (None: not set), ``legacy`` says that the image
    is older than that variable. If all capabilities are supported, unknown words add the default
    ones. If fewer are, CapabilityError names unknown words, or those that aren't supported
    (``all`` is always accepted).
    """
    if value is None and legacy:
        return supported
    asked = split_capabilities(value or "")
    if not asked:
        return common_capabilities(DEFAULT_CAPABILITIES, supported)
    if "all" in asked:
        return supported
    unknown = unknown_words(value)
    if unknown and supported != CAPABILITIES:
        raise _unknown(unknown)
    if unknown:
        asked = tuple(sorted({*DEFAULT_CAPABILITIES, *asked} - {*unknown}))
    refused = tuple(shown(word) for word in asked if word not in supported)
    if refused:
        raise CapabilityError(
            f"{DRIVER_CAPABILITIES} asks for {listed(refused)}, and only "
            f"{','.join(supported) or 'the empty list'} is supported here",
            f"Remove it from {DRIVER_CAPABILITIES}, or allow it with supported-driver-capabilities "
            "in gpuhook's config.toml",
        )
    return asked


def unknown_words(value: str | None) -> tuple[str, ...]:
    """Return the words of NVIDIA_DRIVER_CAPABILITIES that are no capability, sorted.

    Empty for a list with ``all``, because that overrides all other words.
    """
    asked = split_capabilities(value or "")
    return () if "all" in asked else tuple(word for word in asked if word not in CAPABILITIES)


def _left_out(words: tuple[str, ...], granted: tuple[str, ...]) -> str:
    """Return the warning about unknown words."""
    return (
        f"{_said_of(words)}{_hint(words)}, so the container gets "
        f"{' and '.join(DEFAULT_CAPABILITIES)} as well: {','.join(granted)}"
    )


def _unknown(words: tuple[str, ...]) -> CapabilityError:
    return CapabilityError(
        f"{_said_of(words)}: there are {', '.join(CAPABILITIES)} and all",
        f"Correct {DRIVER_CAPABILITIES}{_hint(words)}",
    )


def _said_of(words: tuple[str, ...]) -> str:
    verb = "isn't a driver capability" if len(words) == 1 else "aren't driver capabilities"
    return f"{listed(tuple(map(shown, words)))} {verb}"


def _hint(words: tuple[str, ...]) -> str:
    meant = dict.fromkeys(guess for word in words for guess in _meant(word))
    return f" (did you mean {','.join(meant)}?)" if meant else ""


def _meant(word: str) -> list[str]:
    """Return the known words for a misspelled word, which may hold several separated by blanks."""
    parts = word.lower().split()
    found = [
        next((name for name in (*CAPABILITIES, "all") if _near(part, name)), "") for part in parts
    ]
    return found if all(found) else []


def _near(word: str, name: str) -> bool:
    """Return whether two words differ by one letter, or by two swapped letters."""
    if abs(len(word) - len(name)) > 1:
        return False
    while word and name and word[0] == name[0]:
        word, name = word[1:], name[1:]
    while word and name and word[-1] == name[-1]:
        word, name = word[:-1], name[:-1]
    return max(len(word), len(name)) <= 1 or (len(word) == 2 and word == name[::-1])


# IMEX channels -------------------------------------------------------------------------------


def imex_channel(text: str) -> int:
    """Return a channel's number; RequestError unless it is plain decimal digits in range."""
    plain = text.isascii() and text.isdecimal() and len(text) <= _CHANNEL_DIGITS
    if plain and (text == "0" or text[0] != "0") and int(text) < CHANNELS:
        return int(text)
    # protects: channel-name
    raise RequestError(
        f"{shown(text)} is not an IMEX channel",
        f"Ask for channels by number, 0 to {CHANNELS - 1}, in {IMEX_CHANNELS}",
    )


def imex_channels(names: tuple[str, ...] | None) -> tuple[int, ...]:
    """Return the numbers in order, without duplicates; () for None and for ``all``.

    ``all`` selects no channel, because the existing channels depend on the whole rack.
    """
    if names is None or names == ("all",):
        return ()
    return tuple(dict.fromkeys(imex_channel(name) for name in names))


# Requirements --------------------------------------------------------------------------------


def asked_requirements(env: "dict[str, str]") -> tuple[str, ...]:
    """Return the requirements of an environment, sorted, without duplicates and blank ones.

    Raises RequirementError for a legacy image whose CUDA_VERSION is not a version.
    """
    found = {
        text
        for name, value in env.items()
        if name.startswith(REQUIRE)
        and not name.startswith(_REQUIRE_JETPACK)
        and (text := value.strip())
    }
    if is_legacy(env, names):
        found.add(f"cuda>={major_minor(env[CUDA_VERSION])}")
    return tuple(sorted(found))


def major_minor(text: str) -> str:
    """Return "major.minor" of a CUDA_VERSION such as 9, v11.6 or 12.2.1-rc1+build.

    Raises RequirementError for other texts, or if a part does not fit into 32 bits.
    """
    core, plus, build = text.removeprefix("v").partition("+")
    core, dash, pre = core.partition("-")
    parts = core.split(".")
    suffixes_fit = (not plus or _is_suffix(build)) and (not dash or _is_suffix(pre))
    digits_only = all(part.isascii() and part.isdecimal() and len(part) <= 20 for part in parts)
    if suffixes_fit and digits_only and len(parts) <= 3:
        major, minor = int(parts[0]), int(parts[1]) if len(parts) > 1 else 0
        if major < _UINT32 and minor < _UINT32:
            return f"{major}.{minor}"
    raise RequirementError(
        f"{CUDA_VERSION} is {shown(text)}, which is not a version number",
        f"Correct {CUDA_VERSION} in the image, or set {_REQUIRE_CUDA} or {DISABLE_REQUIRE}=true",
    )


def _is_suffix(text: str) -> bool:
    return bool(text) and text.isascii() and text.replace("-", "").replace(".", "").isalnum()
