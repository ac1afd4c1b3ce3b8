"""LXC as an engine of ``gpuhook install``: a container's file, and the file that it includes.

``hpc.lxc.containers`` generates both; the EngineRequest contains them.
"""

import os

from gpuhook.tools.engines import lxc_text, managed, whole_text
from gpuhook.tools.engines.ask import Engine, EngineChanges, EngineRequest
from gpuhook.tools.engines.files import read_text
from gpuhook.tools.engines.store import TargetFile

NAME = "lxc"


class Lxc(Engine):
    """LXC, for one container at a time."""

    name = NAME
    has_runtimes = False

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Return the included file, and unless its line is empty, the container's file."""
        if not ask.units:
            return EngineChanges(())
        (config, line), (included, text) = ask.units
        ours = ((whole_text.KEY,),)
        targets = [TargetFile(self.name, included, "whole", text, config, ours, ours=True)]
        if line:
            targets.append(self._with_line(config, line))
        return EngineChanges(tuple(targets), (self.afterwards(config),))

    def _with_line(self, config: str, line: str) -> TargetFile:
        """Return the container's file with the line; EngineError if a program writes it."""
        old = read_text(config) or ""
        wanted = {**lxc_text.parse(old, config), lxc_text.OURS: line}
        new = lxc_text.edited(old, wanted, config)
        if new != old and not lxc_text.is_proxmox(config):  # comments are notes there
            managed.check_edit(self.name, config, old, f"lxc.include = {line}")
        return TargetFile(self.name, config, NAME, new, config, ((lxc_text.OURS,),))

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return nothing: a container can also start without devices."""
        del names, ask
        return []

    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether a container is named."""
        return bool(ask.units)

    def afterwards(self, config: str = "") -> str:
        """Return the step after which a running container has the change."""
        if lxc_text.is_proxmox(config):
            number = os.path.basename(config).removesuffix(".conf")
            return f"If the container runs, restart it: pct reboot {number}"
        name = os.path.basename(os.path.dirname(config))
        return f"If the container runs, restart it: lxc-stop -r -n {name}"


ENGINE = Lxc()
