"""Registry of the supported container engines."""

from gpuhook.tools.engines.ask import Engine
from gpuhook.tools.engines.charliecloud import Charliecloud
from gpuhook.tools.engines.containerd import Containerd
from gpuhook.tools.engines.crio import Crio
from gpuhook.tools.engines.docker import Docker
from gpuhook.tools.engines.enroot import Enroot
from gpuhook.tools.engines.nspawn import Nspawn
from gpuhook.tools.engines.podman import Podman

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Docker(),
        Containerd(),
        Crio(),
        Podman(),
        Enroot(),
        Charliecloud(),
        Nspawn(),
    )
}
