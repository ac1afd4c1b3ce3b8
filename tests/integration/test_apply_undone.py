"""gpuhook apply --undo: only changes that apply made are undone, whatever the folder's owner does.

The owner owns the folder and all its content. The owner can rename and replace everything in
it, but can't mount.
"""

import base64
import json
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run
from harness.root_folders import OWNER, Folder, killed, snapshot
from harness.sandbox import contents

from gpuhook import inject
from gpuhook.base.config.loader import load as load_config
from gpuhook.base.container import kernel
from gpuhook.base.errors import FolderError
from gpuhook.base.host import files as host_files
from gpuhook.core.plan.operations import Operation, Symlink, UpdateLdCache
from gpuhook.core.resolve import Progress, resolve
from gpuhook.hpc.rootfs import backup as before
from gpuhook.hpc.rootfs import mount_tracking, work
from gpuhook.hpc.rootfs.folder import Folder as Root
from gpuhook.tools.root_folder.request import CallerRequest
from gpuhook.vendors import registry

ASK = "NVIDIA_VISIBLE_DEVICES=0"
CACHE = "etc/ld.so.cache"
# The folders in which a plan for Debian makes something.
FOLDERS = ["dev", "etc", "usr/bin", "usr/lib"]


@contextmanager
def volume(folder: Folder, *, kept: bool = False) -> Iterator[Path]:
    """Yield a folder that root owns and that is mounted on /data in the root folder."""
    place = folder.state.parent / "volume"
    place.mkdir()
    (folder.root / "data").mkdir()
    folder.namespace.run("mount", "--bind", place, folder.root / "data").ok()
    yield place
    if not kept:
        folder.namespace.run("umount", folder.root / "data").ok()


def in_its_place(folder: Folder, name: str) -> None:
    """Replace a folder by a link to the volume, as its owner."""
    folder.owner(f"mv {name} {name}.away; ln -s /data/{name} {name}").ok()


def back_again(folder: Folder, name: str) -> None:
    """Put the owner's folder at its path again, instead of the link."""
    folder.owner(f"rm {name}; mv {name}.away {name}").ok()


@pytest.mark.protects("undone-volume", "undoing a run changes nothing in a volume")
@pytest.mark.parametrize("again", ["undo", "apply"])
@pytest.mark.parametrize("name", FOLDERS)
def test_undoing_a_run_changes_nothing_in_a_volume(folder: Folder, name: str, again: str) -> None:
    """The volume has files with the same names as the files that were made in the folder."""
    folder.give_away()
    before = snapshot(folder)
    with volume(folder) as there:
        folder.call("-e", ASK).ok()
        shutil.copytree(folder.root / name, there / name, symlinks=True)
        now = contents(there)
        assert len(now) > 2
        in_its_place(folder, name)
        done = folder.call("--undo") if again == "undo" else folder.call("-e", ASK)
        assert contents(there) == now
        assert "a volume is there now" in done.failed().stderr
        assert len(folder.mounts()) == 1
        back_again(folder, name)
        assert ": restored" in folder.call("--undo").ok().stdout
        assert contents(there) == now
    (folder.root / "data").rmdir()
    assert snapshot(folder) == before


@pytest.mark.protects("undone-folders-volume", "undoing a run removes no folder of a volume")
def test_folders_of_a_volume_are_not_removed_by_undo(folder: Folder) -> None:
    """The volume has empty folders with the same names as the folders that were made."""
    folder.give_away()
    before = {path.relative_to(folder.root) for path in folder.root.rglob("*")} | {Path(".")}
    with volume(folder) as there:
        folder.call("-e", ASK).ok()
        after = [path for path in folder.root.rglob("*") if path.is_dir()]
        made = [path.relative_to(folder.root) for path in after]
        made = [path for path in made if path not in before and path.parent in before]
        made = [path for path in made if path.parts[0] != "data"]
        assert made
        for path in made:
            (there / path).mkdir(parents=True)
        now = contents(there)
        for name in {path.parts[0] for path in made}:
            in_its_place(folder, name)
        folder.call("--undo")
        assert contents(there) == now
        assert len(folder.mounts()) == 1


