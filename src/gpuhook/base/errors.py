"""All errors that users can see: a sentence of cause, one of remedy, and a stable code."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SHOWN = 48  # characters of a foreign value that a message shows


class GpuhookError(Exception):
    """Base class of all errors that gpuhook raises on purpose.

    ``cause`` is one sentence about what is wrong, ``remedy`` one about what to do; both
    without a full stop. ``code`` is stable and machine-readable. The text is ``printable``,
    whatever names it contains.
    """

    code = "error"

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return printable(f"{self.cause}. {self.remedy}.")  # protects: error-text


class ConfigError(GpuhookError):
    """An unreadable config.toml, or a value of the wrong type in it."""

    code = "config"


class SpecError(GpuhookError):
    """A bundle's config.json that can't be read, parsed or written."""

    code = "spec"


class UnusableSpecError(SpecError):
    """A missing config.json, or one that every low-level runtime refuses."""


class CommandLineError(GpuhookError):
    """A word in gpu-py's command line that low-level runtimes interpret differently."""

    code = "command-line"


class StateError(GpuhookError):
    """An unusable container state, passed by the runtime to the hook."""

    code = "state"


class RuntimeMissingError(GpuhookError):
    """No low-level runtime: none of the configured ones exists."""

    code = "runtime-missing"


class RequestError(GpuhookError):
    """A malformed or forbidden request of a container.

    ``request`` is the Request as far as it was parsed, if at all.
    """

    code = "request"
    request: "Any" = None


class CapabilityError(RequestError):
    """A requested driver capability that is unknown or not supported."""

    code = "unsupported-capability"


class AnyDeviceError(RequestError):
    """A request of any free device where none can be chosen."""

    code = "any-device"


class UnknownDeviceError(RequestError):
    """A requested GPU, MIG device or channel that doesn't exist on this host."""

    code = "unknown-device"


class LostDeviceError(UnknownDeviceError):
    """A requested GPU that has fallen off the bus."""

    code = "lost-device"


class RequirementError(RequestError):
    """A container's requirement that is malformed, or that this host doesn't meet."""

    code = "requirement"


class MemoryLimitError(RequestError):
    """A memory limit of a device that is malformed, forbidden, or can't be set."""

    code = "memory-limit"


class DriverError(GpuhookError):
    """A driver that is missing, not loaded, incomplete or inconsistent."""

    code = "driver"


class NoDriverError(DriverError):
    """A vendor's driver that is missing or not loaded, in contrast to one that fails."""


class ElfError(DriverError):
    """A shared library that isn't a well-formed ELF file."""

    code = "elf"


class LdCacheError(GpuhookError):
    """A ld.so.cache that can't be read or written."""

    code = "ldcache"


class CgroupError(GpuhookError):
    """A failure to allow access to a device in the container's cgroup."""

    code = "cgroup"


class InjectError(GpuhookError):
    """A failed operation on the container, after the rollback of all earlier ones."""

    code = "inject"


class HeldError(GpuhookError):
    """An exclusive device that another container has, or whose state is unknown.

    ``holder`` is the name of that container, if it is known.
    """

    code = "held"
    holder = ""


class VolumeError(InjectError):
    """A file that would have to be created in a folder shared with the host."""

    code = "volume"


def in_volume(name: str) -> VolumeError:
    """Return the error about a name that is missing in a volume."""
    return VolumeError(
        f"{name!r} would have to be made in a volume of the container",
        "Mount that volume elsewhere, or put the file into it: gpuhook writes to "
        "no folder that the container shares with the host",
    )


class CdiError(GpuhookError):
    """A CDI spec, or a name in one, that can't be created or used."""

    code = "cdi"


class NoDeviceError(CdiError):
    """A host without devices for a CDI spec."""


class SimulateError(GpuhookError):
    """A simulated driver that can't be built as requested."""

    code = "simulate"


class DriverFolderError(GpuhookError):
    """A driver folder that can't be created, or a folder there that isn't one."""

    code = "driver-folder"


class FolderError(GpuhookError):
    """A failure to add devices to a root folder, to restore it, or to create a job's folder."""

    code = "folder"


class EngineError(GpuhookError):
    """A container engine's configuration that can't be read, understood or changed."""

    code = "engine"


class MissingPackageError(GpuhookError):
    """A command or an option of a package that isn't installed."""

    code = "missing-package"


class UntrustedPathError(GpuhookError):
    """A path that root would write or trust, and that another user could redirect."""

    code = "untrusted-path"


class ReportError(GpuhookError):
    """A failure to write the doctor's archive for bug reports."""

    code = "report"


class ContainerError(GpuhookError):
    """A running container that can't be found or inspected."""

    code = "container"


class WatchError(GpuhookError):
    """A failure to watch the kernel's events."""

    code = "watch"


class PluginError(GpuhookError):
    """A device plugin that can't work: a package is missing, or its sockets can't be created."""

    code = "device-plugin"


class MpsError(GpuhookError):
    """A failure to start MPS, or an unexpected response of its control daemon."""

    code = "mps"


class MetricsError(GpuhookError):
    """Metrics that can't be printed or served as requested."""

    code = "metrics"


# Text from images and users, in a message -------------------------------------------------


def shown(value: object) -> str:
    """Return ``value`` in quotes, ASCII only, control characters escaped, cut short."""
    try:
        text = value if isinstance(value, str) else str(value)
    except (ValueError, RecursionError):  # more digits or levels than Python prints
        text = type(value).__name__
    if len(text) <= _SHOWN:
        return ascii(text)
    return f"{text[:_SHOWN]!a}... ({len(text)} characters)"


def printable(text: str) -> str:
    """Return a text with terminal control characters replaced by escapes."""
    if text.isprintable():
        return text
    return "".join(
        [
            char if char.isprintable() else char.encode("unicode_escape", "replace").decode()
            for char in text
        ]
    )


def listed(values: "tuple[str, ...] | list[str]", limit: int = 8) -> str:
    """Return at most ``limit`` values joined by commas, and the number of the others."""
    head = ", ".join(values[:limit])
    more = len(values) - limit
    return f"{head} and {more} more" if more > 0 else head
