"""The parser process for engines' messages: restricted to parsing, with a gate that survives it."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from gpuhook.base.errors import PluginError
from gpuhook.cluster.nri import parser as module
from gpuhook.cluster.nri.asked import ContainerRequest
from gpuhook.cluster.nri.parser import NoMessageError, NriRequest, Parser

SERVICE = "nri.pkg.api.v1alpha1.Plugin"
PATIENCE = 20.0  # seconds, enough on a busy host


@pytest.fixture
def parser() -> Iterator[Parser]:
    made = Parser()
    try:
        yield made
    finally:
        made.close()


def request(method: str, payload: bytes = b"", service: str = SERVICE) -> bytes:
    return wire.message((1, service), (2, method), (3, payload))


def creating(*env: str) -> bytes:
    pod = wire.message((2, "pod"), (4, "team"), (6, wire.message((1, "a"), (2, "b"))), (7, "h"))
    mount = wire.message((1, "/to"), (3, "/from"))
    entries = ((8, each) for each in env)
    container = wire.message((1, "c1"), (3, "main"), *entries, (9, mount))
    return request("CreateContainer", wire.message((1, pod), (2, container)))


def test_the_parser_returns_requests_and_refuses_invalid_messages(parser: Parser) -> None:
    env = ("A=1", "", "B=\x01é\U0001f600", "A=2")
    found = parser.request(creating(*env), PATIENCE)
    expected = ContainerRequest(
        "team", "pod", "main", "h", env, (("/to", "/from"),), (), (("a", "b"),), id="c1"
    )
    assert found == NriRequest(SERVICE, "CreateContainer", asked=expected)
    configuring = request("Configure", wire.message((2, "containerd"), (3, "2.1")))
    assert parser.request(configuring, PATIENCE).engine == ("containerd", "2.1")
    assert parser.request(request("Synchronize", wire.message((3, 1))), PATIENCE).more
    assert parser.request(request("X"), PATIENCE) == NriRequest(SERVICE, "X")
    assert not parser.request(request("CreateContainer", b"\xff"), PATIENCE).understood
    assert parser.status(wire.message((1, wire.message((1, 5), (2, "no")))), PATIENCE) == (5, "no")
    assert parser.status(b"", PATIENCE) == (0, "")
    for parse in (parser.request, parser.status):
        with pytest.raises(NoMessageError, match="sent an invalid message"):
            parse(b"\xff\xff\xff", PATIENCE)


@pytest.mark.protects(
    "parser-privileges",
    "an NRI request is parsed without privileges",
    instead="kernel.set_no_new_privileges()",
)
@pytest.mark.protects(
    "parser-limits", "the NRI request parser can't open files or start processes", instead="pass"
)
def test_the_parser_runs_without_privileges_files_or_processes(parser: Parser) -> None:
    """The parser reads texts of tenants, so it runs as nobody and can't open or start anything."""
    parser.request(creating(), PATIENCE)
    folder = Path(f"/proc/{parser._pid}")
    status = dict(re.findall(r"(\w+):\t(.*)", (folder / "status").read_text()))
    assert status["Name"] == "gpuhook-parser"
    assert status["NoNewPrivs"] == "1"
    limits = (folder / "limits").read_text()
    for name in ("Max open files", "Max processes", "Max file size"):
        assert re.search(rf"{name} +0 +0 ", limits), name
    if os.geteuid() == 0:
        assert status["Uid"].split() == ["65534"] * 4
        assert status["Gid"].split() == ["65534"] * 4
        assert status["Groups"].strip() == ""
        kinds = ("Inh", "Prm", "Eff", "Amb")
        assert {int(status[f"Cap{kind}"], 16) for kind in kinds} == {0}
        descriptors = {os.readlink(each) for each in (folder / "fd").iterdir()}
        assert {each.partition(":")[0] for each in descriptors} == {"/dev/null", "socket"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_parser_refuses_the_request_and_is_replaced(
    parser: Parser, number: signal.Signals
) -> None:
    parser.request(creating(), PATIENCE)
    os.kill(parser._pid, number)
    with pytest.raises(PluginError, match=f"ended with signal {int(number)}"):
        parser.request(creating("A=" + "x" * (1 << 20)), PATIENCE)
    assert parser.request(creating("A=1"), PATIENCE).asked


@pytest.mark.protects(
    "parser-time", "an NRI request parser that hangs is killed within the engine's timeout"
)
def test_a_hung_parser_is_killed_and_replaced(parser: Parser) -> None:
    parser.request(creating(), PATIENCE)
    hanging = parser._pid
    for size in (1, 3 << 20):
        os.kill(parser._pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(PluginError, match="takes too long"):
            parser.request(creating("A=" + "x" * size), 0.2)
        assert time.monotonic() - begin < PATIENCE
        assert parser.request(creating("A=1"), PATIENCE).asked
    assert parser._pid != hanging
    with pytest.raises(ProcessLookupError):
        os.kill(hanging, 0)


RIGHT = module.parsed(True, creating("A=1"))
WRONG: dict[str, Any] = {
    "no object": ["a"], "no text": "a", "nothing": {}, "a number": {**RIGHT, "service": 5},
    "a list": {**RIGHT, "method": ["CreateContainer"]},
    "half an engine": {**RIGHT, "engine": ["a"]},
    "a text for asked": {**RIGHT, "asked": "a"}, "half of asked": {**RIGHT, "asked": {"env": []}},
    **{
        f"{key} is {value}": {**RIGHT, "asked": {**RIGHT["asked"], key: value}}
        for key in RIGHT["asked"]
        for value in (5, None, [5], [[["a", "b"]]], [["a", "b", "c"]], [["a", 5]], {"a": 5})
    },
}  # fmt: skip


@pytest.mark.protects(
    "parser-types", "results of the NRI request parser with unexpected types are refused"
)
@pytest.mark.parametrize("name", [*WRONG])
def test_a_parser_result_of_the_wrong_type_is_refused(
    parser: Parser, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A tenant may have taken over the parser, so root's process checks all types."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "parsed", lambda *_: WRONG[name])
        with pytest.raises(PluginError, match="returned something else"):
            parser.request(creating(), PATIENCE)
    assert parser.request(creating("A=1"), PATIENCE).asked


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=some.binary())
def test_arbitrary_bytes_do_not_stop_the_parser(parser: Parser, data: bytes) -> None:
    for parse in (parser.request, parser.status):
        try:
            parse(data, PATIENCE)
        except NoMessageError:
            continue
    assert parser.request(creating("A=1"), PATIENCE).asked