@pytest.mark.parametrize("call", ["symlinkat", "rename", "renameat"])
def test_undo_of_a_killed_run_leaves_files_of_a_volume_unchanged(folder: Folder, call: str) -> None:
    """The volume's file differs from the file that the run was about to write."""
    (folder.root / CACHE).unlink(missing_ok=True)
    folder.give_away()
    before = snapshot(folder)
    with volume(folder) as there:
        (there / "etc").mkdir()
        (there / CACHE).write_bytes(b"the volume's own")
        now = contents(there)
        folder.call("-e", ASK, before=killed(call, 1))
        in_its_place(folder, "etc")
        folder.call("--undo")
        assert contents(there) == now
        back_again(folder, "etc")
        folder.call("--undo")
    (folder.root / "data").rmdir()
    assert snapshot(folder) == before


def test_undo_of_a_killed_run_leaves_files_of_others_unchanged(folder: Folder) -> None:
    (folder.root / CACHE).unlink(missing_ok=True)
    folder.give_away()
    folder.call("-e", ASK, before=killed("symlinkat", 1)).failed()
    folder.owner(f"echo theirs > {CACHE}").ok()
    folder.call("--undo").ok()
    assert (folder.root / CACHE).read_bytes() == b"theirs\n"


@pytest.mark.protects("mount-noted", "a mount in a root folder is recorded before it is attached")
@pytest.mark.parametrize(
    "moves",
    [
        "mv dev dev2; mv usr/lib usr/lib2",
        "mv dev usr/share/dev; mkdir dev",
        "mkdir 'a b\\c'; mv usr 'a b\\c/usr'",
        "mv dev ../away; mv usr ../away/usr",
    ],
)
@pytest.mark.parametrize("again", ["undo", "apply"])
def test_mounts_are_removed_after_their_folders_were_moved(
    folder: Folder, moves: str, again: str
) -> None:
    """The folders were renamed, or moved to the folder above if the owner may write to that."""
    before = folder.everywhere()
    folder.call("-e", ASK).ok()
    assert len(folder.everywhere()) > len(before) + 10
    folder.namespace.run("sh", "-ec", moves, cwd=folder.root).ok()
    try:
        if again == "apply":
            folder.call("-e", ASK)
        folder.call("--undo").ok()
        assert folder.everywhere() == before
        assert not folder.state.exists()
    finally:
        shutil.rmtree(folder.root.parent / "away", ignore_errors=True)


@pytest.mark.parametrize("place", ["dev", "usr/lib", "."])
def test_a_hidden_mount_is_reported_and_removed_later(folder: Folder, place: str) -> None:
    """Another mount covers it at first; an undo after that mount's removal removes it."""
    before, mounts = snapshot(folder), folder.everywhere()
    folder.call("-e", ASK).ok()
    many = len(folder.everywhere())
    folder.namespace.run("mount", "-t", "tmpfs", "tmpfs", folder.root / place).ok()
    done = folder.call("--undo").failed()
    if place != ".":
        assert "is hidden by another mount" in done.stderr
    else:
        assert "isn't the folder to which devices were added" in done.stderr
    assert len(folder.everywhere()) > len(mounts) + 1
    assert len(folder.everywhere()) <= many + 1
    folder.namespace.run("umount", folder.root / place).ok()
    folder.call("--undo").ok()
    assert folder.everywhere() == mounts
    assert snapshot(folder) == before


