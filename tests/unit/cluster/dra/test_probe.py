"""The liveness probe, with real sockets of a test server."""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuhook.base.errors import PluginError
from gpuhook.cluster.dra.probe import probe

OWN = sha256(b"pod-1").hexdigest()[:10]


class Plugin(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """One driver that serves both methods; ``slow`` and ``endpoint`` cause its failures."""

    def __init__(self, folder: Path, driver: str, own: str = OWN) -> None:
        self.asked: list[str] = []
        self.slow = 0.0
        self.endpoint = f"{folder}/dra.sock"
        self.server = grpc.server(ThreadPoolExecutor(2))
        self.server.add_generic_rpc_handlers((self,))
        for path in (f"{folder}/{driver}-{own}-reg.sock", self.endpoint):
            self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda *_: self.answer(details.method))

    def answer(self, method: str) -> bytes:
        self.asked.append(method.rpartition("/")[2])
        time.sleep(self.slow)
        if not method.endswith("GetInfo"):
            return b""
        fields = {1: "DRAPlugin", 2: "gpu.nvidia.com", 3: self.endpoint, 4: "v1.DRAPlugin"}
        return b"".join(
            bytes([number << 3 | 2, len(text)]) + text.encode() for number, text in fields.items()
        )


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short path, because the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="probe-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    made = Plugin(tmp_path, "gpu.nvidia.com")
    yield made
    made.server.stop(None).wait()


def test_a_plugin_that_answers_passes_the_probe(plugin: Plugin, tmp_path: Path) -> None:
    (tmp_path / "other.example.com-reg.sock").touch()  # another plugin's, which may be down
    assert probe(str(tmp_path), "pod-1", 20) == [f"gpu.nvidia.com-{OWN}-reg.sock"]
    assert plugin.asked == ["GetInfo", "NodePrepareResources"]


def test_another_instances_sockets_are_not_probed(plugin: Plugin, tmp_path: Path) -> None:
    assert probe(str(tmp_path), "pod-2", 20) == []
    assert plugin.asked == []


def test_a_plugin_that_hangs_fails_the_probe(plugin: Plugin, tmp_path: Path) -> None:
    plugin.slow = 2
    with pytest.raises(PluginError, match="GetInfo: DEADLINE_EXCEEDED"):
        probe(str(tmp_path), "pod-1", 0.3)


def test_an_unserved_or_invalid_endpoint_fails_the_probe(plugin: Plugin, tmp_path: Path) -> None:
    plugin.endpoint = f"{tmp_path}/none.sock"
    with pytest.raises(PluginError, match="NodePrepareResources: UNAVAILABLE"):
        probe(str(tmp_path), "pod-1", 20)
    plugin.endpoint = "elsewhere"
    with pytest.raises(PluginError, match="reports no endpoint"):
        probe(str(tmp_path), "pod-1", 20)


def test_a_missing_pod_uid_or_folder_fails_the_probe(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="POD_UID"):
        probe(str(tmp_path), "", 1)
    with pytest.raises(PluginError, match="can't be read"):
        probe(f"{tmp_path}/none", "pod-1", 1)
