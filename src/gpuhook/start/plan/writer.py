"""Formats that plans are written in: config.json, CDI specs, lines of fstab, settings of units.

A step says by ``Operation.write_to`` which method of a ``PlanWriter`` is for it, and a format is a
subclass. So a new kind of step is written everywhere, and a format knows no classes of steps.
"""

import os

from gpuhook.start.plan.operations import BindFile, BindPart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from gpuhook.start.plan.operations import (
        AddGroup,
        AllowDevice,
        BindDevice,
        Operation,
        SetVariable,
        Symlink,
        UpdateLdCache,
    )

    # Paths that a file names, each with the path in the container of what is meant by it.
    Aliases = tuple[tuple[str, str], ...]


class PlanWriter:
    """A format that plans are written in; ``unwritten`` are the steps that it has no words for."""

    def __init__(self) -> None:
        self.unwritten: list[Operation] = []

    def write(self, operations: "Iterable[Operation]") -> "Self":
        """Write steps, in their order; return the writer."""
        for op in operations:
            op.write_to(self)
        return self

    def other(self, op: "Operation") -> None:
        """Write a step of no kind below; what isn't overridden comes here, too."""
        self.unwritten.append(op)

    def rule(self, op: "AllowDevice") -> None:
        """Write a device to allow."""
        self.other(op)

    def variable(self, op: "SetVariable") -> None:
        """Write a variable of the process."""
        self.other(op)

    def group(self, op: "AddGroup") -> None:
        """Write a group of the process."""
        self.other(op)

    def node(self, op: "BindDevice") -> None:
        """Write a device node."""
        self.other(op)

    def mount(self, op: BindFile) -> None:
        """Write a mount of a file or a folder."""
        self.other(op)

    def copy(self, file: BindFile, aliases: "Aliases") -> None:  # noqa: ARG002 - links_as_mounts
        """Write a changed copy of a file: where nothing is changed, the mount of it as it is."""
        self.mount(file)

    def link(self, op: "Symlink") -> None:
        """Write a symbolic link."""
        self.other(op)

    def cache(self, op: "UpdateLdCache") -> None:
        """Write libraries for the loader's cache."""
        self.other(op)


class MountWriter(PlanWriter):
    """A format that has mounts and no links: what a link leads to is mounted in its place."""

    def __init__(self) -> None:
        super().__init__()
        self._links: dict[str, BindFile] = {}

    def write(self, operations: "Iterable[Operation]") -> "Self":
        """Write steps, in their order, then the mounts for links."""
        operations = list(operations)
        self._links = links_as_mounts(operations)
        super().write(operations)
        return super().write(self._links.values())

    def link(self, op: "Symlink") -> None:
        """Leave a link out that leads to nothing mounted."""
        if op.destination not in self._links:
            self.other(op)


def links_as_mounts(operations: "Iterable[Operation]") -> dict[str, BindFile]:
    """Return, by its place, a mount for each link to something that is mounted.

    Nor can such a format change the names in a copied file: what they mean is mounted there, too.
    """
    found = Places().write(operations)
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


class Places(PlanWriter):
    """What mounts, nodes and links of a plan have in the container, by their paths there.

    ``targets`` are the paths that links lead to, ``copies`` the files that are changed, each with
    the paths that it names. They are among the mounts, as they are on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mounts: dict[str, BindFile] = {}
        self.nodes: dict[str, BindDevice] = {}
        self.links: dict[str, Symlink] = {}
        self.targets: dict[str, str] = {}
        self.copies: list[tuple[BindFile, Aliases]] = []

    def copy(self, file: BindFile, aliases: "Aliases") -> None:
        """Note a copy, and its mount."""
        self.copies.append((file, aliases))
        self.mount(file)

    def mount(self, op: BindFile) -> None:
        """Note a mount."""
        self.mounts[op.destination] = op

    def node(self, op: "BindDevice") -> None:
        """Note a node."""
        self.nodes[op.destination] = op

    def link(self, op: "Symlink") -> None:
        """Note a link."""
        self.links[op.destination] = op
        self.targets[op.destination] = os.path.normpath(op.leads_to)