@pytest.mark.protects(
    "mount-by-id",
    "undoing a run unmounts only those mounts that gpuhook is known to have made",
    instead="elif True:",
)
def test_undo_in_a_copied_mount_namespace_leaves_other_mounts(folder: Folder) -> None:
    """Mount ids differ in a copy; other mounts stay, whether older or newer than the run."""
    others = [folder.root / "srv" / name for name in ("before", "later")]
    for place in others:
        place.parent.mkdir(exist_ok=True)
        place.touch()
    folder.namespace.run("mount", "--bind", "/dev/null", others[0]).ok()
    folder.call("-e", ASK).ok()
    folder.namespace.run("mount", "--bind", "/dev/zero", others[1]).ok()
    words = (folder.command, "apply", f"--rootfs={folder.root}", f"--state-dir={folder.state}")
    script = f'"$@" --undo >&2; grep -c {folder.root}/ /proc/self/mountinfo'
    seen = folder.namespace.run("unshare", "--mount", "sh", "-c", script, "sh", *words).ok()
    assert int(seen.stdout) == len(others)
    folder.namespace.run("umount", *others).ok()


def test_mounts_left_in_the_first_mount_namespace_are_reported(folder: Folder) -> None:
    """A mount stays on a file that existed before; files made for mounts go with their mounts."""
    (folder.root / "dev/nvidiactl").touch()
    before, mounts = snapshot(folder), folder.everywhere()
    words = (folder.command, "apply", f"--rootfs={folder.root}", f"--state-dir={folder.state}")
    env = {"GPUHOOK_CONFIG": str(folder.config)}
    folder.namespace.run(*words, "-e", ASK, env=env).ok()
    for more in (("--undo",), ("-e", ASK)):
        done = folder.namespace.run("unshare", "--mount", *words, *more, env=env)
        assert "still has devices mounted in the mount namespace of" in done.failed().stderr
        assert folder.mounts() == [str(folder.root / "dev/nvidiactl")]
    assert ": restored" in folder.call("--undo").ok().stdout
    assert folder.everywhere() == mounts
    assert snapshot(folder) == before


@pytest.mark.protects(
    "noted-folder", "a root folder's record isn't applied to another folder at the same path"
)
@pytest.mark.parametrize("call", [("rename", 2), ("unlink", 1)])
def test_another_folder_at_the_same_path_is_not_restored_from_the_record(
    folder: Folder, call: tuple[str, int]
) -> None:
    """The owner's run is killed at its end, and then a new image is put at the same path."""
    fresh = folder.root.with_name(f"{folder.root.name}.fresh")
    shutil.copytree(folder.root, fresh, symlinks=True)
    cache = folder.root / CACHE
    assert cache.exists()
    with cache.open("ab") as file:
        file.write(b"hostile")
    os.chown(cache, OWNER, OWNER)
    cache.chmod(0o4777)
    folder.call("-e", ASK, before=killed(*call))
    for point in folder.mounts()[::-1]:
        folder.namespace.run("umount", point).ok()
    shutil.rmtree(folder.root)
    fresh.rename(folder.root)
    before = snapshot(folder)
    said = folder.call("--undo").ok().stdout
    assert snapshot(folder) == before
    done = folder.call("-e", ASK).ok()
    assert ": restored" in folder.call("--undo").ok().stdout
    assert snapshot(folder) == before
    assert "another folder" in said
    assert "another folder" in done.stderr


def test_a_moved_folder_is_recognised_and_restored(folder: Folder) -> None:
    before, mounts = snapshot(folder), folder.everywhere()
    folder.call("-e", ASK).ok()
    moved = folder.root.with_name(f"{folder.root.name}.moved")
    folder.root.rename(moved)
    folder.root.mkdir()
    assert "isn't the folder to which devices were added" in folder.call("--undo").failed().stderr
    assert "isn't the folder to which devices were added" in folder.call("-e", ASK).failed().stderr
    folder.root.rmdir()
    words = (folder.command, "apply", f"--rootfs={moved}", f"--state-dir={folder.state}", "--undo")
    assert ": restored" in folder.namespace.run(*words).ok().stdout
    moved.rename(folder.root)
    assert folder.everywhere() == mounts
    assert snapshot(folder) == before
    assert not folder.state.exists()


