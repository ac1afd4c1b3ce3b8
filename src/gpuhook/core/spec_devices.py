"""Devices that a config.json exposes, as nodes or bind mounts, regardless of who added them."""

import os
import stat

from gpuhook.base.cgroup.access import in_first_user_namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from gpuhook.core.inventory.model import Device, Inventory

    Numbers = tuple[int, int]  # major and minor

# Majors of the kernel's own devices (Documentation/admin-guide/devices.txt): memory such as
# /dev/null, terminals, and misc devices such as /dev/fuse and /dev/net/tun.
SYSTEM = (1, 4, 5, 10, *range(136, 144))
_NO_CHARACTERS = ("b", "p")  # node types other than character devices, which are c and u


def numbers(data: "dict[str, Any]", bundle: str = "") -> "set[Numbers]":
    """Return the character devices that a config.json exposes as nodes or bind mounts.

    With a user namespace, runtimes mount the host's node of the same path and ignore the numbers.
    """
    linux = data.get("linux")
    linux = linux if isinstance(linux, dict) else {}
    found: set[Numbers] = set()
    sources = [each.get("source") for each in objects(data.get("mounts"))]
    for node in objects(linux.get("devices")):
        major, minor = node.get("major"), node.get("minor")
        if node.get("type") not in _NO_CHARACTERS:
            if isinstance(major, int) and isinstance(minor, int):
                found.add((major, minor))
            sources.append(node.get("path") if _is_mapped(linux) else None)
    there = {numbers_at(bundle, source) for source in sources}
    return found | {pair for pair in there if pair is not None}  # protects: claimed-node


def numbers_at(bundle: str, source: object) -> "Numbers | None":
    """Return the numbers of the character device that a mount has as its source, else None."""
    try:
        status = os.stat(os.path.join(bundle, source)) if isinstance(source, str) else None
    except (OSError, ValueError):  # doesn't exist, or isn't a path
        return None
    return numbers_of(status)


def numbers_of(status: os.stat_result | None) -> "Numbers | None":
    """Return the numbers of a character device, None for anything else."""
    if status is None or not stat.S_ISCHR(status.st_mode):
        return None
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def _is_mapped(linux: "dict[str, Any]") -> bool:
    spaces = objects(linux.get("namespaces"))
    return not in_first_user_namespace() or any(each.get("type") == "user" for each in spaces)


def allows_all(rule: "dict[str, Any]") -> bool:
    """Tell whether a rule of linux.resources.devices allows every device, as --privileged does."""
    every = rule.get("type") in (None, "", "a") and rule.get("access") == "rwm"
    return rule.get("allow") is True and every and {rule.get("major"), rule.get("minor")} <= {None}


def opened(rules: "Iterable[dict[str, Any]]") -> "set[Numbers]":
    """Return the devices that linux.resources.devices allows, except the kernel's own.

    Majors and minors are as in the rules; -1 means all.
    """
    found = set()
    for rule in rules:
        access = rule.get("access")
        to_use = isinstance(access, str) and not {*"rw"}.isdisjoint(access)
        if rule.get("allow") is True and to_use and rule.get("type") in (None, "", "a", "c", "u"):
            pair = rule.get("major"), rule.get("minor")
            major, minor = (each if isinstance(each, int) else -1 for each in pair)
            found.add((major, minor))
    return {pair for pair in found if pair[0] not in SYSTEM}


def objects(value: "Any") -> "Iterator[dict[str, Any]]":
    """Yield the objects of a list; nothing if the value isn't a list."""
    if isinstance(value, list):
        yield from (each for each in value if isinstance(each, dict))


def devices_of(has: "set[Numbers]", inventory: "Inventory") -> "list[Device]":
    """Return the devices with one of these nodes as their own, or with all their shared nodes.

    A device that is present only as the parent of a part is left out.
    """
    numbers = {node.path: node.numbers for node in inventory.nodes}
    nodes = {device.id: inventory.nodes_of(device) for device in inventory.devices}
    every = [path for paths in nodes.values() for path in paths]

    def is_there(device: "Device") -> bool:
        own = [path for path in nodes[device.id] if every.count(path) == 1]
        given = [numbers.get(path) in has for path in own or device.nodes]
        return any(given) if own else bool(given) and all(given)

    there = [device for device in inventory.devices if is_there(device)]
    parents = {device.parent for device in there}
    return [device for device in there if device.id not in parents]
