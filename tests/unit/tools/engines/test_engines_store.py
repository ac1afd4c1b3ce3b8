"""Records of changes to engines' files, and exact restoration of these files."""

import errno
import fcntl
import json
import os
import sys
import threading
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from timeouts import in_time

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines import installer, toml_text
from gpuhook.tools.engines import store as stores
from gpuhook.tools.engines.files import DROP_IN_HEADER
from gpuhook.tools.engines.podman import HOOK_KEYS, hook_document
from gpuhook.tools.engines.store import Store, TargetFile

OLD = '{"debug":   true}\n'
NEW = '{"debug":   true, "runtimes": {"gpu-py": {"path": "/p"}}}\n'
OWNED = (("runtimes", "gpu-py"),)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "state"))


def target(path: Path, text: str = NEW, *, ours: bool = False) -> TargetFile:
    return TargetFile("docker", str(path), "json", text, str(path), OWNED, ours)


def put(store: Store, wanted: TargetFile) -> None:
    with store.locked():
        installer.install(store, [wanted])


def take(store: Store) -> None:
    with store.locked():
        installer.uninstall(store, store.records())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An engine's file in its original state."""
    made = tmp_path / "daemon.json"
    made.write_text(OLD)
    return made


def test_a_file_is_restored_with_its_mode(store: Store, tmp_path: Path, path: Path) -> None:
    path.chmod(0o640)
    put(store, target(path))
    assert path.read_text() == NEW
    put(store, target(path))
    assert path.stat().st_mode & 0o777 == 0o640
    take(store)
    assert path.read_text() == OLD
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_created_file_is_removed_with_its_folders(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "etc" / "docker" / "daemon.json"
    put(store, target(path))
    put(store, target(path, NEW.replace("/p", "/q")))
    assert path.stat().st_mode & 0o777 == 0o644
    take(store)
    assert list(tmp_path.iterdir()) == []


def test_folders_in_records_of_earlier_versions_are_removed(store: Store, tmp_path: Path) -> None:
    """Each of those records lists the folders that were created for its file."""
    path = tmp_path / "etc" / "docker" / "daemon.json"
    put(store, target(path))
    (listed,) = (tmp_path / "state").glob("folders.json")
    [record] = (tmp_path / "state" / "engines").glob("*/record.json")
    folders = json.loads(listed.read_text())
    record.write_text(json.dumps({**json.loads(record.read_text()), "folders": folders}))
    listed.unlink()
    assert str(path.parent) in folders
    put(store, target(path, NEW.replace("/p", "/q")))
    take(store)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.protects(
    "dead-links", "installation: no file is created through a dangling symbolic link"
)
@pytest.mark.parametrize("ours", [False, True])
def test_a_dangling_link_is_refused(store: Store, tmp_path: Path, ours: bool) -> None:
    """gpuhook would create its target, and uninstall couldn't tell who made the link."""
    path = tmp_path / "daemon.json"
    path.symlink_to("gone.json")
    with pytest.raises(EngineError, match=f"{path} is a link to gone.json, which doesn't exist"):
        put(store, target(path, ours=ours))
    assert [*tmp_path.iterdir()] == [path]
    (tmp_path / "gone.json").write_text(OLD)
    put(store, target(path))
    take(store)
    assert (path.is_symlink(), path.read_text()) == (True, OLD)


def test_a_created_folder_with_other_files_is_not_removed(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "etc" / "daemon.json"
    put(store, target(path))
    (path.parent / "other").touch()
    take(store)
    assert [item.name for item in path.parent.iterdir()] == ["other"]


def test_a_later_change_by_another_program_survives_removal(store: Store, path: Path) -> None:
    put(store, target(path))
    path.write_text(NEW.replace("true", "false"))
    take(store)
    assert json.loads(path.read_text()) == json.loads(OLD) | {"debug": False}


def test_a_users_edit_between_two_installations_stays(store: Store, path: Path) -> None:
    put(store, target(path))
    path.write_text(NEW.replace("true", "false"))
    put(store, target(path, NEW.replace("true", "false").replace("/p", "/q")))
    take(store)
    assert json.loads(path.read_text()) == json.loads(OLD) | {"debug": False}


def test_foreign_settings_in_a_generated_file_are_kept(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "99-gpuhook.conf"

    def ours(program: str, *supports: str) -> TargetFile:
        settings = {"supports": [*supports], "runtimes": {"gpu-py": [program]}}
        text = toml_text.render({"engine": settings}, DROP_IN_HEADER)
        owned = (("engine", "runtimes", "gpu-py"),)
        return TargetFile("podman", str(path), "toml", text, str(path), owned, ours=True)

    put(store, ours("/p", "crun", "gpu-py"))
    text = path.read_text().replace("[engine]\n", '[engine]\n# Mine.\nlogger = "file"\n', 1)
    path.write_text(text.replace('"crun",', '"crun", "other",') + '\n[network]\nname = "x"\n')
    for program in ("/p", "/q", "/q"):
        put(store, ours(program, "crun", "runc", "gpu-py"))
        text = path.read_text()
        assert "# Mine." in text
        assert tomllib.loads(text) == {
            "engine": {
                "logger": "file",
                "supports": ["crun", "runc", "gpu-py", "other"],
                "runtimes": {"gpu-py": [program]},
            },
            "network": {"name": "x"},
        }
    take(store)
    rest = {"engine": {"logger": "file", "supports": ["other"]}, "network": {"name": "x"}}
    assert tomllib.loads(path.read_text()) == rest
    put(store, ours("/p", "crun", "gpu-py"))  # the store no longer remembers this file
    assert tomllib.loads(path.read_text())["network"] == {"name": "x"}
    assert tomllib.loads(path.read_text())["engine"]["supports"] == ["crun", "gpu-py", "other"]
    take(store)
    assert tomllib.loads(path.read_text()) == rest


def test_an_engine_file_deleted_meanwhile_is_not_restored(
    store: Store, tmp_path: Path, path: Path
) -> None:
    put(store, target(path))
    path.unlink()
    take(store)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_foreign_file_is_not_replaced(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "99-gpuhook.json"
    path.write_text(OLD)
    with pytest.raises(EngineError, match="exists and is not a file of gpuhook"):
        put(store, target(path, ours=True))
    assert path.read_text() == OLD
    assert store.records() == []


@pytest.mark.parametrize("path_of_hook", ["/usr/bin/gpuhook-prestart", "/usr/bin/other"])
def test_a_hook_file_is_known_by_its_program(
    store: Store, tmp_path: Path, path_of_hook: str
) -> None:
    path = tmp_path / "gpuhook.json"
    path.write_text(json.dumps({"hook": {"path": path_of_hook}}))
    if path_of_hook == "/usr/bin/other":
        with pytest.raises(EngineError, match="exists and is not a file of gpuhook"):
            put(store, target(path, ours=True))
        return
    put(store, target(path, ours=True))
    take(store)
    assert not path.exists()


def test_a_linked_file_is_edited_and_the_link_stays(store: Store, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "daemon.json"
    real.write_text(OLD)
    link.symlink_to("real.json")
    put(store, target(link))
    assert link.is_symlink()
    assert real.read_text() == NEW
    take(store)
    assert link.is_symlink()
    assert real.read_text() == OLD


def test_an_unchanged_file_leaves_no_record(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text(NEW)
    put(store, target(path))
    assert store.records() == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_install_changes_no_file(store: Store, tmp_path: Path) -> None:
    path, folder = tmp_path / "daemon.json", tmp_path / "folder"
    path.write_text(OLD)
    folder.mkdir()
    (folder / "file").touch()
    impossible = target(folder / "file" / "daemon.json")
    with store.locked(), pytest.raises(EngineError, match="can't be changed"):
        installer.install(store, [target(path), impossible])
    assert path.read_text() == OLD
    assert store.records() == []


def test_an_unparsable_file_stops_uninstall_of_all_files(store: Store, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    for path in (good, bad):
        path.write_text(OLD)
        put(store, target(path))
    bad.write_text("{")
    with pytest.raises(EngineError, match=r"bad\.json is not valid JSON"):
        take(store)
    assert good.read_text() == NEW
    assert len(store.records()) == 2


def test_an_edited_hook_file_is_removed_whole(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "hook.json"
    text = hook_document("/opt/hook", "prestart", None)
    put(store, TargetFile("podman", str(path), "json", text, str(path), HOOK_KEYS, ours=True))
    path.write_text(text.replace("/opt/hook", "/other"))
    take(store)
    assert not path.exists()


def test_the_version_key_stays_with_settings_added_by_others(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    put(store, TargetFile("containerd", str(path), "toml", 'version = 3\nimports = ["a"]\n', ""))
    path.write_text('version = 3\nimports = ["a"]\nroot = "/r"\n')
    take(store)
    assert path.read_text() == 'version = 3\nroot = "/r"\n'


def test_an_unusable_state_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with (
            pytest.raises(EngineError, match="can't be used"),
            Store(f"{tmp_path}/{name}").locked(),
        ):
            pass


@pytest.mark.protects(
    "state-folder",
    "other users: the state folder isn't accessible to them",
    instead="_FOLDER_MODE = 0o755",
)
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_the_state_folder_is_private_to_its_owner(store: Store, tmp_path: Path, mode: int) -> None:
    (tmp_path / "state" / "engines").mkdir(parents=True, mode=mode)
    put(store, target(tmp_path / "daemon.json"))
    assert (tmp_path / "state" / "engines").stat().st_mode & 0o777 == 0o700
    with store.locked():
        assert Path(store.folder, "lock").stat().st_mode & 0o777 == 0o600
        assert len(store.records()) == 1


def kept_modes(store: Store) -> dict[str, int]:
    """Return the modes of the files that contain records and saved copies."""
    return {
        path.name: path.stat().st_mode & 0o777 for path in sorted(Path(store.folder).glob("*/*"))
    }


PRIVATE = {"original": 0o600, "record.json": 0o600, "written": 0o600}


@pytest.mark.protects(
    "kept-mode",
    "other users: saved copies of an engine's file are accessible only to their owner",
    instead="_MODE = 0o644  # whatever the engine's file has: its owner reads that one",
)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_saved_copies_of_an_engine_file_are_private(store: Store, path: Path, mode: int) -> None:
    """The file may contain passwords, and other users may get access to a state folder."""
    path.chmod(mode)
    put(store, target(path))
    assert kept_modes(store) == PRIVATE
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.protects(
    "kept-mode",
    "other users: saved copies of an engine's file are accessible only to their owner",
    instead="_MODE = 0o644  # whatever the engine's file has: its owner reads that one",
)
def test_copies_saved_by_earlier_versions_become_private(store: Store, tmp_path: Path) -> None:
    """The next installation or removal makes them private, whichever engine it is for."""
    path, other = tmp_path / "daemon.json", tmp_path / "other.json"
    path.write_text(OLD)
    for change in (partial(put, store, target(other)), partial(take_one, store, str(other))):
        put(store, target(path))
        for file in Path(store.folder).glob("*/*"):
            file.chmod(0o644)
        change()
        assert {*kept_modes(store).values()} == {0o600}


def take_one(store: Store, path: str) -> None:
    with store.locked():
        installer.uninstall(store, [each for each in store.records() if each.path == path])


@pytest.mark.protects(
    "repeated-mode", "other users: a generated file is no more readable than its source files"
)
@pytest.mark.parametrize("before", [None, 0o600, 0o644])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_generated_file_is_no_more_readable_than_its_sources(
    store: Store, tmp_path: Path, mode: int, before: int | None
) -> None:
    config, path = tmp_path / "config.json", tmp_path / "drop-in.json"
    config.write_text(OLD)
    wanted = replace(target(path, ours=True), sources=(f"{tmp_path}/none", str(config)))
    if before is not None:
        put(store, wanted)
        path.chmod(before)
    config.chmod(mode)
    put(store, wanted)
    expected = 0o600 if mode != 0o644 else before or 0o644
    assert path.stat().st_mode & 0o777 == expected


def test_a_foreign_lock_on_the_state_folder_is_ignored(store: Store, tmp_path: Path) -> None:
    """Earlier versions let every user open the folder, and so lock it."""
    folder = tmp_path / "state" / "engines"
    folder.mkdir(parents=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with in_time():
            put(store, target(tmp_path / "daemon.json"))
    finally:
        os.close(fd)


@pytest.mark.protects(
    "lock-patience", "other users: waiting for a lock ends after a timeout of some seconds"
)
def test_a_lock_timeout_error_names_the_holding_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_PATIENCE", 0.2)
    with store.locked():
        with (
            in_time(),
            pytest.raises(EngineError) as caught,
            Store(os.path.dirname(store.folder)).locked(),
        ):
            pass
        assert f"The process {os.getpid()} has been changing" in str(caught.value)
        assert f"{store.folder}/lock" in str(caught.value)
    with store.locked():
        pass
    assert not Path(store.folder).exists()


def test_a_waiter_gets_the_lock_after_its_release(store: Store) -> None:
    begun, got = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        with Store(os.path.dirname(store.folder)).locked():
            got.set()

    thread = threading.Thread(target=wait)
    with store.locked():
        thread.start()
        assert begun.wait(30)
        assert not got.is_set()
    thread.join(30)
    assert got.is_set()
    assert not Path(store.folder).exists()


def test_a_state_folder_removed_while_locking_is_made_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = os.open, [FileNotFoundError(errno.ENOENT, "gone")]

    def open_file(path: str, *rest: int, **more: int) -> int:
        if path == "lock" and failures:
            raise failures.pop()
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", open_file)
    with store.locked():
        assert failures == []


def test_damaged_records_are_named(store: Store, tmp_path: Path) -> None:
    put(store, target(tmp_path / "daemon.json"))
    [record] = (tmp_path / "state" / "engines").glob("*/record.json")
    record.write_text(json.dumps({"engine": "docker"}))
    with pytest.raises(EngineError, match=r"record\.json is damaged"):
        store.records()


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def killed_before(change: int, work: Callable[[], None]) -> bool:
    """Do ``work`` in a process that exits before a change of files.

    Return whether it came to that change.
    """
    child = os.fork()
    if not child:
        seen = 0

        def count(event: str, _: object) -> None:
            nonlocal seen
            seen += event in CHANGES
            if seen > change:
                os._exit(1)

        sys.addaudithook(count)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("before", [OLD, None])
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_killed_install_or_uninstall_loses_nothing(
    tmp_path: Path, is_installed: bool, before: str | None
) -> None:
    change, is_killed = 0, True
    while is_killed:
        path = tmp_path / str(change) / "daemon.json"
        path.parent.mkdir()
        if before is not None:
            path.write_text(before)
        store, wanted = Store(str(path.parent / "state")), target(path)
        if is_installed:
            put(store, wanted)
            is_killed = killed_before(change, partial(take, store))
        else:
            is_killed = killed_before(change, partial(put, store, wanted))
        put(store, wanted)
        assert path.read_text() == NEW
        take(store)
        assert (path.read_text() if path.exists() else None) == before
        assert not Path(store.folder).exists()
        change += 1
    assert change > 10


@pytest.mark.parametrize("before", ["a", None])
@pytest.mark.parametrize(
    ("syntax", "somebody_edits"), [("json", False), ("json", True), ("whole", False)]
)
def test_a_killed_replacement_loses_nothing(
    tmp_path: Path, syntax: str, before: str | None, somebody_edits: bool
) -> None:
    """Both the content before the crash and the intended content count as gpuhook's."""

    def text(value: str) -> str:
        keys = {"all": value} if value == "a" else {"ours": {"list": [value]}, value: value}
        return json.dumps({"all": "a", **keys} if before else keys)

    change, is_killed = 0, True
    while is_killed:
        path = tmp_path / str(change) / "file"
        path.parent.mkdir()
        if before is not None:
            path.write_text(text(before))
        store = Store(str(path.parent / "state"))
        first, second = (TargetFile("docker", str(path), syntax, text(name), "") for name in "xy")
        put(store, first)
        is_killed = killed_before(change, partial(put, store, second))
        if somebody_edits:
            path.write_text(json.dumps({**json.loads(path.read_text()), "theirs": 1}))
        if change % 2:  # in half of the cases, the service first installs it again
            more = {"theirs": 1} if somebody_edits else {}
            put(store, replace(second, text=json.dumps({**json.loads(text("y")), **more})))
        take(store)
        found = json.loads(path.read_text()) if path.exists() else {}
        expected = json.loads(text(before)) if before else {}
        assert found == expected | ({"theirs": 1} if somebody_edits else {}), change
        assert not Path(store.folder).exists()
        change += 1
    assert change > 10


def test_a_plan_shows_the_difference_and_changes_nothing(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text(OLD.rstrip("\n"))
    diff = store.plan(target(path)).diff()
    assert diff.splitlines() == [
        f"--- {path}",
        f"+++ {path}",
        "@@ -1 +1 @@",
        '-{"debug":   true}',
        "\\ No newline at end of file",
        f"+{NEW.rstrip()}",
    ]
    assert path.read_text() == OLD.rstrip("\n")
    assert list(tmp_path.iterdir()) == [path]
