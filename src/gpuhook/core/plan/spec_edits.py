"""Mode spec: the plan written into config.json, for the low-level runtime to execute; no hook.

What an OCI spec can't express is skipped, so the mode is for containers that don't need it.
Nothing in /proc is masked, no file is written, and ld.so.cache isn't merged: libraries are
mounted under their SONAMEs in a folder that the loader searches anyway.
"""

from gpuhook.core.plan.operations import (
    DEVICE_OPTIONS,
    AddGroup,
    AllowDevice,
    BindDevice,
    BindFile,
    Operation,
    SetVariable,
)
from gpuhook.core.plan.volumes import Volumes
from gpuhook.core.plan.writer import MountWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.base.oci.spec import Spec
    from gpuhook.core.plan.operations import Plan


class MakeNode(Operation):
    """Creation of a device node with the driver's numbers, by the low-level runtime."""

    kind = "device"
    shown = BindDevice.shown
    options = ()  # nodes have none

    def __init__(self, op: BindDevice) -> None:
        super().__init__(op.reason)
        self.source = op.source
        self.destination = op.destination
        self.major, self.minor = op.major, op.minor
        self.node = op.node

    def describe(self) -> str:
        """Describe the node and its numbers."""
        return f"make the device node {self.destination} ({self.major}:{self.minor})"


class SpecWriter(MountWriter):
    """Writer of a plan for config.json: ``steps`` are its operations, in the plan's order.

    ``left_out`` says, a sentence each, what a volume has no mount point for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Operation] = []
        self.left_out: list[str] = []
        self.nodes: list[MakeNode] = []
        self.mounts: list[BindFile] = []

    def other(self, op: Operation) -> None:
        """Keep operations of the runtime, and nothing else."""
        (self.steps if op.by_runtime else self.unwritten).append(op)

    def rule(self, op: AllowDevice) -> None:
        """Keep the rule; ``core.edit`` writes the missing ones."""
        self.steps.append(op)

    def variable(self, op: SetVariable) -> None:
        """Keep the variable: the runtime sets it in every mode."""
        self.steps.append(op)

    def group(self, op: AddGroup) -> None:
        """Keep the group: the runtime adds it in every mode."""
        self.steps.append(op)

    def node(self, op: BindDevice) -> None:
        """Create the node instead of mounting it."""
        made = MakeNode(op)
        self.steps.append(made)
        self.nodes.append(made)

    def mount(self, op: BindFile) -> None:
        """Keep the mount."""
        self.steps.append(op)
        self.mounts.append(op)

    def fit(self, volumes: Volumes) -> None:
        """Skip what can't be mounted, and what exists; VolumeError if it is required."""
        mounts, self.left_out = volumes.fit(self.mounts)
        gone = [op for op in self.mounts if op not in mounts]
        self.mounts = mounts
        self.steps = [op for op in self.steps if op not in gone]


def written(spec: "Spec", plan: "Plan", root: "Rootfs | None") -> SpecWriter:
    """Return a plan written for the config.json of a container with that root.

    A file that the image has in place of a link stays. VolumeError if a volume is in the way.
    """
    if root is None:
        return SpecWriter().write(plan.operations)
    done = SpecWriter().write(op for op in plan.operations if not op.is_kept(root))
    for op in done.mounts:
        # crun doesn't mount on a dangling link.
        if root.has_name(op.destination) and not root.exists(op.destination):
            op.destination = root.leads_to(op.destination)
    done.fit(Volumes(spec.data, root))
    return done


def apply(spec: "Spec", done: SpecWriter) -> "Spec":
    """Return the spec with a plan's device nodes and mounts; the rest is added elsewhere."""
    # In a user namespace nodes can't be created: runtimes mount the host's node of that name.
    elsewhere = [op for op in done.nodes if op.source != op.destination and spec.has_user_namespace]
    devices = [_node(op) for op in done.nodes if op not in elsewhere]
    mounts = [_mount(op.source, op.destination, DEVICE_OPTIONS) for op in elsewhere]
    mounts += [_mount(op.source, op.destination, op.options) for op in done.mounts]
    # A restarted bundle has them already, perhaps with old values.
    linux = spec.data.get("linux")
    found = linux.get("devices") if isinstance(linux, dict) else None
    there = found if isinstance(found, list) else []
    devices = _missing(devices, found)
    mounts = _missing(mounts, spec.data.get("mounts"))
    places = {node["path"] for node in devices}
    others = [node for node in there if _path(node) not in places]
    if len(others) < len(there):
        spec = spec.put({("linux", "devices"): [*others, *devices]})
    elif devices:
        spec = spec.append(("linux", "devices"), devices)
    return spec.append(("mounts",), mounts) if mounts else spec


def _path(node: "Any") -> str:
    path = node.get("path") if isinstance(node, dict) else None
    return path if isinstance(path, str) else ""


def _missing(wanted: "list[dict[str, Any]]", there: "Any") -> "list[dict[str, Any]]":
    return [one for one in wanted if not isinstance(there, list) or one not in there]


def _node(op: MakeNode) -> "dict[str, Any]":
    return {
        "path": op.destination,
        "type": "c",
        "major": op.major,
        "minor": op.minor,
        "fileMode": op.node.mode,
        "uid": op.node.uid,
        "gid": op.node.gid,
    }


def _mount(source: str, destination: str, options: "tuple[str, ...]") -> "dict[str, Any]":
    return {
        "destination": destination,
        "type": "bind",
        "source": source,
        "options": ["bind", "rprivate", *options],
    }