@pytest.mark.parametrize("upper", ["of the same filesystem", "of another one"])
def test_a_folder_of_an_overlay_lower_layer_is_restored(folder: Folder, upper: str) -> None:
    """overlayfs copies the folder at its first change, and the copy has another creation time."""
    place = folder.state.parent
    for name in ("lower", "merged"):
        (place / name).mkdir()
    shutil.copytree(folder.root, place / "lower/root", symlinks=True)
    layers = place if upper == "of the same filesystem" else folder.root / "run"
    for name in ("upper", "work"):
        (layers / name).mkdir()
    options = f"lowerdir={place}/lower,upperdir={layers}/upper,workdir={layers}/work"
    folder.namespace.run("mount", "-t", "overlay", "-o", options, "overlay", place / "merged").ok()
    mounts = folder.everywhere()
    inside = replace(folder, root=place / "merged/root")
    before = inside.namespace.run("find", inside.root).ok().stdout
    for number in ("0", "1"):
        inside.call("-e", f"NVIDIA_VISIBLE_DEVICES={number}").ok()
    assert ": restored" in inside.call("--undo").ok().stdout
    assert folder.everywhere() == mounts
    assert inside.namespace.run("find", inside.root).ok().stdout == before
    folder.namespace.run("umount", place / "merged").ok()


@pytest.mark.protects(
    "uncovered",
    "a mount that a killed run left on a folder is removed before it is examined",
)
@pytest.mark.parametrize(
    ("call", "times"), [("move_mount", 25), ("move_mount", 26), ("umount2", 1), ("fsmount", 1)]
)
def test_a_run_killed_while_it_covers_a_file_is_undone(
    folder: Folder, call: str, times: int
) -> None:
    """For a moment the run covers the whole folder."""
    cache = folder.state.parent / "cache"
    shutil.copy2(folder.root / CACHE, cache)
    before, there = snapshot(folder), folder.everywhere()
    folder.namespace.run("mount", "--bind", "--make-private", cache, folder.root / CACHE).ok()
    mounts = folder.everywhere()
    assert folder.call("-e", ASK, before=killed(call, times)).status == -signal.SIGKILL
    folder.call("--undo").ok()
    assert folder.everywhere() == mounts
    folder.namespace.run("umount", folder.root / CACHE).ok()
    assert folder.everywhere() == there
    assert snapshot(folder) == before


@pytest.mark.protects(
    "volume-stays", "files that were in a volume before a run aren't recorded as changes of the run"
)
def test_existing_volume_content_is_unchanged_and_causes_no_error(folder: Folder) -> None:
    """Nothing was made in the volume, so nothing is rolled back."""
    there = folder.state.parent / "volume"
    shutil.copytree(folder.root / "etc", there, symlinks=True)
    now, before, mounts = contents(there), snapshot(folder), folder.everywhere()
    folder.namespace.run("mount", "--bind", "--make-private", there, folder.root / "etc").ok()
    folder.call("-e", ASK).ok()
    assert ": restored" in folder.call("--undo").ok().stdout
    assert contents(there) == now
    folder.namespace.run("umount", folder.root / "etc").ok()
    assert folder.everywhere() == mounts
    assert snapshot(folder) == before


