"""The plugin of the node's engine (NRI) as a unit of its systemd, for pods without a runtime."""

from node import Node
from node_unit import Unit, shipped

UNIT = Unit("gpuhook-nri.service", "gives pods their devices", waits=False)


def put_nri(node: Node, version: str) -> None:
    """Have the unit run this version; it is restarted for another one, and reads config.toml."""
    text = shipped(UNIT.name, f"{node.programs}/gpuhook")
    UNIT.put(node, f"# Version: {version}\n{text}")
