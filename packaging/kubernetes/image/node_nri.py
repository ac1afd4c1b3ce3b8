"""The plugin of the node's engine (NRI) as a unit of its systemd, for pods without a runtime."""

import hashlib

from node import Node, text_of
from node_unit import Unit, shipped

UNIT = Unit("gpuhook-nri.service", "gives pods their devices", waits=False)


def put_nri(node: Node, version: str) -> None:
    """Have the unit run this version with this config.toml; it is restarted where one changes."""
    read = f"{version}\n{text_of(node.settings_file) or ''}"
    digest = hashlib.sha256(read.encode()).hexdigest()
    text = shipped(UNIT.name, f"{node.programs}/gpuhook")
    UNIT.put(node, f"# What else it reads: {digest}\n{text}")
