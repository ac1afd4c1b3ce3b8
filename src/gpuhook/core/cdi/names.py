"""Names in CDI: devices, kinds, files, and the annotations that request devices.

The grammar of a qualified name, vendor/class=device, is in ``base/names``, because container
starts need it.
"""

from gpuhook.base.errors import CdiError, shown
from gpuhook.base.names import cdi_parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ANNOTATION_PREFIX = "cdi.k8s.io/"
_MAX_KEY = 63  # characters after the prefix, as in Kubernetes

_ALNUM = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_KEY = _ALNUM | frozenset("-_.")


def split(name: str) -> tuple[str, str, str]:
    """Return (vendor, class, device), unchecked; ("", "", name) if a part is missing."""
    kind, _, device = name.partition("=")
    vendor, device_class = split_kind(kind)
    return (vendor, device_class, device) if vendor and device else ("", "", name)


def split_kind(kind: str) -> tuple[str, str]:
    """Return (vendor, class), unchecked; ("", kind) if a part is missing."""
    vendor, _, device_class = kind.partition("/")
    return (vendor, device_class) if vendor and device_class else ("", kind)


def is_kind(text: str) -> bool:
    """Tell whether a text is a valid vendor/class."""
    return cdi_parts(f"{text}=0") is not None


def is_device(text: str) -> bool:
    """Tell whether a text is valid after the = of a qualified name."""
    return cdi_parts(f"a/b={text}") is not None


def file_stem(vendor: str, device_class: str, transient_id: str = "") -> str:
    """Return the name of a CDI spec file, without its extension.

    ``transient_id`` names the pod or claim that the CDI spec is made for.
    """
    stem = f"{vendor}-{device_class}"
    return f"{stem}_{transient_id.replace('/', '_')}" if transient_id else stem


# Annotations ---------------------------------------------------------------------------------


def annotation_key(plugin: str, device_id: str) -> str:
    """Return the annotation key for a device plugin's device; CdiError if it can't be one."""
    name = f"{plugin}_{device_id.replace('/', '_')}"
    ends = (plugin[:1], device_id[-1:])
    if len(name) <= _MAX_KEY and _ALNUM.issuperset(ends) and _KEY.issuperset(name):
        return ANNOTATION_PREFIX + name
    raise CdiError(
        f"{shown(name)} can't be the name of an annotation",
        f"Use at most {_MAX_KEY} letters, digits and -_. for plugin and device together, "
        "a letter or digit first and last",
    )


def annotate(
    annotations: "Mapping[str, str]", plugin: str, device_id: str, devices: "Iterable[str]"
) -> dict[str, str]:
    """Return the annotations plus a request for these devices; CdiError if that isn't possible."""
    key = annotation_key(plugin, device_id)
    if key in annotations:
        raise CdiError(f"The annotation {key} exists already", "Use another device id")
    names = list(devices)
    _check(names or [""], key)
    return {**annotations, key: ",".join(names)}


def annotated(annotations: "Mapping[str, str]", prefix: str = ANNOTATION_PREFIX) -> list[str]:
    """Return the devices that annotations request, in the order of the keys.

    A device that is named twice is returned twice. CdiError for an invalid name, for example with
    a blank after a comma.
    """
    found = []
    for key in sorted(annotations):
        if key.startswith(prefix):
            names = annotations[key].split(",")
            _check(names, key)
            found += names
    return found


def _check(names: list[str], key: str) -> None:
    for name in names:
        if cdi_parts(name) is None:
            raise CdiError(
                f"The annotation {shown(key)} names {shown(name)}, which isn't a CDI device",
                "Give names such as vendor.com/class=device, with commas and no blanks between",
            )
