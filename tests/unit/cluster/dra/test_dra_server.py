"""The process that serves the kubelet, while one of its drivers fails."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gpuhook.cluster.dra import server
from gpuhook.cluster.dra.options import DraOptions
from gpuhook.cluster.kubelet_endpoint import server as endpoint


def test_a_failed_driver_service_is_restarted_with_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor reports devices only at health changes, so the server keeps the state."""
    ours, theirs = socket.socketpair()
    said: list[str] = []
    device = {"pool": "n1", "device": "a", "health": 1, "message": ""}
    states: list[Any] = []

    def services(driver: Any) -> Any:
        states.append(driver.state)
        if len(states) == 2:
            ours.close()
        raise RuntimeError("of a test")

    monkeypatch.setattr(server._Driver, "_services", services)
    monkeypatch.setattr(endpoint, "_PAUSES", (0.01, 0.01))
    os.write(ours.fileno(), b'{"state": {"d": [{"pool": "n1", "device": "a", "health": 1, ')
    os.write(ours.fileno(), b'"message": ""}]}}\n')
    options = DraOptions(plugins=str(tmp_path), registry=str(tmp_path))
    assert asyncio.run(server.ClaimServer(options, None, theirs.detach(), said.append)._run()) == 0
    assert states[:2] == [[device], [device]]
    assert "is started again" in said[0]
