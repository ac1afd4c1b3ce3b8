"""The one operation that writes a small file of ours into a container.

Hot path: imports operations.
"""

from gpuhook.operations import Operation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.rootfs import Journal, Rootfs

_LIMIT = 1 << 20


class WriteFile(Operation):
    """Write a file whole, over what the image may have under that name."""

    kind = "write"

    def __init__(self, destination: str, content: str, mode: int, reason: str) -> None:
        super().__init__(reason)
        self.destination = destination
        self.content = content
        self.mode = mode

    def describe(self) -> str:
        """Say which file."""
        return f"write {self.destination}"

    def execute(self, container: "Rootfs", journal: "Journal") -> None:
        """Replace the file; the journal puts back what was there."""
        old = container.read_file(self.destination, _LIMIT)
        new = self.content.encode()
        if old == new:
            return
        container.replace_file(self.destination, new, self.mode)
        if old is None:
            journal.record(lambda: container.remove_file(self.destination))
        else:
            journal.record(lambda: container.replace_file(self.destination, old, self.mode))

    def to_json(self) -> "dict[str, Any]":
        """Add place, mode and content."""
        return {
            "kind": self.kind,
            "destination": self.destination,
            "mode": f"{self.mode:04o}",
            "content": self.content,
            "reason": self.reason,
        }
