"""Errors that the engines' library finds in a CDI spec whose fields have the right types.

Source: the specification's SPEC.md, and where the library differs, the library, because engines
read CDI specs with it.
"""

from gpuhook.base.errors import shown
from gpuhook.base.names import CDI_NO_ACCESS
from gpuhook.core.cdi import names, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Path = tuple[str | int, ...]
    Found = Iterator[tuple[Path, str]]

HOOK_STAGES = (
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop",
)  # fmt: skip
NODE_TYPES = ("", "b", "c", "u", "p")
_MAX_CLOS = 4096  # bytes: it is the name of a folder
_LISTS = ("env", "deviceNodes", "hooks", "mounts", "additionalGids", "netDevices")


def problems(document: "dict[str, Any]") -> "list[tuple[Path, str]]":
    """Return (path, message) of each error in a CDI spec; [] means that engines accept it."""
    return [
        *_version(document),
        *_kind(document),
        *_below(("containerEdits",), _edits(document.get("containerEdits") or {})),
        *_devices(document),
    ]


def _below(path: "Path", found: "Found") -> "Found":
    for inner, sentence in found:
        yield (*path, *inner), sentence


def _version(document: "dict[str, Any]") -> "Found":
    version = document.get("cdiVersion") or ""
    if not version:
        yield ("cdiVersion",), "cdiVersion is missing"
    elif not versions.is_known(version):
        known = f"{versions.EARLIEST} to {versions.NEWEST}"
        yield ("cdiVersion",), f"cdiVersion {shown(version)} is none of {known}"
    elif versions.is_below(version, versions.EARLIEST):
        text = f"cdiVersion must be at least {versions.EARLIEST}, not {shown(version)}"
        yield ("cdiVersion",), text
    else:
        for needed, path in versions.needs(document):
            if versions.is_below(version, needed):
                yield path, f"{_last(path)} needs cdiVersion {needed}, not {shown(version)}"


def _last(path: "Path") -> str:
    """Return the name of the innermost field."""
    return next(str(part) for part in reversed(path) if isinstance(part, str))


def _kind(document: "dict[str, Any]") -> "Found":
    kind = document.get("kind") or ""
    if not names.is_kind(kind):
        text = f"kind must be a vendor/class such as vendor.com/gpu, not {shown(kind)}"
        yield ("kind",), text if kind else "kind is missing"


def _devices(document: "dict[str, Any]") -> "Found":
    devices = document.get("devices") or []
    if not devices:
        yield ("devices",), "the file has no device"
    seen = set()
    for index, device in enumerate(devices):
        name = device.get("name") or ""
        path = ("devices", index)
        if not names.is_device(name):
            yield (*path, "name"), f"{shown(name)} can't be the name of a device"
        elif name in seen:
            yield (*path, "name"), f"two devices are named {shown(name)}"
        seen.add(name)
        edits = device.get("containerEdits") or {}
        if edits.get("intelRdt") is None and not any(edits.get(field) for field in _LISTS):
            yield path, f"the device {shown(name)} edits nothing"
        yield from _below((*path, "containerEdits"), _edits(edits))


def _edits(edits: "dict[str, Any]") -> "Found":
    yield from _below(("env",), _variables(edits))
    for field, check in (("deviceNodes", _node), ("mounts", _mount), ("hooks", _hook)):
        for index, item in enumerate(edits.get(field) or ()):
            yield from _below((field, index), check(item))
    yield from _below(("netDevices",), _net_devices(edits.get("netDevices") or []))
    yield from _below(("intelRdt",), _rdt(edits.get("intelRdt") or {}))


def _variables(table: "dict[str, Any]") -> "Found":
    for index, variable in enumerate(table.get("env") or ()):
        if variable.find("=") < 1:
            yield (index,), f"{shown(variable)} isn't NAME=VALUE"


def _node(node: "dict[str, Any]") -> "Found":
    if not node.get("path"):
        yield ("path",), "the path of a device node is missing"
    if (kind := node.get("type") or "") not in NODE_TYPES:
        yield ("type",), f"the type of a device node is one of b, c, u and p, not {shown(kind)}"
    for field in ("major", "minor"):
        if (number := node.get(field) or 0) < 0:  # runtimes take -1 for all devices
            yield (field,), f"the {field} of a device node can't be {number}"
    access = node.get("permissions") or ""
    if access != CDI_NO_ACCESS and access.strip("rwm"):
        yield ("permissions",), f"permissions are letters of rwm, or none, not {shown(access)}"


def _mount(mount: "dict[str, Any]") -> "Found":
    for field in ("hostPath", "containerPath"):
        if not mount.get(field):
            yield (field,), f"the {field} of a mount is missing"


def _hook(hook: "dict[str, Any]") -> "Found":
    if (stage := hook.get("hookName") or "") not in HOOK_STAGES:
        yield ("hookName",), f"{shown(stage)} is none of the hooks {', '.join(HOOK_STAGES)}"
    if not hook.get("path"):
        yield ("path",), "the path of a hook is missing"
    yield from _below(("env",), _variables(hook))


def _net_devices(devices: "list[dict[str, Any]]") -> "Found":
    for field in ("hostInterfaceName", "name"):
        seen = set()
        for index, device in enumerate(devices):
            name = device.get(field) or ""
            if not name:
                yield (index, field), f"the {field} of a network device is missing"
            elif name in seen:
                yield (index, field), f"two network devices have the {field} {shown(name)}"
            seen.add(name)


def _rdt(rdt: "dict[str, Any]") -> "Found":
    name = rdt.get("closID") or ""
    too_long = len(name.encode("utf-8", "surrogateescape")) >= _MAX_CLOS
    if name != "/" and (too_long or name in (".", "..") or "/" in name or "\n" in name):
        yield ("closID",), f"closID must be / or the name of a folder, not {shown(name)}"
