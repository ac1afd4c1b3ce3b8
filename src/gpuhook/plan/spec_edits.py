"""Mode spec: the plan written into config.json, for the low-level runtime to do; no hook.

What the OCI spec has no words for stays undone, and the mode is for those who can do
without: /proc/driver/nvidia isn't covered, ld.so.cache isn't merged (libraries are mounted
under their SONAMEs in a folder that the loader searches by itself), no file is written.
"""

from gpuhook.plan.operations import AllowDevice, BindDevice, BindFile, Symlink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.oci.spec import Spec
    from gpuhook.plan.planner import Plan

_NODE_MODE = 0o666  # what the driver gives its nodes


def apply(spec: "Spec", plan: "Plan") -> "Spec":
    """Return the spec with the plan's device nodes and mounts; rules are added elsewhere."""
    devices = [_node(op) for op in plan.operations if isinstance(op, BindDevice)]
    mounts = [_mount(op.source, op.destination, op.options) for op in _binds(plan)]
    mounts += _links_as_mounts(plan)
    # A bundle that is started again holds them already.
    linux = spec.data.get("linux")
    devices = _missing(devices, linux.get("devices") if isinstance(linux, dict) else None)
    mounts = _missing(mounts, spec.data.get("mounts"))
    if devices:
        spec = spec.append(("linux", "devices"), devices)
    return spec.append(("mounts",), mounts) if mounts else spec


def _missing(wanted: "list[dict[str, Any]]", there: "Any") -> "list[dict[str, Any]]":
    return [one for one in wanted if not isinstance(there, list) or one not in there]


def undone(plan: "Plan") -> list[str]:
    """Say which of the plan's operations this mode leaves out."""
    done = (AllowDevice, BindDevice, BindFile)
    linked = {mount["destination"] for mount in _links_as_mounts(plan)}
    return [
        op.describe()
        for op in plan.operations
        if not isinstance(op, done) and getattr(op, "destination", "") not in linked
    ]


def _binds(plan: "Plan") -> list[BindFile]:
    return [op for op in plan.operations if isinstance(op, BindFile)]


def _node(op: BindDevice) -> "dict[str, Any]":
    return {
        "path": op.destination,
        "type": "c",
        "major": op.major,
        "minor": op.minor,
        "fileMode": _NODE_MODE,
        "uid": 0,
        "gid": 0,
    }


def _mount(source: str, destination: str, options: tuple[str, ...]) -> "dict[str, Any]":
    return {
        "destination": destination,
        "type": "bind",
        "source": source,
        "options": ["bind", "rprivate", *options],
    }


def _links_as_mounts(plan: "Plan") -> "list[dict[str, Any]]":
    """Return a mount for each link to something mounted: config.json can't make links."""
    binds = {op.destination: op for op in _binds(plan)}
    links = {
        op.destination: f"{op.destination.rpartition('/')[0]}/{op.target}"
        for op in plan.operations
        if isinstance(op, Symlink)
    }
    mounts = []
    for destination, target in links.items():
        op = binds.get(links.get(target, target))
        if op is not None:
            mounts.append(_mount(op.source, destination, op.options))
    return mounts
