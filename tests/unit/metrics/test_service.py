"""The root process of the exporter: the questions and privileges of its server process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import Breaking, serving
from timeouts import in_time

from gpuhook.metrics import answers, service
from gpuhook.metrics.model import Accelerator, Container, SeriesOptions, Snapshot, Usage
from gpuhook.metrics.web_files import WebContent

REQUEST = b"GET /metrics HTTP/1.1\r\n\r\n"


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().split("\n")
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def children(pid: int) -> list[int]:
    """Return the child processes that serve metrics."""
    with contextlib.suppress(FileNotFoundError):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(each) for each in found if status_of(int(each))["Name"] == "gpuhook-http"]
    return []


def the_server() -> int:
    """Return the process that serves metrics, a grandchild of this process."""
    with in_time():
        while True:
            ours = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in ours:
                if found := children(int(child)):
                    return found[0]
            time.sleep(0.01)


def answer(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, 60) as made, made.makefile("rb") as file:
        made.sendall(REQUEST)
        return file.read()


@pytest.mark.protects(
    "metrics-nobody", "metrics: the process that serves requests has no privileges", instead="pass"
)
def test_the_metrics_server_process_has_no_privileges(tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        assert answer(address).startswith(b"HTTP/1.0 200 ")
        found = status_of(the_server())
        assert found["NoNewPrivs"] == "1"
        for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(found[kind], 16) == 0
        nobody = 65534 if os.geteuid() == 0 else os.geteuid()
        assert found["Uid"].split("\t") == [str(nobody)] * 4
        assert os.geteuid() != 0 or found["Groups"] == ""


def test_an_ended_metrics_server_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        assert answer(address).startswith(b"HTTP/1.0 200 ")
        first = the_server()
        os.kill(first, signal.SIGKILL)
        assert answer(address).startswith(b"HTTP/1.0 200 ")
        assert the_server() != first
        assert "ended with signal 9" in (tmp_path / "told").read_text()


def test_the_root_process_imports_no_http_or_tls_modules() -> None:
    code = (
        "import sys; import gpuhook.metrics.commands.metrics; "
        "print(*{'ssl', 'bcrypt', 'prometheus_client', 'http.server'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


class Said:
    """A stand-in for the server process that records the answers that it gets."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def answer(self, line: bytes) -> None:
        self.lines.append(json.loads(line))


@pytest.fixture(scope="module")
def root_part(tmp_path_factory: pytest.TempPathFactory) -> service.Service:
    folder = tmp_path_factory.mktemp("service")
    return service.Service(Breaking(folder), SeriesOptions(), lambda _: None)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_lines = st.dictionaries(
    st.sampled_from(["files", "look", "ready", "error", "web", "snapshot", "x"]), _json, max_size=4
)


@given(_lines)
def test_any_line_from_the_metrics_server_gets_at_most_one_answer(
    root_part: service.Service, line: dict[str, Any]
) -> None:
    said = Said()
    root_part._hear(said, line)  # type: ignore[arg-type]
    for each in said.lines:
        assert set(each) <= {"files", "look", "snapshot", "seconds"}
        assert each.get("files", each.get("look")) in (line.get("files"), line.get("look"))
    assert len(said.lines) <= 1


_text = st.text(st.characters(), max_size=5)


@given(st.builds(Container, _text, pod=_text, devices=st.lists(_text, max_size=2).map(tuple)))
def test_a_snapshot_survives_the_round_trip_through_json(container: Container) -> None:
    device = Accelerator(
        "nvidia", "GPU-1", "0", xids={31: 2}, clock_reasons=("idle",), readings={"a": 1.5}
    )
    look = Snapshot(
        (device, Accelerator("amd", "b", "1", xids=None)), (container,), (Usage("c", "GPU-1", 1),),
        {"nvidia": "1"}, {"timeout": 1}, {"driver": 0.1}, ("a problem",), ("a note",), (), False,
    )  # fmt: skip
    line = answers.line(snapshot=answers.from_snapshot(look))
    assert answers.to_snapshot(json.loads(line)["snapshot"]) == look


def test_web_content_survives_the_transfer_to_the_server() -> None:
    content = WebContent("/x", {"min_version": ""}, {"key_file": b"\0\xff"}, {"a": "$2b$"}, {})
    assert answers.to_web(json.loads(answers.line(web=answers.from_web(content)))["web"]) == content
