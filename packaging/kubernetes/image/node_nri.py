"""The plugin of the node's engine (NRI) as a unit of its systemd, for pods without a runtime."""

import hashlib

from node import Node, text_of
from node_unit import Unit

UNIT = Unit("gpuhook-nri.service", "gives pods their devices", waits=False)
# As docs/kubernetes/nri.md has it. A restart disturbs no container: the engine asks again.
_TEXT = """\
[Unit]
Description=Give pods their devices as a plugin of the engine
After=nvidia-persistenced.service containerd.service crio.service
Before=kubelet.service k3s.service k3s-agent.service rke2-server.service rke2-agent.service

[Service]
ExecStart={program} nri --gate
Restart=always
RestartSec=1

[Install]
WantedBy=multi-user.target
"""


def put_nri(node: Node, version: str) -> None:
    """Have the unit run this version with this config.toml; it is restarted where one changes."""
    read = f"{version}\n{text_of(node.settings_file) or ''}"
    digest = hashlib.sha256(read.encode()).hexdigest()
    text = _TEXT.format(program=f"{node.programs}/gpuhook")
    UNIT.put(node, f"# What else it reads: {digest}\n{text}")
