"""MPS' control daemon as a unit of the node's systemd, for GPUs that pods share by it."""

import hashlib

from node import Node, text_of
from node_unit import Unit, shipped

from gpuhook.base.config.loader import loads
from gpuhook.base.errors import EngineError

UNIT = Unit("gpuhook-mps.service", "keeps MPS' control daemon", waits=False)
# For nodes without a driver (yet) or a GPU. A restart of the unit ends the daemon and its clients.
_BEFORE = "kubelet.service k3s.service k3s-agent.service rke2-server.service rke2-agent.service"
_RESTART_SECONDS = "30"


def put_mps(node: Node, version: str) -> None:
    """Have the unit run this version with what config.toml says of MPS; EngineError without that.

    It is restarted where one of the two has changed, and only there.
    """
    config = loads(text_of(node.settings_file) or "")
    if not config.mps_devices:
        raise EngineError(
            f"{UNIT.name} is to be on this node, and its config.toml shares no GPU by MPS",
            "Set devices in [gpuhook.mps] of config.toml in the ConfigMap gpuhook-config",
        )
    settings = [getattr(config, name) for name in sorted(vars(config)) if name.startswith("mps_")]
    read = "\n".join(map(str, [version, config.root, *settings]))
    digest = hashlib.sha256(read.encode()).hexdigest()
    lines = {"Before": (_BEFORE,), "RestartSec": (_RESTART_SECONDS,)}
    text = shipped(UNIT.name, f"{node.programs}/gpuhook", **lines)
    UNIT.put(node, f"# What else it reads: {digest}\n{text}")


def refuse_mps(node: Node) -> None:
    """Raise EngineError where the unit is there and the node is to have none."""
    UNIT.refuse(node)


def remove_mps(node: Node) -> None:
    """Stop the unit and take it away, where it is there."""
    UNIT.remove(node)
