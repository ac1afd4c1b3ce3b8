"""The container engines that can be told about gpu-py: one module each, and what they share."""

from gpuhook.tools.engines.ask import Answer, Ask, Engine
from gpuhook.tools.engines.containerd import Containerd
from gpuhook.tools.engines.crio import Crio
from gpuhook.tools.engines.docker import Docker
from gpuhook.tools.engines.podman import Podman
from gpuhook.tools.engines.store import DEFAULT_STATE, Store

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (Docker(), Containerd(), Crio(), Podman())
}

__all__ = ["DEFAULT_STATE", "ENGINES", "Answer", "Ask", "Engine", "Store"]
