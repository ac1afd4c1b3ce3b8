"""Creation of a driver folder, and its state after an interruption at any moment."""

import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import machine

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverFolderError
from gpuhook.core.inventory.model import Inventory
from gpuhook.tools.driver_folder import DriverContent, place
from gpuhook.tools.driver_folder import keep as keeping
from gpuhook.tools.vendors.nvidia.driver_folder import FOLDERS
from gpuhook.vendors.registry import BUILT_IN

LINKS = {"lib64/libcuda.so": "libcuda.so.1", "lib64/gbm/b.so": "../libcuda.so.1"}
# Prefixes of audit events (sys.addaudithook) in which a process accesses files.
CHANGES = ("open", "os.", "shutil.", "ctypes.dlsym")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a driver folder, for a user who sees every process, wherever the tests run."""
    monkeypatch.setattr(place, "_sees_every_process", lambda: True)
    return tmp_path / "state/driver"


def driver(tmp_path: Path, version: str) -> DriverContent:
    """Create a driver root of this version; return the content of its driver folder."""
    root = tmp_path / f"root-{version}"
    files = {f"lib64/libcuda.so.{version}": f"/usr/lib/libcuda.so.{version}"}
    files["bin/nvidia-smi"] = "/usr/bin/nvidia-smi"
    for path in files.values():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{path} of {version}")
    (root / "usr/bin/nvidia-smi").chmod(0o755)
    links = {**LINKS, "lib64/libcuda.so.1": f"libcuda.so.{version}"}
    return DriverContent(version, str(root), FOLDERS, files, links)


def waiting(folder: Path) -> list[Path]:
    """Return the older folders that aren't removed yet."""
    return [*folder.with_name(f".{folder.name}.gpuhook").iterdir()]