@pytest.mark.protects(
    "one-file",
    "a restored file has the owner and content of the same original file",
    instead=(
        "status = os.stat(name, dir_fd=parent, follow_symlinks=False)\n"
        "<the statement>\n"
        "if old is not None:\n"
        "    old.status = status"
    ),
)
@pytest.mark.protects(
    "one-link",
    "a restored link has the owner and target of the same original link",
    instead="link = os.readlink(name, dir_fd=parent)",
    only="one_and_the_same and link",
)
@pytest.mark.protects(
    "noted-link",
    "the recorded target and owner of a link come from one and the same link",
    instead="target = os.readlink(name, dir_fd=parent)",
    only="one_and_the_same and another",
)
@pytest.mark.parametrize("kind", ["file", "link", "another link"])
def test_recorded_content_and_owner_are_of_one_and_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The owner exchanges root's file or link for another file after each step of the check."""
    folder = tmp_path / "root"
    steps: list[Operation] = [UpdateLdCache((), "a test")]
    if kind == "another link":  # the step replaces a link with another link
        steps = [Symlink(f"/{CACHE}", "ours", replace=True, reason="a test")]
    (folder / "etc").mkdir(parents=True)
    cache, other = folder / CACHE, folder / "etc/other"
    for path, content in ((cache, "root's"), (other, "his")):
        if kind == "file":
            path.write_text(content)
        else:
            path.symlink_to(content)
    os.chown(other, OWNER, OWNER, follow_symlinks=False)
    left = [0]

    def exchanging(call: Callable[..., Any]) -> Callable[..., Any]:
        def done(*words: Any, **options: Any) -> Any:
            found = call(*words, **options)
            left[0] -= 1
            if left[0] == 0:
                host_files.exchange(str(cache), str(other))
            return found

        return done

    for name in ("open", "stat", "fstat", "readlink", "read"):
        monkeypatch.setattr(os, name, exchanging(getattr(os, name)))
    found, point = set(), 0
    while left[0] <= 0:
        point += 1
        left[0] = point
        with inject.open_folder(str(folder), Root) as opened:
            (place,) = before.look(opened, steps)
        was = place["was"]
        found.add((was["uid"], was.get("target") or base64.b64decode(was["data"]).decode()))
    assert found == {(0, "root's"), (OWNER, "his")}
    assert point > 5


