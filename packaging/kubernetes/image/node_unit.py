"""A unit of the node's systemd that the installer puts there."""

import os
import re
from dataclasses import dataclass
from importlib import resources

from node import Node, say, systemctl, text_of

from gpuhook.base.errors import EngineError
from gpuhook.base.host import files as host_files
from gpuhook.tools import extensions

_FIRST_LINE = "# Made by gpuhook's installer, which replaces and removes it.\n"


def shipped(name: str, program: str, **lines: tuple[str, ...]) -> str:
    """Return one of gpuhook's units for the program at ``program``.

    ``lines`` replace those of the same keys.
    """
    folders = (resources.files("gpuhook") / folder / "units" for folder in extensions.folders())
    [path] = [folder / name for folder in folders if (folder / name).is_file()]
    text = path.read_text("utf-8")
    text = text.replace("=/usr/bin/gpuhook ", f"={program} ")
    for key, values in lines.items():
        old = re.compile(rf"(?:^{key}=.*\n)+", re.MULTILINE)
        before, after = old.split(text)  # ValueError if the key isn't in exactly one place
        text = before + "".join(f"{key}={value}\n" for value in values) + after
    return text


@dataclass(frozen=True)
class Unit:
    """A unit of that ``name``; ``what`` says what it does on the node.

    With ``waits`` the installer waits until it has started.
    """

    name: str
    what: str
    waits: bool = True

    def put(self, node: Node, text: str) -> None:
        """Have the node run it with that text, in which a change is all that restarts it."""
        path, marker = self._path(node), self._marker(node)
        text = _FIRST_LINE + text
        without = [] if self.waits else ["--no-block"]
        if text_of(path) == text and not os.path.exists(marker):
            systemctl("start", *without, self.name)
            return
        with open(marker, "wb") as file:
            os.fsync(file)
        host_files.replace(path, text.encode(), 0o644)
        systemctl("daemon-reload")
        systemctl("enable", "--quiet", self.name)
        systemctl("restart", *without, self.name)
        os.unlink(marker)
        say(f"started {self.name}")

    def refuse(self, node: Node) -> None:
        """Raise EngineError where it is there and the node is to have none."""
        if text_of(self._path(node)) is not None:
            raise EngineError(
                f"{self.name} {self.what} on this node, and it isn't to any more",
                "Apply overlays/remove first, and this when that is done",
            )

    def remove(self, node: Node) -> None:
        """Stop it and take it away, where it is there."""
        if text_of(self._path(node)) is not None:
            systemctl("disable", "--quiet", "--now", self.name)
            os.unlink(self._path(node))
            systemctl("daemon-reload")
            say(f"removed {self.name}")
        if os.path.lexists(self._marker(node)):
            os.unlink(self._marker(node))

    def _path(self, node: Node) -> str:
        """Return its path; EngineError where it is there and isn't ours."""
        path = f"{node.units}/{self.name}"
        text = text_of(path)
        if text is not None and not text.startswith(_FIRST_LINE):
            raise EngineError(
                f"{path} is there, and install-node didn't put it there",
                f"Remove it (systemctl disable --now {self.name} before that); it is tried again "
                "then",
            )
        return path

    def _marker(self, node: Node) -> str:
        """Return the file that says that it hasn't been started with what it says now."""
        return f"{node.folder}/restart-{self.name.removesuffix('.service')}"
