"""CDI container edits, applied to config.json.

``changes`` returns the new values of config.json as plain data, and ``apply`` the whole data.
``apply_to_spec`` writes the values into a bundle's text and keeps all other bytes. Sources:
SPEC.md of the CDI specification, the engines' library, and the OCI runtime specification.
"""

import os
import stat
from os.path import normpath

from gpuhook.base.errors import CdiError, SpecError
from gpuhook.base.host import files as host_files
from gpuhook.base.names import CDI_NO_ACCESS, HOOK_ENVIRONMENT
from gpuhook.core.inventory.cache import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from gpuhook.base.oci.spec import Spec
    from gpuhook.core.cdi.folders import FolderContent

    Edits = dict[str, Any]
    # Returns type (b, c or p), major, minor and mode of the node at a path. None if the path is
    # no node, OSError if it doesn't exist.
    Host = Callable[[str], tuple[str, int, int, int] | None]

_LISTS = ("env", "deviceNodes", "netDevices", "hooks", "mounts", "additionalGids")
_NODE_TYPES = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}


# Selecting edits ------------------------------------------------------------------------------


def unresolved(found: "FolderContent", names: "Iterable[str]") -> list[str]:
    """Return the names, without duplicates, that no CDI spec in the folders defines."""
    return [name for name in dict.fromkeys(names) if name not in found.devices]


def resolve(found: "FolderContent", names: "Iterable[str]") -> "Edits":
    """Return the edits of these devices, in their order; a repeated name counts once.

    The common edits of a file come once, before those of its first device. If a device can't be
    used, UnknownDeviceError names it and the devices that exist, and no edits are returned.
    """
    wanted = list(dict.fromkeys(names))
    missing = unresolved(found, wanted)
    if missing:
        from gpuhook.core.cdi import unresolved as unknown  # noqa: PLC0415 - only where it fails

        raise unknown.error(found, missing)
    edits = []
    seen = set()
    for device in (found.devices[name] for name in wanted):
        if device.file not in seen:
            seen.add(device.file)
            edits.append(device.document.get("containerEdits"))
        edits.append(device.edits)
    return merge(edits)


def check_writers(found: "FolderContent", names: "Iterable[str]") -> None:
    """Raise UntrustedPathError if non-root users can have written the CDI specs of these devices.

    The edits may contain hooks, which root runs. CdiError if a file changed since it was read.
    """
    for file in dict.fromkeys(found.devices[name].file for name in names):
        host_files.check_writers(file)
        try:
            is_same = identity(os.stat(file)) == found.identities[file]  # protects: document-read
        except OSError:
            is_same = False
        if not is_same:
            raise CdiError(f"{file} was changed while it was read", "Start the container again")


def merge(several: "Iterable[Edits | None]") -> "Edits":
    """Return several edits as one: lists are joined, the last intelRdt wins."""
    merged: Edits = {}
    for edits in several:
        for field, value in (edits or {}).items():
            if value is None:
                continue
            merged[field] = [*merged.get(field, ()), *value] if field in _LISTS else value
    return merged


# Applying edits -------------------------------------------------------------------------------


def host_node(path: str) -> tuple[str, int, int, int] | None:
    """Return (type, major, minor, mode) of a node on this host, None if the path isn't a node.

    A link isn't followed: its target may have changed since the CDI spec was written.
    """
    status = os.lstat(path)
    kind = _NODE_TYPES.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        return None
    numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
    return (kind, *numbers, stat.S_IMODE(status.st_mode))


def apply(data: "dict[str, Any]", edits: "Edits", host: "Host" = host_node) -> "dict[str, Any]":
    """Return config.json's data with the edits; ``data`` isn't changed.

    CdiError if a node's numbers are neither in the edits nor on the host, SpecError if
    config.json has the wrong shape.
    """
    for path, value in changes(data, edits, host).items():
        data = _with(data, path, value)
    return data


def apply_to_spec(spec: "Spec", edits: "Edits", host: "Host" = host_node) -> "Spec":
    """Return a bundle's config.json with the edits; raises as ``apply`` does."""
    return spec.put(changes_of_spec(spec, edits, host))


