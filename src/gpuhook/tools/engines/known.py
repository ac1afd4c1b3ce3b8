"""Registry of the supported container engines."""

from gpuhook.tools import extensions
from gpuhook.tools.engines.ask import Engine, EngineChanges, EngineRequest
from gpuhook.tools.engines.charliecloud import Charliecloud
from gpuhook.tools.engines.containerd import Containerd
from gpuhook.tools.engines.crio import Crio
from gpuhook.tools.engines.docker import Docker
from gpuhook.tools.engines.enroot import Enroot
from gpuhook.tools.engines.podman import Podman

_OTHERS = ("nspawn", "lxc")  # those of other packages


class _MissingEngine(Engine):
    """An engine of a system package that isn't installed."""

    has_runtimes = False

    def __init__(self, name: str) -> None:
        self.name = name

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Raise MissingPackageError."""
        engine: Engine = extensions.needed(f"engine-{self.name}", f"Support for {self.name}").ENGINE
        return engine.install(ask)

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return nothing: only the package knows."""
        del names, ask
        return []

    def is_present(self, ask: EngineRequest) -> bool:
        """Return False."""
        del ask
        return False


def _other(name: str) -> Engine:
    """Return the engine of another package."""
    module = extensions.module(f"engine-{name}")
    engine: Engine = module.ENGINE if module else _MissingEngine(name)
    return engine


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Docker(),
        Containerd(),
        Crio(),
        Podman(),
        Enroot(),
        Charliecloud(),
        *map(_other, _OTHERS),
    )
}
