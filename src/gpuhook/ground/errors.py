"""Every error a user can meet: one sentence of cause, one of remedy, one stable code."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SHOWN = 48  # characters of a foreign value that a message shows


class GpuhookError(Exception):
    """Base of all errors that gpuhook raises on purpose.

    ``cause`` says in one sentence what is wrong, ``remedy`` in one sentence what to do;
    both without a full stop. ``code`` is stable and machine-readable. As a text it is
    ``printable``, whoever chose the names in it.
    """

    code = "error"

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return printable(f"{self.cause}. {self.remedy}.")  # protects: error-text


class ConfigError(GpuhookError):
    """config.toml can't be read or holds a value of the wrong type."""

    code = "config"


class SpecError(GpuhookError):
    """The bundle's config.json can't be read, parsed or written."""

    code = "spec"


class UnusableSpecError(SpecError):
    """The bundle's config.json isn't there, or is such that every low-level runtime refuses it."""


class CommandLineError(GpuhookError):
    """A word in gpu-py's command line means something else to another low-level runtime."""

    code = "command-line"


class StateError(GpuhookError):
    """The container state that the runtime handed to the hook is unusable."""

    code = "state"


class RuntimeMissingError(GpuhookError):
    """None of the configured low-level runtimes exists."""

    code = "runtime-missing"


class RequestError(GpuhookError):
    """The container's request is malformed or not allowed.

    ``request`` is the Request as far as it had been understood before, if at all.
    """

    code = "request"
    request: "Any" = None


class CapabilityError(RequestError):
    """A driver capability that is asked for is unknown or not supported."""

    code = "unsupported-capability"


class UnknownDeviceError(RequestError):
    """A requested GPU, MIG device or channel doesn't exist on this machine."""

    code = "unknown-device"


class LostDeviceError(UnknownDeviceError):
    """A requested GPU is one that has fallen off the bus."""

    code = "lost-device"


class RequirementError(RequestError):
    """A condition that the container sets is malformed or not met by this machine."""

    code = "requirement"


class LimitError(RequestError):
    """A limit of a device's memory is malformed, not allowed, or can't be set."""

    code = "memory-limit"


class DriverError(GpuhookError):
    """The driver is missing, not loaded, incomplete or inconsistent."""

    code = "driver"


class NoDriverError(DriverError):
    """There is no driver of this vendor here, or it isn't loaded: not one that fails."""


class ElfError(DriverError):
    """A shared library isn't a well-formed ELF file."""

    code = "elf"


class LdCacheError(GpuhookError):
    """A ld.so.cache can't be read or written."""

    code = "ldcache"


class CgroupError(GpuhookError):
    """Access to a device can't be granted in the container's cgroup."""

    code = "cgroup"


class InjectError(GpuhookError):
    """An operation on the container failed; whatever had been done was undone."""

    code = "inject"


class HeldError(GpuhookError):
    """A device that one container alone may have is another one's, or that can't be told."""

    code = "held"


class VolumeError(InjectError):
    """Something would have to be made in a folder that the container shares with the host."""

    code = "volume"


def in_volume(name: str) -> VolumeError:
    """Return the error about a name that a volume hasn't got."""
    return VolumeError(
        f"{name!r} would have to be made in a volume of the container",
        "Mount that volume elsewhere, or put the file into it: gpuhook writes to "
        "no folder that the container shares with the host",
    )


class CdiError(GpuhookError):
    """A CDI document, or a name in one, can't be made, or used as it is."""

    code = "cdi"


class NoDeviceError(CdiError):
    """There is no device that a CDI document could name."""


class SimulateError(GpuhookError):
    """A simulated driver can't be built as asked."""

    code = "simulate"


class DriverFolderError(GpuhookError):
    """The driver folder can't be made, or a folder is there that isn't one."""

    code = "driver-folder"


class FolderError(GpuhookError):
    """A root folder can't be given devices or restored, or a job's folder can't be made."""

    code = "folder"


class EngineError(GpuhookError):
    """A container engine's configuration can't be read, understood or changed."""

    code = "engine"


class UntrustedPathError(GpuhookError):
    """Root would write to a path, or rely on one, that another user could lead elsewhere."""

    code = "untrusted-path"


class ReportError(GpuhookError):
    """The doctor's archive for bug reports can't be written."""

    code = "report"


class ContainerError(GpuhookError):
    """A running container can't be found or looked into."""

    code = "container"


class WatchError(GpuhookError):
    """The kernel's events can't be watched."""

    code = "watch"


class PluginError(GpuhookError):
    """The device plugin can't do its work: a package is missing, or its sockets can't be made."""

    code = "device-plugin"


class MpsError(GpuhookError):
    """MPS can't be started, or its control daemon doesn't answer as it should."""

    code = "mps"


class MetricsError(GpuhookError):
    """Metrics can't be shown or served as asked."""

    code = "metrics"


# What came from an image or a user, in a message -------------------------------------------


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
    """Return a text with what could steer a terminal written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        [
            char if char.isprintable() else char.encode("unicode_escape", "replace").decode()
            for char in text
        ]
    )


def listed(values: "tuple[str, ...] | list[str]", limit: int = 8) -> str:
    """Return at most ``limit`` values joined by commas, and how many more there are."""
    head = ", ".join(values[:limit])
    more = len(values) - limit
    return f"{head} and {more} more" if more > 0 else head
