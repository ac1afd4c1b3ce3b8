"""Limits of device memory for a container, from its own settings and the administrator's.

Pure: a size for each device, or several NAME=SIZE. The effect of less trusted settings is decided
only here: they make a limit smaller, and never larger than what the administrator allows.
"""

from gpuhook.base.errors import MemoryLimitError, RequestError, shown
from gpuhook.base.names import MEMORY_ANNOTATION, MEMORY_VARIABLE
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.jsontext import Record
from gpuhook.base.sizes import Size, amount, parse_quantity, parse_size
from gpuhook.core.request.reader import is_privileged
from gpuhook.core.request.sources import MountRequests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.core.request.reader import SpecReader

SECTION = "[gpuhook.limits]"
_MOST_MEBIBYTES = ((1 << 64) - 1) >> 20  # so that the bytes are a 64-bit number
# Annotations with a container's name in its pod: containerd's, and CRI-O's labels as JSON.
_CONTAINERD_NAME = "io.kubernetes.cri.container-name"
_CRIO_LABELS, _NAME_LABEL = "io.kubernetes.cri-o.Labels", "io.kubernetes.container.name"
_MOST_SIZES = 1 << 10  # in one setting: more than there are devices
_REMEDY = "Write a size such as 8GiB, 8192MiB, 50% or a number of bytes, or NAME=SIZE,NAME=SIZE"


class MemorySetting(Record):
    """A container's setting of device memory, from one source.

    ``entries`` are (name, size) pairs; the name is "" for each of the container's devices.
    ``widens`` means that it may exceed the default limit. ``exceeds`` means that it may exceed a
    device's memory, and then gets all of it.
    """

    source: str
    entries: "tuple[tuple[str, Size], ...]"
    widens: bool
    exceeds: bool = False


class MemorySettings(Record):
    """All settings of a container, and whether it may ask for more than others.

    ``imposed`` means that some come from a cluster's mounts, not from the container itself.
    """

    said: tuple[MemorySetting, ...]
    privileged: bool
    imposed: bool


def parse(text: str, source: str) -> "tuple[tuple[str, Size], ...]":
    """Return the (name, size) pairs of a text; MemoryLimitError for anything else.

    A name may contain =, as CDI names do: the last one separates.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > _MOST_SIZES:  # protects: most-sizes
        raise MemoryLimitError(
            f"{source} has {len(parts)} memory sizes; the maximum is {_MOST_SIZES}", _REMEDY
        )
    found = []
    for part in parts:
        name, equals, size = part.rpartition("=")
        read = parse_size(size)
        alone = not equals and len(parts) == 1
        if read is None or not (alone or name.strip()):
            raise MemoryLimitError(
                f"{source} has {shown(part)}, which isn't a memory size", _REMEDY
            )
        found.append((name.strip(), read))
    return tuple(found)


def read(reader: "SpecReader", vendors: "Iterable[ModuleType]" = ()) -> MemorySettings:
    """Return a container's settings; MemoryLimitError if they are malformed.

    Mounts are read below the folders of ``vendors`` (names), those of the container's devices.
    Variables of these vendors are read, too. Both count even if the configuration ignores mounts
    and variables as device requests, because they only make a limit smaller.
    """
    config = reader.config
    privileged = is_privileged(reader.spec)
    heard = config.accept_envvar_unprivileged or privileged
    said = []
    if MEMORY_VARIABLE in reader.env:
        source, text = MEMORY_VARIABLE, reader.env[MEMORY_VARIABLE]
        said.append(MemorySetting(source, parse(text, source), heard))
    if MEMORY_ANNOTATION in reader.annotations:
        source = f"The annotation {MEMORY_ANNOTATION}"
        text = reader.annotations[MEMORY_ANNOTATION]
        if not isinstance(text, str):
            raise MemoryLimitError(f"{source} isn't a text", _REMEDY)
        said.append(MemorySetting(source, parse(text, source), heard and config.reads_annotations))
    mounted = [word for names in vendors for word in _by_mounts(reader, names)]
    said += mounted  # protects: limit-mounts
    said += [word for names in vendors for word in by_variables(reader.env, names)]
    for names in vendors:
        said += by_annotations(reader.annotations, names, _own_names(reader.annotations))
    return MemorySettings(tuple(said), privileged, bool(mounted))


def _by_mounts(reader: "SpecReader", names: "ModuleType") -> "list[MemorySetting]":
    """Return the settings in mounts below a vendor's folder, for its devices only."""
    found = []
    for size, device in MountRequests(reader.mounts, names.MOUNTS).memory_limits:
        source = f"A mount below {names.MOUNTS}"
        limit = parse_size(size)
        if limit is None:
            raise MemoryLimitError(
                f"{source} has {shown(size)}, which isn't a memory size", _REMEDY
            )
        found.append(
            MemorySetting(source, ((f"{names.KIND}={device or 'all'}", limit),), widens=False)
        )
    return found


def by_variables(env: "Mapping[str, str]", names: "ModuleType") -> "list[MemorySetting]":
    """Return the limit in a vendor's own variables, for all its devices, in whole MiB.

    If only the limit or only the request is set, the other one is equal. The limit is enforced.
    Source: NVIDIA Container Toolkit 1.20.1, nvidia-cdi-hook apply-cuda-memory-limits.
    """
    variables: tuple[str, ...] = getattr(names, "MEMORY_VARIABLES", ())
    found = {
        name: Size(f"{number}MiB", number << 20)
        for name in variables
        if name in env
        for number in [_mebibytes(env[name], name)]
    }
    return _paired(found, variables, names)


