"""The one operation that writes a small file of ours into a container.

Hot path: imports operations.
"""

from gpuhook.operations import Operation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.container import Container

_LIMIT = 1 << 20


class WriteFile(Operation):
    """Write a file whole, over what the image may have under that name."""

    kind = "write"

    def __init__(self, destination: str, content: str, mode: int, reason: str) -> None:
        super().__init__(reason)
        self.destination = destination
        self.content = content
        self.mode = mode

    @property
    def optional(self) -> bool:
        """Say yes: what we write makes things better, but not possible."""
        return True

    def describe(self) -> str:
        """Say which file."""
        return f"write {self.destination}"

    def execute(self, container: "Container") -> None:
        """Replace the file; one that says the same is left as it is."""
        new = self.content.encode()
        if container.read_file(self.destination, _LIMIT) != new:
            container.replace_file(self.destination, new, self.mode)

    def to_json(self) -> "dict[str, Any]":
        """Add place, mode and content."""
        return {
            "kind": self.kind,
            "destination": self.destination,
            "mode": f"{self.mode:04o}",
            "content": self.content,
            "reason": self.reason,
        }