def changes_of_spec(
    spec: "Spec", edits: "Edits", host: "Host" = host_node
) -> "dict[tuple[str, ...], Any]":
    """Return the new values in a bundle's config.json, as ``changes`` does.

    A hook without an environment gets one: otherwise it would inherit the image's
    (CVE-2025-23266). A hook that a restarted bundle already has isn't added twice.
    """
    hooks = [
        hook if hook.get("env") else {**hook, "env": HOOK_ENVIRONMENT}
        for hook in edits.get("hooks") or ()
    ]
    missing = [hook for hook in hooks if _hook(hook) not in spec.hooks(hook["hookName"])]
    return changes(spec.data, {**edits, "hooks": missing}, host)


def _hook(hook: "dict[str, Any]") -> "dict[str, Any]":
    return _some(hook, "path", "args", "env", "timeout")


def changes(
    data: "dict[str, Any]", edits: "Edits", host: "Host" = host_node
) -> "dict[tuple[str, ...], Any]":
    """Return the new values in config.json, by path; raises as ``apply`` does."""
    draft = _Draft(data)
    _set_variables(draft, edits.get("env") or [])
    for node in edits.get("deviceNodes") or ():
        _add_node(draft, with_numbers(node, host))
    for device in edits.get("netDevices") or ():
        name = device["hostInterfaceName"]
        draft.put(("linux", "netDevices", name), {"name": device["name"]})
    _add_mounts(draft, edits.get("mounts") or [])
    for hook in edits.get("hooks") or ():
        draft.items("hooks", hook["hookName"]).append(_hook(hook))
    rdt = edits.get("intelRdt")
    if rdt is not None:
        draft.put(("linux", "intelRdt"), dict(rdt))
    for gid in edits.get("additionalGids") or ():
        if gid and gid not in draft.items("process", "user", "additionalGids"):
            draft.items("process", "user", "additionalGids").append(gid)
    return draft.values


class _Draft:
    """Pending changes of config.json: ``values`` has the new values by path."""

    def __init__(self, data: "dict[str, Any]") -> None:
        self.data = data
        self.values: dict[tuple[str, ...], Any] = {}
        self._names: dict[tuple[str, ...], set[str]] = {}

    def items(self, *path: str) -> "list[Any]":
        """Return the list at a path, as a copy to modify."""
        if path not in self.values:
            old = self.old(*path)
            if not isinstance(old, list | None):
                raise _misshapen(path, "a list")
            self.values[path] = [*(old or ())]
        found: list[Any] = self.values[path]
        return found

    def add(self, path: tuple[str, ...], key: str, new: "dict[str, Any]") -> None:
        """Add an item to a list; remove the first one with the same value at ``key``."""
        items = self.items(*path)
        if path not in self._names:
            self._names[path] = {str(each.get(key)) for each in items if isinstance(each, dict)}
        names = self._names[path]
        if new[key] in names:
            for place, item in enumerate(items):
                if isinstance(item, dict) and item.get(key) == new[key]:
                    del items[place]
                    break
        names.add(new[key])
        items.append(new)

    def put(self, path: tuple[str, ...], value: "Any") -> None:
        """Set a value, and replace any old one."""
        self.old(*path)
        self.values[path] = value

    def old(self, *path: str) -> "Any":
        """Return the value in config.json, None if there is none."""
        value: Any = self.data
        for depth, key in enumerate(path):
            if value is None:
                return None
            if not isinstance(value, dict):
                raise _misshapen(path[:depth], "an object")
            value = value.get(key)
        return value


def _misshapen(path: tuple[str, ...], expected: str) -> SpecError:
    return SpecError(
        f"{'.'.join(path)} in the container's config.json is not {expected}",
        "Report it to whatever wrote the bundle (the engine)",
    )


def _with(data: "Any", path: tuple[str, ...], value: "Any") -> "Any":
    """Return an object with another value at a path; objects on the path are copied or created."""
    if not path:
        return value
    return {**(data or {}), path[0]: _with((data or {}).get(path[0]), path[1:], value)}


def _some(table: "dict[str, Any]", *fields: str) -> "dict[str, Any]":
    """Return these fields of a table, without empty ones."""
    return {name: table[name] for name in fields if table.get(name) not in (None, "", [])}


