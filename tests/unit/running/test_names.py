"""Names of containers, from podman's store and from whoever else answers."""

import json
import time
from pathlib import Path

import pytest

from gpuhook.tools.running.names import Names

ONE, TWO = "1" * 64, "2" * 64


def looked(folder: Path, *wanted: str) -> Names:
    names = Names()
    names.ask([("podman", each, f"{folder}/{each}/userdata") for each in wanted])
    return names


def test_podmans_store(tmp_path: Path) -> None:
    entries = [{"id": ONE, "names": ["web", "other"]}, {"id": TWO}, {"id": "3", "names": []}]
    (tmp_path / "containers.json").write_text(json.dumps(entries))
    names = looked(tmp_path, ONE, TWO)
    assert names.of(ONE) == ("web", "")
    assert names.of(TWO) == names.of("unknown") == ("", "")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[" * 10**5, '[{"id": 1, "names": 5}]', "null"])
def test_a_store_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "containers.json").write_text(text)
    assert looked(tmp_path, ONE).of(ONE) == ("", "")


def test_nothing_is_asked_again_at_once_nor_remembered_for_ever(tmp_path: Path) -> None:
    now = time.monotonic()
    names = Names(lambda: now)
    wanted = [("podman", ONE, f"{tmp_path}/{ONE}/userdata")]
    names.ask(wanted)
    (tmp_path / "containers.json").write_text(json.dumps([{"id": ONE, "names": ["web"]}]))
    names.ask(wanted)
    assert names.of(ONE) == ("", "")
    now += 60
    names.ask(wanted)
    assert names.of(ONE) == ("web", "")
    names.ask([])
    assert names.of(ONE) == ("", "")
