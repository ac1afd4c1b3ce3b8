"""Messages of a container start about a CDI name that no spec contains."""

import json
from pathlib import Path

import pytest

from gpuhook.base.errors import UnknownDeviceError
from gpuhook.core.cdi import apply, folders


def of(kind: str, *devices: str) -> str:
    entries = [{"name": name, "containerEdits": {"env": ["A=b"]}} for name in devices]
    return json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": entries})


def said(folder: Path, *names: str) -> str:
    found = folders.read_folders([str(folder)])
    with pytest.raises(UnknownDeviceError) as caught:
        apply.resolve(found, names)
    message = str(caught.value)
    assert len(message) <= 450
    assert message.isprintable()
    assert "gpuhook cdi list" in message
    assert repr(names[0])[:40] in message
    return message


def test_the_error_lists_existing_devices_of_the_kind(tmp_path: Path) -> None:
    names = [*map(str, range(12)), "all", "GPU-0a"]
    (tmp_path / "maker.json").write_text(of("maker.example/card", *names))
    (tmp_path / "other.json").write_text(of("other.example/card", "zzz"))
    message = said(tmp_path, "maker.example/card=77")
    assert "of 'maker.example/card' there are 0, 1, 2" in message
    assert "10, 11, all, GPU-0a" in message
    assert "zzz" not in message


def test_a_few_of_many_device_names_are_listed(tmp_path: Path) -> None:
    names = [f"card-{number:03}" for number in range(200)]
    (tmp_path / "maker.json").write_text(of("maker.example/card", *names))
    message = said(tmp_path, "maker.example/card=x")
    assert "card-000, card-001" in message
    assert "and 19" in message
    assert "more" in message


def test_the_error_says_that_no_cdi_spec_is_of_the_kind(tmp_path: Path) -> None:
    (tmp_path / "maker.json").write_text(of("maker.example/card", "a"))
    message = said(tmp_path, "maker.example/other=a")
    assert f"no CDI spec in {tmp_path} is of the kind 'maker.example/other'" in message


def test_a_broken_spec_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a-other.json").write_text("{")
    (tmp_path / "maker.example-card.yaml").write_text("cdiVersion: 0.3.0\nkind: [\n")
    message = said(tmp_path, "maker.example/card=a")
    assert f"{tmp_path}/maker.example-card.yaml, line " in message
    assert "a-other" not in message, "the other one is likelier"
    (tmp_path / "maker.example-card.yaml").unlink()
    assert f"{tmp_path}/a-other.json, line " in said(tmp_path, "maker.example/card=a")


def test_a_spec_file_unread_for_its_extension_is_named(tmp_path: Path) -> None:
    (tmp_path / "maker.yml").write_text(of("maker.example/card", "a"))
    (tmp_path / "README").write_text("Look here.")
    message = said(tmp_path, "maker.example/card=a")
    assert f"{tmp_path}/maker.yml isn't read" in message
    assert "README" not in message


def test_messages_with_long_names_stay_short(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["x" * 60] * 5)
    deep.mkdir(parents=True)
    (deep / "a.json").write_text("{")
    (deep / "b.yml").write_text("")
    names = [f"maker.example/{'c' * 50}{number}={'d' * 500}" for number in range(40)]
    assert "more" in said(deep, *names)
    devices = ["e" * 300, "f" * 300]
    (deep / "c.json").write_text(of("maker.example/card", *devices))
    (deep / "d.json").write_text(of("maker.example/card", *devices))
    said(deep, f"maker.example/card={devices[0]}", f"maker.example/card={devices[1]}")
