"""What a container wants of exclusive devices, by what gpu-py knows and by its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import second_vendor
from second_vendor import spec_with

from gpuhook.config import Config
from gpuhook.inventory.model import Inventory
from gpuhook.oci.spec import Spec, State
from gpuhook.resolve import Resolved, resolve
from gpuhook.running import claims

KIND = "acme.example/npu"


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    second_vendor.know(monkeypatch)


@pytest.fixture
def npus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """A machine with NPUs, of which 1 is split."""
    made = second_vendor.machine(tmp_path / "acme", split="1")
    monkeypatch.setattr(claims, "get_inventory", lambda *_: made)
    return made


def config_of(*kinds: str, mode: str = "hook") -> Config:
    config = Config()
    config.exclusive, config.mode = kinds, mode
    config.cdi_kinds_from_environment = ("maker.example/card",)
    return config


def described(
    spec: dict[str, Any], config: Config, inventory: Inventory
) -> tuple[Resolved, dict[str, Any]]:
    """Return what a spec asks for, and the record of its container."""
    resolved = resolve(spec, config, inventories={"acme": inventory})
    assert resolved is not None
    state = State("web", 7, "/bundle", None)
    return resolved, claims.describe(state, Spec("spec", json.dumps(spec)), resolved, config)


@pytest.mark.parametrize(
    ("word", "kinds", "concerned"),
    [
        ("0", (KIND,), True),
        ("all", (KIND,), True),
        ("none", (KIND,), False),
        ("0", ("nvidia.com/gpu",), False),
        ("maker.example/card=a", ("maker.example/card",), True),
        ("maker.example/card=a", (KIND,), False),
    ],
)
def test_whom_it_concerns(
    npus: Inventory, word: str, kinds: tuple[str, ...], concerned: bool
) -> None:
    config = config_of(*kinds)
    resolved, _ = described(spec_with(f"ACME_VISIBLE_DEVICES={word}"), config, npus)
    assert claims.concern(resolved, config) == concerned


def test_a_part_is_written_down_with_its_whole(npus: Inventory) -> None:
    spec = spec_with("ACME_VISIBLE_DEVICES=1.0")
    _, record = described(spec, config_of(KIND), npus)
    [given] = record["given"]
    assert (given["kind"], given["selected"]) == (KIND, ["A-0001/0"])
    assert set(given["nodes"]) == {"A-0001/0", "A-0001"}
    assert record["documents"] == []


def test_devices_of_documents_are_known_by_their_nodes(npus: Inventory) -> None:
    """A name in a document, which may be old, is no proof of what it gives."""
    nodes = [npus.node("/dev/acme2"), npus.node("/dev/acme_dma2")]
    entries = [
        {"path": node.inside or node.path, "type": "c", "major": node.major, "minor": node.minor}
        for node in nodes
        if node is not None
    ]
    spec = spec_with(f"ACME_VISIBLE_DEVICES={KIND}=0,maker.example/card=a")
    config = config_of(KIND, "maker.example/card", mode="cdi")
    _, record = described({**spec, "linux": {"devices": entries}}, config, npus)
    assert [given["selected"] for given in record["given"]] == [["A-0002"]]
    assert record["documents"] == ["maker.example/card=a"]
    _, record = described(spec, config, npus)
    assert record["documents"] == [f"{KIND}=0", "maker.example/card=a"]
