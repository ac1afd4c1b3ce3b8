"""Formats that plans are written in: config.json, CDI specs, fstab lines, unit settings.

``Operation.write_to`` calls the ``PlanWriter`` method for its kind, and each format is a subclass.
So a new kind of operation works in every format, and formats know no operation classes.
"""

import os

from gpuhook.core.plan.operations import BindFile, BindPart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from gpuhook.core.plan.operations import (
        AddGroup,
        AllowDevice,
        BindDevice,
        Operation,
        SetVariable,
        Symlink,
        UpdateLdCache,
    )

    # Paths that a file refers to, each with the path in the container that it stands for.
    Aliases = tuple[tuple[str, str], ...]


class PlanWriter:
    """Base of plan formats; ``unwritten`` are the operations that a format can't express."""

    def __init__(self) -> None:
        self.unwritten: list[Operation] = []

    def write(self, operations: "Iterable[Operation]") -> "Self":
        """Write operations in their order; return the writer."""
        for op in operations:
            op.write_to(self)
        return self

    def other(self, op: "Operation") -> None:
        """Write any other operation; methods that aren't overridden end here, too."""
        self.unwritten.append(op)

    def rule(self, op: "AllowDevice") -> None:
        """Write a device permission."""
        self.other(op)

    def variable(self, op: "SetVariable") -> None:
        """Write a variable of the process."""
        self.other(op)

    def group(self, op: "AddGroup") -> None:
        """Write a supplementary group of the process."""
        self.other(op)

    def node(self, op: "BindDevice") -> None:
        """Write a device node."""
        self.other(op)

    def mount(self, op: BindFile) -> None:
        """Write a mount of a file or a folder."""
        self.other(op)

    def copy(self, file: BindFile, aliases: "Aliases") -> None:  # noqa: ARG002 - links_as_mounts
        """Write a changed copy of a file; by default a mount of the original."""
        self.mount(file)

    def link(self, op: "Symlink") -> None:
        """Write a symbolic link."""
        self.other(op)

    def cache(self, op: "UpdateLdCache") -> None:
        """Write libraries for the loader's cache."""
        self.other(op)


class MountWriter(PlanWriter):
    """Base of formats without links: the target of a link is mounted in its place."""

    def __init__(self) -> None:
        super().__init__()
        self._links: dict[str, BindFile] = {}

    def write(self, operations: "Iterable[Operation]") -> "Self":
        """Write operations in their order, then the mounts that replace links."""
        operations = list(operations)
        self._links = links_as_mounts(operations)
        super().write(operations)
        return super().write(self._links.values())

    def link(self, op: "Symlink") -> None:
        """Skip a link whose target isn't mounted."""
        if op.destination not in self._links:
            self.other(op)


def links_as_mounts(operations: "Iterable[Operation]") -> dict[str, BindFile]:
    """Return, by destination, a mount for each link to a mounted file.

    Such a format can't change paths in a copied file either, so their targets are mounted there.
    """
    found = PlanIndex().write(operations)
    mounts: dict[str, BindFile] = {}
    for destination, link in found.links.items():
        target = found.targets[destination]
        op = found.mounts.get(found.targets.get(target, target))
        if op is not None:
            details = op.source, destination, op.options, link.reason
            mounts[destination] = BindPart("", *details)
    for copy, aliases in found.copies:
        for place, target in aliases:
            if target in found.mounts and place not in found.mounts and place not in mounts:
                op = found.mounts[target]
                mounts[place] = BindPart("", op.source, place, op.options, copy.reason)
    return mounts


class PlanIndex(PlanWriter):
    """Index of a plan's mounts, nodes and links, by their paths in the container.

    ``targets`` are the link targets, ``copies`` the changed files, each with the paths that it
    refers to. The copies are also among the mounts, with their paths on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mounts: dict[str, BindFile] = {}
        self.nodes: dict[str, BindDevice] = {}
        self.links: dict[str, Symlink] = {}
        self.targets: dict[str, str] = {}
        self.copies: list[tuple[BindFile, Aliases]] = []

    def copy(self, file: BindFile, aliases: "Aliases") -> None:
        """Record a copy, and its mount."""
        self.copies.append((file, aliases))
        self.mount(file)

    def mount(self, op: BindFile) -> None:
        """Record a mount."""
        self.mounts[op.destination] = op

    def node(self, op: "BindDevice") -> None:
        """Record a node."""
        self.nodes[op.destination] = op

    def link(self, op: "Symlink") -> None:
        """Record a link."""
        self.links[op.destination] = op
        self.targets[op.destination] = os.path.normpath(op.leads_to)
