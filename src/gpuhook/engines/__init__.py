"""The container engines that can be told about gpu-py: one module each, and what they share."""

from gpuhook.engines.ask import Answer, Ask, Engine
from gpuhook.engines.containerd import Containerd
from gpuhook.engines.crio import Crio
from gpuhook.engines.docker import Docker
from gpuhook.engines.podman import Podman
from gpuhook.engines.store import DEFAULT_STATE, Store

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (Docker(), Containerd(), Crio(), Podman())
}

__all__ = ["DEFAULT_STATE", "ENGINES", "Answer", "Ask", "Engine", "Store"]
