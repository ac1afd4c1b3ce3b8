"""The process that speaks with the kubelet, where one of its drivers fails."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gpuhook.cluster.dra import server
from gpuhook.cluster.dra.options import Options
from gpuhook.cluster.kubelet_endpoint import server as endpoint


def test_a_driver_that_fails_is_begun_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor says how devices are when that changes, and not because of this."""
    ours, theirs = socket.socketpair()
    said: list[str] = []
    device = {"pool": "n1", "device": "a", "health": 1, "message": ""}
    begun: list[Any] = []

    async def run(driver: Any) -> None:
        await asyncio.sleep(0)
        begun.append(driver)
        if len(begun) == 2:
            ours.close()
        raise RuntimeError("of a test")

    monkeypatch.setattr(server._Driver, "run", run)
    monkeypatch.setattr(endpoint, "_AGAIN", 0.01)
    os.write(ours.fileno(), b'{"state": {"d": [{"pool": "n1", "device": "a", "health": 1, ')
    os.write(ours.fileno(), b'"message": ""}]}}\n')
    options = Options(plugins=str(tmp_path), registry=str(tmp_path))
    asyncio.run(server._ClaimServer(options, None, theirs.detach(), said.append).run())
    assert [[*each.state] for each in begun] == [[device], [device]]
    assert "is started again" in said[0]
