"""Node mounts and device rules by path, shared by the formats of LXC and systemd."""

from abc import ABC, abstractmethod

from gpuhook.core.plan.operations import AddGroup, AllowDevice, BindDevice, SetVariable
from gpuhook.core.plan.writer import MountWriter


class NodeWriter(MountWriter, ABC):
    """Base of formats in which a device rule is a path or a number, and an access.

    ``nodes`` are the mounted nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[BindDevice] = []
        self._allowed: list[AllowDevice] = []

    @property
    def rules(self) -> list[str]:
        """The devices to allow, by path, because a driver's major number may change."""
        named = [op for op in self.nodes if self.may_name(op.source)]
        paths = {(op.major, op.minor): op.source for op in named}
        return [
            f"{paths.get((op.major, op.minor)) or self.by_number(op.major, op.minor)} {op.access}"
            for op in self._allowed
        ]

    @abstractmethod
    def may_name(self, path: str) -> bool:
        """Tell whether a rule can name the node at this path of the host."""

    @abstractmethod
    def by_number(self, major: int, minor: int) -> str:
        """Return the name of a device in a rule without a path."""

    def rule(self, op: AllowDevice) -> None:
        """Allow a device."""
        self._allowed.append(op)

    def variable(self, op: SetVariable) -> None:
        """Do nothing: ``fstab.settings`` handles variables."""

    def group(self, op: AddGroup) -> None:
        """Do nothing: the users there log in by themselves."""

    def node(self, op: BindDevice) -> None:
        """Mount the node."""
        self.nodes.append(op)
