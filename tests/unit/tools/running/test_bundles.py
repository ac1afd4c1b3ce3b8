"""Devices in a low-level runtime's state file, and names of containers."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gpuhook.tools.running import bundles
from gpuhook.tools.running.names import Names

DEVICES = [(195, 0), (195, 1)]
RULES = [
    {"allow": False, "access": "rwm"},
    {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rw"},
]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle that allows one GPU; state files are searched only in its parent folder."""
    monkeypatch.setattr(bundles, "_STATE_FILES", (str(tmp_path / "*/state.json"),))
    folder = tmp_path / "bundle"
    folder.mkdir()
    spec = {"linux": {"resources": {"devices": RULES}}}
    (folder / "config.json").write_text(json.dumps(spec))
    return folder


def runc(bundle: Path, **more: Any) -> dict[str, Any]:
    labels = ["com.example=x", f"bundle={bundle}"]
    state = {"init_process_pid": 7, "init_process_start": 99, "config": {"labels": labels}}
    return {**state, **more}


def crun(bundle: Path) -> dict[str, Any]:
    return {"pid": 7, "process-start-time": 99, "bundle": str(bundle)}


def write(bundle: Path, state: Any) -> Path:
    path = bundle.parent / "container/state.json"
    path.parent.mkdir()
    path.write_text(state if isinstance(state, str) else json.dumps(state))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("state", [runc, crun])
def test_allowed_devices_are_read_from_the_runtimes_state_file(bundle: Path, state: Any) -> None:
    write(bundle, state(bundle))
    assert bundles.allowed_devices(7, 99, DEVICES) == [(195, 1)]


def test_another_process_with_the_same_pid_has_no_devices(bundle: Path) -> None:
    write(bundle, runc(bundle))
    assert bundles.allowed_devices(7, 98, DEVICES) is None
    assert bundles.allowed_devices(8, 99, DEVICES) is None


def test_a_state_file_writable_by_others_is_ignored(bundle: Path) -> None:
    write(bundle, runc(bundle)).chmod(0o622)
    assert bundles.allowed_devices(7, 99, DEVICES) is None


@pytest.mark.parametrize(
    "state",
    ["", "[", "[]", "{}", '{"pid": 7, "process-start-time": 99, "bundle": 3}',
     '{"init_process_pid": 7, "init_process_start": 99, "config": {"labels": 3}}',
     '{"init_process_pid": 7, "init_process_start": 99, "config": []}'],
)  # fmt: skip
def test_malformed_state_files_are_ignored(bundle: Path, state: str) -> None:
    write(bundle, state)
    assert bundles.allowed_devices(7, 99, DEVICES) is None


def test_a_missing_bundle_gives_no_devices(bundle: Path) -> None:
    write(bundle, runc(bundle))
    (bundle / "config.json").unlink()
    assert bundles.allowed_devices(7, 99, DEVICES) is None


# Names ----------------------------------------------------------------------------------------


ONE, TWO = "1" * 64, "2" * 64


def looked(folder: Path, *wanted: str) -> Names:
    names = Names()
    names.ask([("podman", each, f"{folder}/{each}/userdata") for each in wanted])
    return names


def test_container_names_are_read_from_podmans_store(tmp_path: Path) -> None:
    entries = [{"id": ONE, "names": ["web", "other"]}, {"id": TWO}, {"id": "3", "names": []}]
    (tmp_path / "containers.json").write_text(json.dumps(entries))
    names = looked(tmp_path, ONE, TWO)
    assert names.of(ONE) == ("web", "")
    assert names.of(TWO) == names.of("unknown") == ("", "")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[" * 10**5, '[{"id": 1, "names": 5}]', "null"])
def test_a_malformed_podman_store_gives_no_names(tmp_path: Path, text: str) -> None:
    (tmp_path / "containers.json").write_text(text)
    assert looked(tmp_path, ONE).of(ONE) == ("", "")


def test_a_renamed_container_gets_its_new_name(tmp_path: Path) -> None:
    now = time.monotonic()
    names = Names(lambda: now)
    for after, name in ((0, "web"), (61, "old-web"), (122, "web")):
        now += after
        (tmp_path / "containers.json").write_text(json.dumps([{"id": ONE, "names": [name]}]))
        names.ask([("podman", ONE, f"{tmp_path}/{ONE}/userdata")])
        assert names.of(ONE) == (name, "")


def test_missing_container_names_are_retried_and_unused_ones_dropped(tmp_path: Path) -> None:
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
