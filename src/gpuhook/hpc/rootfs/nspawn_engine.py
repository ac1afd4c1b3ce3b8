"""systemd-nspawn: a machine's .nspawn file, and the devices allowed for its unit.

``hpc.rootfs.machines`` generates the lines from a plan; the EngineRequest contains them.
Sources: systemd.nspawn(5), systemd.resource-control(5).
"""

from gpuhook.tools.engines import unit_text
from gpuhook.tools.engines.ask import Engine, EngineChanges, EngineRequest
from gpuhook.tools.engines.files import read_text
from gpuhook.tools.engines.store import TargetFile

_AFTERWARDS = "Reload systemd's units, and restart the machine: systemctl daemon-reload"

NAME = "nspawn"


class Nspawn(Engine):
    """systemd-nspawn, for one machine at a time."""

    name = NAME
    has_runtimes = False

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Return the machine's files with our block at the end."""
        paths = [ask.system(path) for path, _ in ask.units]
        targets = []
        for path, (_, block) in zip(paths, ask.units, strict=True):
            text = read_text(path) or ""
            wanted = {**unit_text.parse(text, path), unit_text.OURS: block}
            new = unit_text.edited(text, wanted, path)
            targets.append(TargetFile(self.name, path, "unit", new, paths[0], ((unit_text.OURS,),)))
        return EngineChanges(tuple(targets), (_AFTERWARDS,) if targets else ())

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return nothing: a machine can also start without devices."""
        del names, ask
        return []

    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether a machine is named."""
        return bool(ask.units)

    def afterwards(self, config: str = "") -> str:  # noqa: ARG002
        """Return the step that makes systemd drop the removed lines."""
        return "systemctl daemon-reload"


ENGINE = Nspawn()