def by_annotations(
    annotations: "Mapping[str, Any]", names: "ModuleType", containers: "Iterable[str]"
) -> "list[MemorySetting]":
    """Return the limit in a pod's annotations for one of its containers, as quantities.

    ``containers`` are the container's names: none if it is unknown, and then the annotations of
    every container count. As in ``by_variables``, one that is missing equals the other.
    """
    start, *ends = getattr(names, "MEMORY_ANNOTATIONS", ("",))
    bases: dict[str, None] = {}
    own = {f"{start}{name}" for name in containers}
    for key in annotations:
        for end in ends:
            base = key.removesuffix(end)
            if base != key and base.startswith(start) and (base in own or not own):
                bases[base] = None
    found = []
    for base in bases:
        sources = {f"The annotation {shown(base + end)}": base + end for end in ends}
        sizes = {
            source: _quantity(annotations[key], source)
            for source, key in sources.items()
            if key in annotations
        }
        found += _paired(sizes, [*sources], names)
    return found


def _quantity(text: object, source: str) -> Size:
    number = parse_quantity(text) if isinstance(text, str) else None
    if number is None:
        raise MemoryLimitError(
            f"{source} has {shown(str(text))}, which isn't an amount of memory",
            "Write a quantity of Kubernetes, such as 8Gi or 8192Mi",
        )
    return Size(str(text), number)


def _own_names(annotations: "Mapping[str, Any]") -> "list[str]":
    """Return a container's name in its pod, as containerd and CRI-O write it.

    A pod's author may add one where CRI-O copies annotations, but not remove CRI-O's own.
    """
    found = [annotations.get(_CONTAINERD_NAME)]
    labels = annotations.get(_CRIO_LABELS)
    if isinstance(labels, str):
        try:
            read = jsontext.loads(labels)
        except ValueError:
            read = None
        found.append(read.get(_NAME_LABEL) if isinstance(read, dict) else None)
    return [name for name in found if isinstance(name, str)]


def _paired(
    found: "Mapping[str, Size]", sources: "Sequence[str]", names: "ModuleType"
) -> "list[MemorySetting]":
    """Return the limit of a pair of sources, limit and request; [] if there is neither."""
    if not found:
        return []
    limit_name, request_name = sources
    limit = found.get(limit_name) or found[request_name]
    request = found.get(request_name) or limit
    if request.number > limit.number:
        raise MemoryLimitError(
            f"{request_name} asks for {request.text}, which is more than {limit.text} in "
            f"{limit_name}",
            f"Raise {limit_name}, or ask for less",
        )
    if limit.number == 0 and limit_name not in found:
        return []  # a request for nothing, and no limit
    source = limit_name if limit_name in found else request_name
    # protects: limit-variables
    return [MemorySetting(source, ((f"{names.KIND}=all", limit),), widens=False, exceeds=True)]


def _mebibytes(text: str, source: str) -> int:
    digits = text.lstrip("0") or text[:1]
    if digits.isascii() and digits.isdecimal() and len(digits) <= len(str(_MOST_MEBIBYTES)):
        number = int(digits)
        if number <= _MOST_MEBIBYTES:
            return number
    raise MemoryLimitError(
        f"{source} has {shown(text)}, which isn't a whole number of MiB up to {_MOST_MEBIBYTES}",
        "Write decimal digits only, such as 8192, or unset it",
    )


def decide(
    said: "Iterable[tuple[MemorySetting, Size]]",
    memory: int,
    config: "Config",
    device: str,
    *,
    privileged: bool,
) -> tuple[int, str] | None:
    """Return how many bytes of a device's ``memory`` a container may use, and why; None: all.

    ``said`` are the container's settings for this ``device``. The smallest of these wins: the
    settings; ``device-memory``, unless a setting that may widen it exists; and
    ``most-device-memory``, unless a privileged container has a setting of gpuhook's own.
    MemoryLimitError for more than the device has.
    """
    said = [*said]
    found = [(_checked(word, size, memory, device), f"{word.source} says {size.text}")
             for word, size in said]  # fmt: skip
    default = parse_size(config.device_memory)
    if default and not any(word.widens for word, _ in said):  # protects: limit-default
        found.append((min(default.of(memory), memory), _by("device-memory", default)))
    most = parse_size(config.most_device_memory)
    own = any(not word.exceeds for word, _ in said)
    if most and not (privileged and own):  # protects: limit-most
        found.append((min(most.of(memory), memory), _by("most-device-memory", most)))
    return min(found, key=lambda each: each[0]) if found else None


def _by(key: str, size: Size) -> str:
    return f"{key} in {SECTION} is {size.text}"


def _checked(word: MemorySetting, size: Size, memory: int, device: str) -> int:
    found = min(size.of(memory), memory) if word.exceeds else size.of(memory)
    if 0 < found <= memory:
        return found
    raise MemoryLimitError(
        f"{word.source} says {size.text} for {device}, which has {amount(memory)}",
        "Request at most the memory that the device has, or a percentage such as 50%",
    )


def unknown_name(name: str, source: str) -> RequestError:
    """Return the error for a name that isn't one of the container's devices."""
    return MemoryLimitError(
        f"{source} names {shown(name)}, which isn't one of the container's devices",
        "Name devices as in the variable that requests them, or give one size for all",
    )