def found(folder: Path) -> dict[str, str]:
    """Return the content of a driver folder: each path with its text or link target."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_text()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.name != place.MARKER
    }


def expected(wanted: DriverContent) -> dict[str, str]:
    texts = {name: f"{path} of {wanted.version}" for name, path in wanted.files.items()}
    return {**texts, **wanted.links}


@pytest.fixture
def kept(folder: Path, wanted: DriverContent) -> DriverContent:
    """The wanted files, which the driver folder already contains."""
    keeping.update(str(folder), wanted)
    return wanted


@pytest.fixture
def wanted(tmp_path: Path) -> DriverContent:
    """Files of the driver below root-550.1."""
    return driver(tmp_path, "550.1")


def test_a_driver_folder_holds_the_wanted_files_and_links(
    wanted: DriverContent, folder: Path
) -> None:
    assert keeping.update(str(folder), wanted)
    assert found(folder) == expected(wanted)
    assert {path.name for path in folder.iterdir()} == {*FOLDERS, place.MARKER}
    assert stat.S_IMODE((folder / "bin/nvidia-smi").stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / "lib64/libcuda.so.550.1").stat().st_mode) & 0o444 == 0o444
    assert waiting(folder) == []


def test_driver_folders_are_readable_by_all_under_any_umask(tmp_path: Path, folder: Path) -> None:
    before = os.umask(0o077)
    try:
        keeping.update(str(folder), driver(tmp_path, "550.1"))
    finally:
        os.umask(before)
    for path in (folder, folder / "lib64", folder / "lib64/gbm"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / place.MARKER).stat().st_mode) == 0o444


def test_an_unchanged_driver_leaves_the_folder_unchanged(kept: DriverContent, folder: Path) -> None:
    before = folder.stat()
    assert keeping.is_current(str(folder), kept)
    assert not keeping.update(str(folder), kept)
    assert os.path.samestat(folder.stat(), before)


def damage_size(folder: Path) -> None:
    file = folder / "bin/nvidia-smi"
    file.unlink()
    file.write_text("cut")


def damage_link(folder: Path) -> None:
    (folder / "lib64/libcuda.so").unlink()
    (folder / "lib64/libcuda.so").symlink_to("nowhere")


@pytest.mark.parametrize(
    "damage",
    [
        damage_size,
        damage_link,
        lambda folder: (folder / "lib64/libcuda.so.550.1").unlink(),
        lambda folder: (folder / "lib64/libcuda.so.1").unlink(),
        lambda folder: (folder / "lib64/libcuda.so.440").write_text("of an older driver"),
        lambda folder: (folder / "lib64/more").symlink_to("/"),
        lambda folder: os.utime(folder / "bin/nvidia-smi", (1, 1)),
    ],
)
def test_a_damaged_driver_folder_is_rebuilt(
    kept: DriverContent, folder: Path, damage: Callable[[Path], object]
) -> None:
    damage(folder)
    assert not keeping.is_current(str(folder), kept)
    assert keeping.update(str(folder), kept)
    assert found(folder) == expected(kept)


def test_a_new_driver_replaces_the_folder_and_open_ones_stay_usable(
    tmp_path: Path, folder: Path
) -> None:
    keeping.update(str(folder), driver(tmp_path, "550.1"))
    with_old = os.open(folder, os.O_RDONLY)
    wanted = driver(tmp_path, "580.2")
    assert not keeping.is_current(str(folder), wanted)
    assert keeping.update(str(folder), wanted)
    assert found(folder) == expected(wanted)
    # A process that has opened the old folder keeps it, with its files.
    here = Path(f"/proc/self/fd/{with_old}")
    assert (here / "lib64/libcuda.so.550.1").read_text() == "/usr/lib/libcuda.so.550.1 of 550.1"
    os.close(with_old)


def test_a_replaced_file_of_the_same_version_is_copied_again(
    tmp_path: Path, folder: Path, kept: DriverContent
) -> None:
    source = tmp_path / "root-550.1/usr/lib/libcuda.so.550.1"
    source.unlink()
    source.write_text("packaged again")
    assert keeping.update(str(folder), kept)
    assert (folder / "lib64/libcuda.so.550.1").read_text() == "packaged again"


def test_set_user_id_and_write_bits_for_others_are_removed(
    tmp_path: Path, folder: Path, wanted: DriverContent
) -> None:
    (tmp_path / "root-550.1/usr/bin/nvidia-smi").chmod(0o6777)
    keeping.update(str(folder), wanted)
    assert stat.S_IMODE((folder / "bin/nvidia-smi").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "root-550.1/usr/bin/nvidia-smi").stat().st_mode) == 0o6777


def test_links_out_of_the_driver_root_are_refused(
    tmp_path: Path, folder: Path, wanted: DriverContent
) -> None:
    (tmp_path / "secret").write_text("secret")
    file = tmp_path / "root-550.1/usr/bin/nvidia-smi"
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(DriverFolderError, match="has changed or is gone"):
        keeping.update(str(folder), wanted)
    assert not folder.exists()


def test_a_file_changing_during_the_copy_is_an_error(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: DriverContent
) -> None:
    file = tmp_path / "root-550.1/usr/bin/nvidia-smi"
    monkeypatch.setattr(keeping, "_holds", lambda *_: not file.write_text("of another version"))
    with pytest.raises(DriverFolderError, match="nvidia-smi has changed"):
        keeping.update(str(folder), wanted)
    assert not folder.exists()
    assert waiting(folder) == []


def test_the_old_driver_folder_stays_when_a_new_file_is_missing(
    tmp_path: Path, folder: Path
) -> None:
    old = driver(tmp_path, "550.1")
    keeping.update(str(folder), old)
    wanted = driver(tmp_path, "580.2")
    (tmp_path / "root-580.2/usr/lib/libcuda.so.580.2").unlink()
    with pytest.raises(DriverFolderError, match=r"libcuda\.so\.580\.2"):
        keeping.update(str(folder), wanted)
    assert found(folder) == expected(old)


@pytest.mark.parametrize("what", ["file", "folder with a file", "link to a folder with a file"])
def test_a_path_that_is_no_driver_folder_is_left_unchanged(
    tmp_path: Path, folder: Path, what: str, wanted: DriverContent
) -> None:
    folder.parent.mkdir()
    kept = tmp_path / "kept"
    if what == "file":
        folder.write_text("a user's")
    elif what == "folder with a file":
        folder.mkdir()
        (folder / "file").touch()
    else:
        kept.mkdir()
        (kept / "file").touch()
        folder.symlink_to(kept)
    for call in (keeping.update, keeping.is_current):
        with pytest.raises(DriverFolderError, match="isn't a driver folder"):
            call(str(folder), wanted)
    with pytest.raises(DriverFolderError, match="isn't a driver folder"):
        keeping.remove(str(folder))
    assert folder.is_file() or (folder / "file").exists()


def test_an_empty_folder_becomes_the_driver_folder(wanted: DriverContent, folder: Path) -> None:
    """The kubelet and containerd create a missing folder that a container mounts."""
    folder.mkdir(parents=True)
    keeping.update(str(folder), wanted)
    assert found(folder) == expected(wanted)


def test_a_link_to_the_driver_folder_stays_a_link(
    tmp_path: Path, folder: Path, wanted: DriverContent
) -> None:
    real = tmp_path / "elsewhere"
    real.mkdir()
    folder.parent.mkdir()
    folder.symlink_to(real)
    keeping.update(str(folder), wanted)
    assert folder.is_symlink()
    assert found(real) == expected(wanted)


def test_another_vendors_inventory_makes_no_driver_folder(tmp_path: Path, folder: Path) -> None:
    other = Inventory("amd", str(tmp_path), "6.12", (), ())
    assert not keeping.keep(Config(), BUILT_IN["amd"], other, str(folder))
    assert not folder.parent.exists()


def test_the_driver_folder_stays_when_the_driver_is_gone(tmp_path: Path, folder: Path) -> None:
    keeping.update(str(folder), driver(tmp_path, "550.1"))
    inventory = machine()
    inventory.root = str(tmp_path)
    with pytest.raises(DriverFolderError, match="has changed or is gone"):
        keeping.keep(Config(), BUILT_IN["nvidia"], inventory, str(folder))
    assert found(folder) == expected(driver(tmp_path, "550.1"))


def test_remove_deletes_the_driver_folder_and_refuses_a_missing_one(
    tmp_path: Path, folder: Path
) -> None:
    keeping.update(str(folder), driver(tmp_path, "550.1"))
    with_it = os.open(folder, os.O_RDONLY)
    stay = keeping.remove(str(folder))
    os.close(with_it)
    assert not folder.exists()
    assert stay == len(waiting(folder)) if stay else not [*folder.parent.iterdir()]
    with pytest.raises(DriverFolderError, match="no driver folder"):
        keeping.remove(str(tmp_path / "nothing"))


def test_old_driver_folders_are_removed_after_a_reboot(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: DriverContent
) -> None:
    """In a pod, gpuhook can't see which processes use an old folder, so it waits for a reboot."""
    monkeypatch.setattr(place, "_sees_every_process", lambda: False)
    for version in ("550.1", "560.1", "570.1"):
        wanted = driver(tmp_path, version)
        keeping.update(str(folder), wanted)
    assert len(waiting(folder)) == 2
    keeping.update(str(folder), wanted)
    assert len(waiting(folder)) == 2
    monkeypatch.setattr(place, "boot_id", lambda: "another")
    keeping.update(str(folder), wanted)
    assert waiting(folder) == []
    assert found(folder) == expected(wanted)


