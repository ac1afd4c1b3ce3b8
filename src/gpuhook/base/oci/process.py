"""Variables and groups of the container's process in config.json.

Source: OCI runtime specification, config.md (process.env, process.user.additionalGids,
linux.gidMappings).
"""

from gpuhook.base.oci.jsontext import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpuhook.base.oci.spec import Spec


class EnvironmentSetting(Record):
    """A variable for the container's process, with the reason.

    With ``front``, ``value`` is prepended to the variable's value, separated by a colon.
    """

    name: str
    value: str
    reason: str
    front: bool = False


def set_variable(spec: "Spec", setting: EnvironmentSetting) -> "Spec":
    """Return a spec whose process has the variable.

    Every entry of that name is replaced: a program sees the first, runtimes keep the last.
    """
    name, value = setting.name, setting.value
    old = _values(spec.data, name)
    if has_variable(spec.data, setting):
        return spec
    if setting.front and old and old[-1]:
        value = f"{value}:{old[-1]}"
    new = f"{name}={value}"
    if not old:
        return spec.append(("process", "env"), [new])
    entries = enumerate(spec.data["process"]["env"])
    changed = {index: new for index, entry in entries if _is_named(entry, name)}
    return spec.replace_items(("process", "env"), changed)


def has_variable(data: "dict[str, Any]", setting: EnvironmentSetting) -> bool:
    """Tell whether a spec's process has the variable already.

    A value to prepend counts anywhere: another vendor may have prepended its own later.
    """
    old = _values(data, setting.name)
    if setting.front:
        return bool(old) and all(f":{setting.value}:" in f":{each}:" for each in old)
    return bool(old) and all(each == setting.value for each in old)


def _values(data: "dict[str, Any]", name: str) -> list[str]:
    """Return the values of all entries of that name."""
    process = data.get("process")
    entries = process.get("env") if isinstance(process, dict) else None
    return [entry.partition("=")[2] for entry in entries or () if _is_named(entry, name)]


def _is_named(entry: str, name: str) -> bool:
    return isinstance(entry, str) and entry.partition("=")[0] == name


def add_groups(spec: "Spec", groups: "Iterable[int]") -> "Spec":
    """Return a spec whose process is in the host's groups, as far as possible."""
    missing = [found for gid in groups if (found := missing_group(spec.data, gid)) is not None]
    if not missing:
        return spec
    return spec.append(("process", "user", "additionalGids"), list(dict.fromkeys(missing)))


def missing_group(data: "dict[str, Any]", gid: int) -> int | None:
    """Return the container's number of one of the host's groups, if it is to be added.

    None if the process has it, or if its user namespace doesn't map it.
    """
    inside = group_inside(data, gid)
    return None if inside is None or inside in _groups(data) else inside


def _groups(data: "dict[str, Any]") -> "list[Any]":
    process = data.get("process")
    user = process.get("user") if isinstance(process, dict) else None
    if not isinstance(user, dict):
        return []
    more = user.get("additionalGids")
    return [user.get("gid", 0), *(more if isinstance(more, list) else ())]


def group_inside(data: "dict[str, Any]", gid: int) -> int | None:
    """Return the number of one of the host's groups in the container's user namespace.

    None if it isn't mapped, or if the namespace already exists.
    """
    linux = data.get("linux")
    linux = linux if isinstance(linux, dict) else {}
    spaces = linux.get("namespaces")
    spaces = spaces if isinstance(spaces, list) else []
    users = [each for each in spaces if isinstance(each, dict) and each.get("type") == "user"]
    if not users:
        return gid
    if any(each.get("path") for each in users):
        return None
    mappings = linux.get("gidMappings")
    for each in mappings if isinstance(mappings, list) else ():
        inside, outside, size = (_number(each, key) for key in ("containerID", "hostID", "size"))
        if outside <= gid < outside + size:
            return inside + gid - outside
    return None


def _number(mapping: "Any", key: str) -> int:
    """Return a number of a mapping as runtimes read it: 0 if it is missing."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return value if isinstance(value, int) else 0
