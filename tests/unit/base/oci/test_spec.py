"""oci: config.json keeps its content, and any container state is read or refused."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import SpecError, StateError, UnusableSpecError
from gpuhook.base.oci.spec import Spec, parse_state, read_spec

CONFIG = {
    "ociVersion": "1.0.2",
    "process": {"env": ["A=1"]},
    "root": {"path": "rootfs"},
    "hooks": {"prestart": [{"path": "/proc/1/exe", "args": ["libnetwork-setkey"]}]},
    "linux": {
        "namespaces": [{"type": "pid"}, {"type": "mount"}],
        "resources": {"devices": [{"allow": False, "access": "rwm"}]},
    },
    "unknown": {"deep": [1.0, {"x": None}]},
}


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_append_keeps_existing_content(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, json.dumps(CONFIG)))
    spec.append(("hooks", "prestart"), [{"path": "/h"}]).write()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["hooks"]["prestart"] == [*CONFIG["hooks"]["prestart"], {"path": "/h"}]  # type: ignore[index]
    written["hooks"] = CONFIG["hooks"]
    assert written == CONFIG


def test_write_keeps_mode_and_odd_bytes_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    text = b'{"process": {"env": ["A=\xff\xfe"]}, "n": 1E400, "s": "\\ud800\\u0000"}'
    path = write(tmp_path, text)
    os.chmod(path, 0o640)
    read_spec(path).append(("hooks", "prestart"), [{"path": "/h"}]).write()
    written = Path(path).read_bytes()
    assert written == text[:1] + b'"hooks":{"prestart":[{"path":"/h"}]},' + text[1:]
    assert os.stat(path).st_mode & 0o7777 == 0o640
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    path = write(tmp_path, "{}")
    spec = read_spec(path).append(("hooks", "prestart"), [{"path": "/h"}])
    os.unlink(path)
    with pytest.raises(SpecError, match="can't be written"):
        spec.write()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "null"])
def test_an_invalid_spec_is_one_clear_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match=r"config\.json"):
        read_spec(write(tmp_path, text))


def test_missing_spec_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(UnusableSpecError, match=str(tmp_path)):
        read_spec(str(tmp_path / "config.json"))


@pytest.mark.parametrize("path", ["", "file/config.json", "missing/config.json"])
def test_a_spec_path_that_is_no_file_is_unusable(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableSpecError):
        read_spec(str(tmp_path / path))


def test_a_pipe_as_config_json_is_an_error_that_is_not_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(SpecError) as caught:
        read_spec(str(tmp_path / "config.json"))
    assert not isinstance(caught.value, UnusableSpecError)


@pytest.mark.parametrize("hooks", [None, 5, [], {"prestart": 5}, {"prestart": [5, None]}])
def test_hooks_of_a_wrong_type_are_ignored(hooks: object) -> None:
    spec = Spec("/b/config.json", json.dumps({"hooks": hooks}))
    assert spec.hooks("prestart") == []
    assert spec.drop_hooks("prestart", ("x",)).text == spec.text


def test_appending_to_a_wrong_type_is_refused() -> None:
    spec = Spec("/b/config.json", '{"hooks": {"prestart": 5}}')
    with pytest.raises(SpecError, match=r"hooks\.prestart"):
        spec.append(("hooks", "prestart"), [{}])


def test_drop_hooks_removes_only_the_named_hooks() -> None:
    hooks = [{"path": "/usr/bin/nvidia-container-runtime-hook"}, {"path": "/x/other"}]
    spec = Spec("/b/config.json", json.dumps({"hooks": {"prestart": hooks}}))
    dropped = spec.drop_hooks("prestart", ("nvidia-container-runtime-hook",))
    assert dropped.hooks("prestart") == [{"path": "/x/other"}]


@pytest.mark.parametrize(
    ("root", "expected"),
    [({"path": "/abs"}, "/abs"), ({"path": "rootfs"}, "/b/rootfs"), ({}, "/b"), (None, "/b")],
)
def test_the_root_path_is_resolved_against_the_bundle(root: object, expected: str) -> None:
    assert Spec("/b/config.json", json.dumps({"root": root})).root_path == expected


def test_a_mount_namespace_is_recognized() -> None:
    assert Spec("/b/c", json.dumps(CONFIG)).has_mount_namespace
    assert not Spec("/b/c", "{}").has_mount_namespace
    assert not Spec("/b/c", '{"linux": {"namespaces": [{"type": "pid"}]}}').has_mount_namespace


def test_only_an_ordinary_user_rewrites_a_file_whose_owner_it_cannot_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Slurm the user can't give the new file to root, and needn't."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    path = write(tmp_path, json.dumps(CONFIG))
    monkeypatch.setattr(os, "fchown", refused)
    changed = read_spec(path).append(("process", "env"), ["B=2"])
    # From here on, the file belongs to another user.
    real, own = os.stat, os.geteuid()
    like = os.stat_result((*real(path)[:4], own + 1, *real(path)[5:10]))
    monkeypatch.setattr(
        os, "stat", lambda name, **more: like if name == path else real(name, **more)
    )
    monkeypatch.setattr(os, "geteuid", lambda: own or 1000)
    changed.write()
    assert "B=2" in read_spec(path).data["process"]["env"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SpecError, match="can't be written"):
        changed.write()


def test_a_user_namespace_is_recognized() -> None:
    assert not Spec("/b/c", json.dumps(CONFIG)).has_user_namespace
    for more in ("", ', "path": "/proc/7/ns/user"'):
        text = f'{{"linux": {{"namespaces": [{{"type": "user"{more}}}]}}}}'
        assert Spec("/b/c", text).has_user_namespace


@pytest.mark.parametrize("pid", ['"pid": 1,', '"pid": 0,', "", '"pid": "x",'])
def test_the_pid_in_a_container_hooks_state_is_ignored(pid: str) -> None:
    """Depending on the runtime, the pid is the one inside the container, or missing."""
    state = parse_state(f'{{{pid} "id": "c", "bundle": "/b"}}'.encode(), needs_pid=False)
    assert (state.container_id, state.pid, state.bundle) == ("c", 0, "/b")


def test_current_and_old_runc_states_are_read() -> None:
    state = parse_state(b'{"id": "c", "pid": 7, "bundle": "/b", "root": "/r"}')
    assert (state.container_id, state.pid, state.bundle, state.root) == ("c", 7, "/b", "/r")
    state = parse_state(b'{"pid": 7, "bundle": "/b", "root": "rootfs"}')
    assert state.root == "/b/rootfs"
    assert parse_state(b'{"pid": 7, "bundlePath": "/old"}').bundle == "/old"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"not json", b"[]", b"{}", b'{"pid": 0, "bundle": "/b"}', b'{"pid": 7}',
        b'{"pid": true, "bundle": "/b"}', b'{"pid": "7", "bundle": "/b"}',
        b'{"pid": 7, "bundle": "relative"}', b"\xff",
    ],
)  # fmt: skip
def test_unusable_state_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(StateError, match="standard input"):
        parse_state(data)


@given(st.binary())
def test_arbitrary_state_bytes_cause_no_crash(data: bytes) -> None:
    try:
        parse_state(data)
    except StateError:
        pass
