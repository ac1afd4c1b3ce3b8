"""A node's labels: AMD's, as its labeller has them, and how they get to the API server."""

import json
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import machines
import paper
import pytest

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import PluginError
from gpuhook.start import contract
from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.kubernetes.node_labels import OURS, Node, labels, text
from gpuhook.tools.kubernetes.settings import Settings
from gpuhook.vendors import registry


def made(*inventories: Inventory) -> dict[str, str]:
    found = [(contract.load(registry.KNOWN[each.vendor]), each) for each in inventories]
    made, warnings, failed = labels(found, Settings(), Config())
    assert not warnings
    assert not failed
    return made


def test_amd(tmp_path: Path) -> None:
    """What AMD's labeller writes for eight GPUs of one kind, but for family and firmware."""
    found = made(paper.machine("amd", tmp_path, 8, model="AMD Instinct MI308X (OAM)"))
    assert found == {
        "amd.com/compute-memory-partition": "spx_nps1",
        "amd.com/compute-partitioning-supported": "true",
        "amd.com/memory-partitioning-supported": "true",
        "amd.com/gpu.device-id": "74a2",
        "amd.com/gpu.driver-version": "6.12.12",
        "amd.com/gpu.product-name": "AMD_Instinct_MI308X_OAM",
        "amd.com/gpu.simd-count": "320",
        "amd.com/gpu.vram": "192G",
        "beta.amd.com/gpu.device-id": "74a2",
        "beta.amd.com/gpu.device-id.74a2": "8",
        "beta.amd.com/gpu.product-name": "AMD_Instinct_MI308X_OAM",
        "beta.amd.com/gpu.product-name.AMD_Instinct_MI308X_OAM": "8",
        "beta.amd.com/gpu.simd-count": "320",
        "beta.amd.com/gpu.simd-count.320": "8",
        "beta.amd.com/gpu.vram": "192G",
        "beta.amd.com/gpu.vram.192G": "8",
    }
    assert [*found] == sorted(found)


def test_amd_with_gpus_of_two_kinds(tmp_path: Path) -> None:
    found = made(paper.machine("amd", tmp_path, 2, split="0"))
    assert found["amd.com/gpu.vram.24G"] == found["beta.amd.com/gpu.vram.24G"] == "8"
    assert found["amd.com/gpu.vram.192G"] == "1"
    assert "amd.com/gpu.vram" not in found
    assert "amd.com/compute-memory-partition" not in found


def test_a_driver_that_fails_is_said(tmp_path: Path) -> None:
    vendor = contract.load(registry.KNOWN["nvidia"])
    found, _, failed = labels(
        [(vendor, machines.machine(machines.gpu(0, 0)))], Settings(), Config()
    )
    assert found == {}
    assert len(failed) == 1


def test_a_value_that_no_label_can_have(tmp_path: Path) -> None:
    machine = paper.machine("amd", tmp_path, 1, model="Ätna/1")
    vendor = contract.load(registry.KNOWN["amd"])
    found, warnings, _ = labels([(vendor, machine)], Settings(), Config())
    assert "amd.com/gpu.product-name" not in found
    assert any("amd.com/gpu.product-name" in each for each in warnings)
    word = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
    assert all(word.fullmatch(value) for value in found.values())


def test_other_vendors_have_none(tmp_path: Path) -> None:
    assert made(paper.machine("gaudi", tmp_path)) == {}


def test_text() -> None:
    assert text({"a/b": "c", "d/e": ""}) == "a/b=c\nd/e=\n"


# The API server ---------------------------------------------------------------------------------


class Server:
    """An API server with one node; ``status`` and ``answer`` are what it says where set."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {"labels": {"kubernetes.io/os": "linux"}}
        self.asked: list[tuple[str, str, str]] = []
        self.status, self.answer = 200, b""

    def handle(self, method: str, path: str, token: str, body: bytes) -> bytes:
        self.asked.append((method, path, token))
        if method == "PATCH" and self.status == 200:
            for part, changes in json.loads(body)["metadata"].items():
                kept = {**(self.metadata.get(part) or {}), **changes}
                self.metadata[part] = {k: v for k, v in kept.items() if v is not None}
        return self.answer or json.dumps({"metadata": self.metadata}).encode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    more = ["-nodes", "-days", "1", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", f"{tmp_path}/key.pem", "-out", f"{tmp_path}/ca.crt"]
    subprocess.run([*words, *more, *files], check=True, capture_output=True)
    (tmp_path / "token").write_text("secret\n")
    kept = Server()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            token = self.headers["Authorization"]
            said = kept.handle(self.command, self.path, token, body)
            self.send_response(kept.status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_PATCH = answer  # noqa: N815 - as the standard library calls them

        def log_message(self, *words: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key.pem")
    made.socket = context.wrap_socket(made.socket, server_side=True)
    kept.port = made.server_address[1]  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield kept
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.fixture
def node(server: Server, tmp_path: Path) -> Node:
    port = str(server.port)  # type: ignore[attr-defined]
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    return Node("n1", environ, str(tmp_path))


def test_a_node_is_labelled(server: Server, node: Node) -> None:
    assert node.keep({"amd.com/a": "1", "amd.com/b": "2"})
    assert server.metadata["labels"] == {
        "kubernetes.io/os": "linux", "amd.com/a": "1", "amd.com/b": "2",
    }  # fmt: skip
    assert {*server.asked} == {
        (method, "/api/v1/nodes/n1", "Bearer secret") for method in ("GET", "PATCH")
    }


def test_nothing_is_written_twice(server: Server, node: Node) -> None:
    node.keep({"amd.com/a": "1"})
    server.asked.clear()
    assert not node.keep({"amd.com/a": "1"})
    assert [method for method, *_ in server.asked] == ["GET"]


def test_what_is_ours_goes_and_nothing_else(server: Server, node: Node) -> None:
    server.metadata["labels"]["amd.com/theirs"] = "x"
    node.keep({"amd.com/a": "1", "amd.com/b": "2"})
    node.keep({"amd.com/b": "3", "amd.com/c": "4"})
    assert server.metadata["labels"] == {
        "kubernetes.io/os": "linux", "amd.com/theirs": "x", "amd.com/b": "3", "amd.com/c": "4",
    }  # fmt: skip
    node.keep({})
    assert server.metadata["labels"] == {"kubernetes.io/os": "linux", "amd.com/theirs": "x"}
    assert OURS not in server.metadata["annotations"]


@pytest.mark.parametrize(
    ("status", "answer"),
    [(403, b'{"message": "nodes is forbidden"}'), (500, b""), (200, b"no JSON"), (200, b"[]")],
)
def test_an_api_server_that_refuses(status: int, answer: bytes, server: Server, node: Node) -> None:
    server.status, server.answer = status, answer
    with pytest.raises(PluginError):
        node.keep({"amd.com/a": "1"})


def test_another_certificate_is_refused(server: Server, node: Node, tmp_path: Path) -> None:
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    more = ["-nodes", "-days", "1", "-subj", "/CN=y"]
    files = ["-keyout", f"{tmp_path}/other.pem", "-out", f"{tmp_path}/ca.crt"]
    subprocess.run([*words, *more, *files], check=True, capture_output=True)
    with pytest.raises(PluginError, match="CERTIFICATE_VERIFY_FAILED"):
        node.keep({"amd.com/a": "1"})
    assert not server.asked


def test_outside_of_a_pod() -> None:
    with pytest.raises(PluginError, match="isn't a pod"):
        Node("n1", {})