def _set_variables(draft: _Draft, variables: list[str]) -> None:
    """Replace variables in place, all entries of a name; append new ones."""
    if not variables:
        return
    entries = draft.items("process", "env")
    places: dict[str, list[int]] = {}
    for place, entry in enumerate(entries):
        places.setdefault(str(entry).partition("=")[0], []).append(place)
    for variable in variables:
        name = variable.partition("=")[0]
        if name not in places:
            places[name] = [len(entries)]
            entries.append(variable)
        for place in places[name]:
            entries[place] = variable


def with_numbers(node: "dict[str, Any]", host: "Host") -> "dict[str, Any]":
    """Return a node with type and numbers, from the host if missing; CdiError if there are none.

    Numbers in the node are used unchecked: the host needn't have the node (yet).
    """
    kind = node.get("type") or ""
    if kind == "p" or (kind and node.get("major")):
        return node
    path = node.get("hostPath") or node["path"]
    try:
        found = host(path)
    except OSError as error:
        raise _bad_node(f"The device node {path} can't be read: {error.strerror}") from None
    if found is None:
        raise _bad_node(f"{path} isn't a device node")
    if kind and kind != found[0]:
        raise _bad_node(f"The device node {path} is of the type {found[0]}, not {kind}")
    numbers = {} if node.get("major") or found[0] == "p" else {"major": found[1], "minor": found[2]}
    mode = {"fileMode": found[3]} if node.get("fileMode") is None else {}
    return {**node, "type": found[0], **numbers, **mode}


def _bad_node(cause: str) -> CdiError:
    return CdiError(cause, "Load the driver, or generate the CDI specs again")


def _add_node(draft: _Draft, node: "dict[str, Any]") -> None:
    device = _some(node, "path", "type", "fileMode", "uid", "gid")
    kind, major, minor = node["type"], node.get("major") or 0, node.get("minor") or 0
    if kind != "p":
        device.update(major=major, minor=minor)
    for field in ("uid", "gid"):
        own = draft.old("process", "user", field)
        if field not in device and isinstance(own, int) and own > 0:
            device[field] = own
    draft.add(("linux", "devices"), "path", device)
    # The library writes an empty rule for no access; runc and crun refuse that.
    access = node.get("permissions") or "rwm"
    if kind in ("b", "c") and access != CDI_NO_ACCESS:
        rule = {"allow": True, "type": kind, "major": major, "minor": minor, "access": access}
        rules = draft.items("linux", "resources", "devices")
        if not _is_in_force(rules, rule):
            rules.append(rule)


def _is_in_force(rules: "list[Any]", rule: "dict[str, Any]") -> bool:
    """Tell whether a rule is present, and no later rule forbids anything."""
    for each in reversed(rules):
        if each == rule:
            return True
        if not isinstance(each, dict) or not each.get("allow"):
            return False
    return False


def _add_mounts(draft: _Draft, mounts: "list[dict[str, Any]]") -> None:
    if not mounts:
        return
    namespaces = draft.old("linux", "namespaces") or []
    mapped = any(isinstance(each, dict) and each.get("type") == "user" for each in namespaces)
    for mount in mounts:
        new = {"source": mount["hostPath"], "destination": mount["containerPath"]}
        new.update(_some(mount, "type", "options"))
        if mapped and (option := _mapping(mount)):
            new["options"] = [*(mount.get("options") or ()), option]
        draft.add(("mounts",), "destination", new)
    draft.items("mounts").sort(key=_depth)


def _mapping(mount: "dict[str, Any]") -> str:
    """Return the option that maps a bind mount's owners to the user namespace, else ""."""
    options = mount.get("options") or []
    recursive = "rbind" in options
    if not (recursive or "bind" in options or mount.get("type") == "bind"):
        return ""
    if "idmap" in options or "ridmap" in options:
        return ""
    return "ridmap" if recursive else "idmap"


def _depth(mount: "Any") -> int:
    """Return the depth of a mount's destination, which sorts mounts after those above them."""
    place = mount.get("destination") if isinstance(mount, dict) else None
    if not isinstance(place, str):
        return 0
    # normpath keeps two leading slashes, which may have a meaning in POSIX but not on Linux.
    return normpath(place).count("/") - (place.startswith("//") and not place.startswith("///"))