@pytest.mark.protects(
    "lines-way", "root appends lines only to files at paths that other users can't redirect"
)
@pytest.mark.protects(
    "lines-dots", "path parts such as .. behind a link can't redirect where root appends lines"
)
@pytest.mark.protects(
    "lines-volume", "lines are never appended to a file in a volume of a root folder"
)
@pytest.mark.protects(
    "lines-file", "lines are appended only to a regular file without further hard links"
)
@pytest.mark.parametrize("way", ["link", "last", "volume", "second", "node", "above", "dots"])
def test_lines_are_not_added_to_files_outside_the_folder(folder: Folder, way: str) -> None:
    """The path leads there by the owner's link, by a second name of a file, or into a volume."""
    folder.give_away()
    place = folder.root.parent / f"{folder.root.name}.other"
    place.mkdir()
    victim = place / "lines"
    victim.write_text("")
    name, named = "var/lines", folder.root / "var/lines"
    if way in ("link", "above"):
        shutil.rmtree(folder.root / "var")
        (folder.root / "var").symlink_to(place)
        (folder.root / str(place)[1:]).mkdir(parents=True)
    elif way == "last":
        (folder.root / name).symlink_to(victim)
    elif way == "second":
        os.link(victim, folder.root / name)
    elif way == "node":
        os.mknod(folder.root / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    elif way == "dots":
        (place / "deep/er").mkdir(parents=True)
        (folder.root / "link").symlink_to(place / "deep/er")
        named = folder.root / "link/../../lines"
    else:
        folder.namespace.run("mount", "--bind", place, folder.root / "var").ok()
    if way == "above":
        users = place.with_name(f"{place.name}.users")
        users.mkdir()
        (users / "var").symlink_to(place)
        os.chown(users, OWNER, OWNER)
        named = users / name
    try:
        done = folder.call("-e", ASK, f"--fstab={named}")
        assert victim.read_text() == ""
        if way in ("link", "dots"):
            done.ok()
            meant = folder.root.parent if way == "dots" else folder.root / str(place)[1:]
            assert (meant / "lines").read_text()
            (meant / "lines").unlink()
        else:
            assert "lines" in done.failed().stderr
    finally:
        if way == "volume":
            folder.namespace.run("umount", folder.root / "var").ok()
        shutil.rmtree(place)
        shutil.rmtree(place.with_name(f"{place.name}.users"), ignore_errors=True)


@pytest.mark.protects(
    "environ-confined",
    "an environment file in a root folder is read only from inside that folder",
    instead="return host_files.read(path)",
)
def test_an_environ_file_outside_the_folder_is_not_read(folder: Folder) -> None:
    """The owner's link leads there."""
    secret = folder.state.parent / "secret"
    secret.write_text(f"{ASK}\n")
    (folder.root / "environ").symlink_to(secret)
    away = folder.root.parent / f"{folder.root.name}.other"
    (away / "deep/er").mkdir(parents=True)
    (away / "environ").write_text(f"{ASK}\n")
    (folder.root / "link").symlink_to(away / "deep/er")
    dots = folder.root / "../x/.." / folder.root.name / "environ"
    for path in (folder.root / "environ", dots, folder.root / "link/../../environ"):
        done = folder.call(f"--environ={path}", "--dry-run", "--format=json").ok()
        assert json.loads(done.stdout)["operations"] == []
    shutil.rmtree(away)


def test_a_read_only_folder_is_refused_and_unchanged(folder: Folder) -> None:
    """The first step fails, so nothing needs an undo or hinders the next run."""
    before = snapshot(folder)
    folder.namespace.run("mount", "--bind", "--make-private", folder.root, folder.root).ok()
    folder.namespace.run("mount", "-o", "remount,bind,ro", folder.root).ok()
    assert "Read-only file system" in folder.call("-e", ASK).failed().stderr
    assert "nothing to undo" in folder.call("--undo").ok().stdout
    folder.namespace.run("umount", folder.root).ok()
    assert snapshot(folder) == before


def test_several_runs_at_once_are_undone_completely(folder: Folder) -> None:
    """The runs wait for each other; each replaces the one before, and some undo everything."""
    before, mounts = snapshot(folder), folder.everywhere()
    words = ("apply", f"--rootfs={folder.root}", f"--state-dir={folder.state}")
    env = {**os.environ, "GPUHOOK_CONFIG": str(folder.config)}
    each: list[tuple[str, ...]] = [("-e", ASK), ("-e", ASK.replace("0", "1")), ("--undo",)] * 2
    running = [
        subprocess.Popen(folder.namespace.enter(folder.command, *words, *asked), env=env)
        for asked in each
    ]
    assert [process.wait() for process in running] == [0] * len(each)
    assert len(folder.everywhere()) < len(mounts) + 40
    folder.call("--undo").ok()
    assert folder.everywhere() == mounts
    assert snapshot(folder) == before


def test_undo_works_on_a_kernel_without_unique_mount_ids(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.8, a hidden mount is known by its number, and others by their content."""
    monkeypatch.setattr(kernel, "unique_mount_id", lambda _: None)
    config = load_config(str(folder.config))
    vendors = registry.all_vendors(config)
    spec = CallerRequest((("NVIDIA_VISIBLE_DEVICES", "0"),)).spec(config, vendors)
    resolved = resolve(spec.data, config, vendors, Progress())
    assert resolved is not None
    root, state = str(folder.root), str(folder.state)
    before, mounts = snapshot(folder), mount_tracking.table(root)
    work.give(root, resolved, config, spec, state)
    (folder.root / "dev").rename(folder.root / "dev2")
    run(["mount", "-t", "tmpfs", "tmpfs", folder.root / "usr/bin"]).ok()
    try:
        with pytest.raises(FolderError, match="is hidden by another mount"):
            work.undo(root, state)
    finally:
        run(["umount", folder.root / "usr/bin"]).ok()
    (folder.root / "dev2").rename(folder.root / "dev")
    assert work.undo(root, state) == "restored"
    assert mount_tracking.table(root) == mounts
    assert snapshot(folder) == before