def test_unchanged_files_are_not_copied_again(
    tmp_path: Path, folder: Path, wanted: DriverContent
) -> None:
    """A driver's container has new files with the same content at each start."""
    library, program = (
        tmp_path / "root-550.1" / path.lstrip("/") for path in wanted.files.values()
    )
    for file in (library, program):
        file.chmod(0o4755)  # a setuid file is copied, not hard-linked
    keeping.update(str(folder), wanted)
    names = [*wanted.files]
    first = [(folder / name).stat().st_ino for name in names]
    library.write_text(library.read_text())
    os.utime(library, (1, 1))
    program.write_text(program.read_text()[::-1])
    os.utime(program, (1, 1))
    assert keeping.update(str(folder), wanted)
    second = [(folder / name).stat().st_ino for name in names]
    assert (second[0] == first[0], second[1] == first[1]) == (True, False)
    assert (folder / names[1]).read_text() == program.read_text()
    assert keeping.is_current(str(folder), wanted)
    # New permissions need a new file, so that running containers keep theirs unchanged.
    library.chmod(0o4711)
    os.utime(library, (2, 2))
    keeping.update(str(folder), wanted)
    assert (folder / names[0]).stat().st_ino != first[0]
    assert stat.S_IMODE((folder / names[0]).stat().st_mode) == 0o711


@pytest.mark.protects(
    "copies-owner",
    "a driver folder reuses only copies that belong to root",
    instead="before = place.path",
)
def test_a_copy_owned_by_another_user_is_not_reused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: DriverContent
) -> None:
    """That user may have made the folder meanwhile, and could write to the file later."""
    monkeypatch.setattr(place.FolderPath, "check", lambda _: None)
    for name, path in wanted.files.items():
        source, copy = tmp_path / "root-550.1" / path.lstrip("/"), folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
        copy.chmod(source.stat().st_mode)
        source.chmod(0o4000 | source.stat().st_mode)  # a setuid file is copied, not hard-linked
    before = {(folder / name).stat().st_ino for name in wanted.files}
    with_it = [os.open(folder / name, os.O_RDONLY) for name in wanted.files]
    assert keeping.update(str(folder), wanted)
    assert not before & {(folder / name).stat().st_ino for name in wanted.files}
    for fd in with_it:
        os.close(fd)


# Killed at any moment ---------------------------------------------------------------------------


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in a child that is killed before its change ``number``.

    Return whether it was killed.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, _: object) -> None:
            nonlocal count
            if event.startswith(CHANGES):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_killed_update_leaves_the_old_or_new_folder_whole(tmp_path: Path, folder: Path) -> None:
    old, new = driver(tmp_path, "550.1"), driver(tmp_path, "580.2")
    moments, changed = 0, 0
    keeping.update(str(folder), old)
    while killed_at(moments + 1, lambda: keeping.update(str(folder), new)):
        moments += 1
        now = found(folder)
        assert now in (expected(old), expected(new)), moments
        changed += now == expected(new)
        keeping.update(str(folder), new)
        assert found(folder) == expected(new)
        assert all(place._is_whole(str(path)) for path in waiting(folder)), moments
        keeping.update(str(folder), old)
    assert moments > 50
    assert 0 < changed < moments


def test_a_killed_removal_leaves_a_whole_folder_or_none(tmp_path: Path, folder: Path) -> None:
    wanted, moments = driver(tmp_path, "550.1"), 0
    keeping.update(str(folder), wanted)
    while killed_at(moments + 1, lambda: keeping.remove(str(folder))):
        moments += 1
        assert not folder.exists() or found(folder) == expected(wanted)
        keeping.update(str(folder), wanted)
        assert found(folder) == expected(wanted)
    assert moments > 10
