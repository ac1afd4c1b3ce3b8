"""gpuhook apply: the hook's changes, made to a folder that no engine runs as a container."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import declared_vendors
import pytest
from harness import vendors
from harness.driver import Driver, lines_of_nvidia_smi
from harness.installation import Installation
from harness.namespaces import host_cgroups, namespace
from harness.root_folders import OWNER, Folder, killed, snapshot
from harness.sandbox import contents

from gpuhook import inject
from gpuhook.base.config.loader import load as load_config
from gpuhook.base.config.loader import loads
from gpuhook.base.errors import FolderError
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.plan.operations import BindDevice, Plan
from gpuhook.core.resolve import Progress, resolve
from gpuhook.hpc.rootfs import mount_tracking, units, work
from gpuhook.hpc.rootfs import record as records
from gpuhook.hpc.rootfs.folder import Folder as Root
from gpuhook.tools.root_folder.request import CallerRequest
from gpuhook.vendors import registry

ASK = "NVIDIA_VISIBLE_DEVICES"
CACHE = "etc/ld.so.cache"
_NODES = "busybox find /dev -type c -exec busybox stat -c %t:%T {} +"
# Runs a command as root of a user's own namespaces.
IN_USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "--")


@pytest.mark.protects(
    "write-noted", "a file change in a container's root folder is recorded before it is made"
)
def test_a_folder_gets_devices_and_is_restored_by_undo(folder: Folder, driver: Driver) -> None:
    before = snapshot(folder)
    folder.call("-e", f"{ASK}=1,2").ok()
    seen = folder.inside("nvidia-smi", "-L").ok().stdout
    assert seen.splitlines() == lines_of_nvidia_smi(driver.chosen(1, 2))
    assert folder.inside("test", "-c", f"/dev/nvidia{driver.gpus[1].minor}").status == 0
    assert folder.inside("test", "-e", f"/dev/nvidia{driver.gpus[0].minor}").status != 0
    assert ": restored" in folder.call("--undo").ok().stdout
    assert folder.mounts() == []
    assert snapshot(folder) == before
    assert not folder.state.exists()
    assert "nothing to undo" in folder.call("--undo").ok().stdout


def test_new_devices_replace_the_old_ones(folder: Folder, driver: Driver) -> None:
    before = snapshot(folder)
    folder.call("-e", f"{ASK}=1").ok()
    mounts = sorted(folder.mounts())
    folder.call("--device", "nvidia.com/gpu=2").ok()
    seen = folder.inside("nvidia-smi", "-L").ok().stdout
    assert seen.splitlines() == lines_of_nvidia_smi(driver.chosen(2))
    assert len(folder.mounts()) == len(mounts)
    folder.call("--undo").ok()
    assert snapshot(folder) == before


@pytest.mark.protects(
    "devices-of-before",
    "a root folder without a device request keeps no device from an earlier one",
    instead="said: list[str] = []",
)
@pytest.mark.parametrize("asked", [(), ("-e", f"{ASK}=void")])
def test_a_request_for_nothing_removes_devices_given_before(
    folder: Folder, asked: tuple[str, ...]
) -> None:
    before = snapshot(folder)
    folder.call("-e", f"{ASK}=1").ok()
    mounts = folder.mounts()
    folder.call(*asked, "--dry-run")
    folder.call(*asked, "--fstab=-").ok()
    assert folder.mounts() == mounts
    folder.call(*asked).ok()
    assert folder.mounts() == []
    assert snapshot(folder) == before


def test_apply_carries_out_the_plan_that_explain_shows(folder: Folder) -> None:
    words = ("-e", f"{ASK}=1", "--format=json")
    explained = json.loads(folder.call(*words, verb="explain").ok().stdout)
    shown = json.loads(folder.call(*words, "--dry-run").ok().stdout)
    assert folder.mounts() == []
    done = json.loads(folder.call(*words).ok().stdout)
    assert explained["operations"] == shown["operations"] == done["operations"]
    assert explained["undone"] == shown["undone"] == done["undone"]
    assert {each["kind"] for each in done["undone"]} == {"allow-device"}


def test_a_user_in_a_user_namespace_can_apply_to_an_owned_folder(
    folder: Folder, driver: Driver
) -> None:
    """enroot calls its hooks as root of a user namespace, and their mounts vanish with it."""
    work = (
        f'"$0" apply --rootfs {folder.root} --no-undo -e {ASK}=3 && '
        f"chroot {folder.root} nvidia-smi -L"
    )
    done = folder.namespace.run(
        "setpriv", "--reuid=4243", "--regid=4243", "--clear-groups",
        *IN_USER_NAMESPACE, "sh", "-ec", work, folder.command,
        env={"GPUHOOK_CONFIG": str(folder.config)},
    )  # fmt: skip
    assert done.status != 0, "the folder is root's"
    for path in (folder.root, *folder.root.rglob("*")):
        os.chown(path, 4243, 4243, follow_symlinks=False)
    done = folder.namespace.run(
        "setpriv", "--reuid=4243", "--regid=4243", "--clear-groups",
        *IN_USER_NAMESPACE, "sh", "-ec", work, folder.command,
        env={"GPUHOOK_CONFIG": str(folder.config)},
    ).ok()  # fmt: skip
    assert done.stdout.splitlines()[1:] == lines_of_nvidia_smi(driver.chosen(3))


# The system calls that change something, and which occurrences of each the run is killed in.
CRASHES = {
    "apply": {
        "mkdirat": (1, 2, 4, 7), "symlinkat": (1, 9), "move_mount": (1, 24),
        "fchmod": (1, 3), "chmod": (1,), "rename": (1,), "renameat": (1,), "fsync": (1,),
        "fdatasync": (1,), "unlinkat": (1,), "unlink": (1,), "rmdir": (1,),
    },
    "undo": {
        "umount2": (1, 24), "unlinkat": (1, 2, 20, 40), "fchmod": (1,), "renameat": (1,),
        "unlink": (1,), "rmdir": (1,),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "call", "times"),
    [
        (verb, call, times)
        for verb, calls in CRASHES.items()
        for call, every in calls.items()
        for times in every
    ],
)
def test_undo_restores_the_folder_after_a_crash_between_two_changes(
    folder: Folder, verb: str, call: str, times: int
) -> None:
    """The run is killed in a call that changes something in the folder or next to it."""
    before, mounts = snapshot(folder), folder.everywhere()
    asked = ("-e", f"{ASK}=all")
    if verb == "undo":
        folder.call(*asked).ok()
    done = folder.call(*(asked if verb == "apply" else ["--undo"]), before=killed(call, times))
    assert done.status == -signal.SIGKILL
    folder.call("--undo").ok()
    assert folder.everywhere() == mounts
    assert snapshot(folder) == before


def test_undo_restores_the_folder_after_a_killed_apply(folder: Folder) -> None:
    """The run is killed at any moment: after the first mount, the tenth, or at the end."""
    before = snapshot(folder)
    for mounts in (1, 10, 25):
        words = [str(folder.command), "apply", f"--rootfs={folder.root}", "-e", f"{ASK}=all"]
        words = folder.namespace.enter(*words, f"--state-dir={folder.state}")
        env = {**os.environ, "GPUHOOK_CONFIG": str(folder.config)}
        process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while len(folder.mounts()) < mounts and process.poll() is None:
            assert time.monotonic() < end
        process.send_signal(signal.SIGKILL)
        process.wait()
        folder.call("--undo").ok()
        assert folder.mounts() == []
        assert snapshot(folder) == before


def test_undo_keeps_later_changes_of_other_programs(folder: Folder) -> None:
    before = snapshot(folder)
    folder.call("-e", f"{ASK}=0").ok()
    (folder.root / CACHE).write_bytes(b"another program's")
    (folder.root / "usr/bin/theirs").write_text("x")
    folder.call("--undo").ok()
    assert (folder.root / CACHE).read_bytes() == b"another program's"
    after = snapshot(folder)
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed - {"etc", "usr/bin", "."} == {CACHE, "usr/bin/theirs"}


def test_fstab_lines_suffice_for_a_program_that_mounts_by_itself(
    folder: Folder, driver: Driver
) -> None:
    fstab, environ = folder.state.parent / "fstab", folder.state.parent / "environ"
    environ.write_text(f"PATH=/bin\n{ASK}=all\n{ASK}=1\n")
    words = (f"--fstab={fstab}", f"--environ={environ}")
    done = json.loads(folder.call(*words, "--format=json").ok().stdout)
    assert folder.mounts() == []
    lines = [line.split(" ") for line in fstab.read_text().splitlines()]
    assert [" ".join(line) for line in lines] == done["fstab"]
    assert all(line[2] == "none" and line[4:] == ["0", "0"] for line in lines)
    nodes = {line[1]: line[3] for line in lines if "/dev/" in line[1]}
    minor = driver.gpus[1].minor
    assert nodes[f"/dev/nvidia{minor}"] == "x-create=file,bind,ro,nosuid,noexec"
    assert f"/dev/nvidia{driver.gpus[0].minor}" not in nodes
    assert {each["kind"] for each in done["undone"]} >= {"proc-driver", "ldcache"}
    for source, destination, _, options, *_ in lines:
        target = folder.root / destination.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if "x-create=dir" in options else target.touch()
        folder.namespace.run("mount", "--bind", source, target).ok()
    seen = folder.inside("nvidia-smi", "-L").ok().stdout
    assert seen.splitlines() == lines_of_nvidia_smi(driver.chosen(1))


def test_the_files_are_the_drivers_and_read_only(folder: Folder, driver: Driver) -> None:
    folder.call("-e", f"{ASK}=0").ok()
    library = driver.library("libcuda.so.1")
    inside = folder.inside("stat", "-c", "%i", f"/{library.relative_to(driver.root)}").ok()
    assert int(inside.stdout) == library.stat().st_ino
    assert folder.inside("sh", "-c", f"echo > /{library.relative_to(driver.root)}").status != 0


def test_devices_of_several_vendors_are_given_in_one_folder(
    folder: Folder, installation: Installation, driver: Driver, workspace: Path
) -> None:
    """Devices of NVIDIA, AMD and a vendor that config.toml declares, by variable or CDI name."""
    table = declared_vendors.tables()["maker"]
    declares = folder.state.parent / "maker.toml"
    declares.write_text(table)
    places = [workspace / f"{name}-{folder.root.name}" for name in ("amd", "maker")]
    with (
        vendors.devices(installation, places[0], "amd", 2) as amd,
        vendors.devices(installation, places[1], "maker", 3, config=declares) as maker,
    ):
        roots = json.dumps([f"amd={amd.root}", f"maker={maker.root}"])
        text = folder.config.read_text().replace(
            "[gpuhook]\n", f"[gpuhook]\ndriver-roots = {roots}\n"
        )
        folder.config.write_text(f"{text}\n{table}")
        before = snapshot(folder)
        variable = loads(table).vendors[0].variable
        words = (
            "--device=nvidia.com/gpu=1",
            "-e",
            "AMD_VISIBLE_DEVICES=1",
            "-e",
            f"{variable}=0,2",
        )
        explained = json.loads(folder.call(*words, "--format=json", verb="explain").ok().stdout)
        done = json.loads(folder.call(*words, "--format=json").ok().stdout)
        assert explained["operations"] == done["operations"]
        assert explained["undone"] == done["undone"]
        looked = folder.inside("sh", "-c", _NODES).ok().stdout.splitlines()
        given = [amd.numbers("/dev/kfd"), amd.numbers("/dev/dri/renderD129")]
        given += [maker.numbers(f"/dev/maker{number}") for number in (0, 2)]
        assert {*given} <= {*looked}
        others = (amd.numbers("/dev/dri/renderD128"), maker.numbers("/dev/maker1"))
        assert not {*others} & {*looked}
        seen = folder.inside("nvidia-smi", "-L").ok().stdout.splitlines()
        assert seen == lines_of_nvidia_smi(driver.chosen(1))
        folder.call("--undo").ok()
        assert folder.mounts() == []
        assert snapshot(folder) == before


def test_a_device_of_an_absent_vendor_is_refused(folder: Folder) -> None:
    done = folder.call("--device=nvidia.com/gpu=0", "--device=amd.com/gpu=0").failed()
    assert "AMD" in done.stderr


def test_a_folder_without_a_request_gets_no_devices(folder: Folder) -> None:
    done = folder.call().ok()
    assert "no device is asked for" in done.stdout
    assert "no device is asked for" in folder.call("-e", f"{ASK}=void").ok().stdout
    assert folder.mounts() == []


@pytest.mark.protects(
    "folder-environment",
    "a root folder's environment is ignored where images may not request devices",
    instead="env = environment(self.environ, self.rootfs) if self.environ else {}",
)
def test_an_image_environment_is_ignored_where_the_config_forbids_it(folder: Folder) -> None:
    """The image's environment is ignored then, but the caller's words count."""
    environ = folder.state.parent / "environ"
    environ.write_text(f"{ASK}=all\n")
    text = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    folder.config.write_text(text + folder.config.read_text())
    assert "no device is asked for" in folder.call(f"--environ={environ}").ok().stdout
    folder.call(f"--environ={environ}", "-e", f"{ASK}=1").ok()
    assert len(folder.inside("nvidia-smi", "-L").ok().stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device=nvidia.com/gpu=99",), "has no GPU or MIG device '99'"),
        (("--device=example.com/x=1",), "has no devices named"),
        (("--device=nonsense",), "has no devices named"),
        (("-e", "=x"), "-e takes NAME=VALUE"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(
    folder: Folder, words: tuple[str, ...], message: str
) -> None:
    before = snapshot(folder)
    assert message in folder.call(*words).failed().stderr
    assert snapshot(folder) == before
    assert folder.mounts() == []


@pytest.mark.protects(
    "folder-limits",
    "a device with a memory limit is refused for a root folder, which has no cgroup",
)
@pytest.mark.parametrize(
    ("limits", "env"),
    [
        ('device-memory = "8GiB"', ""),
        ('most-device-memory = "8GiB"', ""),
        ("required = true", ""),
        ("required = true", "GPUHOOK_DEVICE_MEMORY=8GiB"),
        ("", "GPUHOOK_DEVICE_MEMORY=8GiB"),
    ],
)
@pytest.mark.parametrize("way", ["give", "fstab", "dry-run", "environ", "unit", "machine"])
def test_apply_is_refused_where_a_memory_limit_applies(
    folder: Folder, way: str, limits: str, env: str
) -> None:
    """No cgroup is set there, so a limit would silently have no effect."""
    folder.config.write_text(f"{folder.config.read_text()}[gpuhook.limits]\n{limits}\n")
    before = snapshot(folder)
    asked = ["-e", f"{ASK}=0", *(["-e", env] if env else [])]
    if way == "environ":
        environ = folder.state.parent / "environ"
        environ.write_text(f"{ASK}=0\n{env}\n")
        asked = [f"--environ={environ}"]
    more = {"fstab": ["--fstab=-"], "dry-run": ["--dry-run"]}.get(way, [])
    verb = {"unit": "unit-lines", "machine": "nspawn-arguments"}.get(way)
    if verb:
        done = folder.namespace.run(
            folder.command, verb, *asked, env={"GPUHOOK_CONFIG": str(folder.config)}
        )
    else:
        done = folder.call(*asked, *more)
    assert "limit" in done.failed().stderr + done.stdout
    assert snapshot(folder) == before
    assert folder.mounts() == []


def test_the_lines_of_a_unit_escape_any_path_for_systemd(workspace: Path) -> None:
    root, variable = '/srv/a  b\tc%i:d"e\'f\\g "" h', "A=a  b\tc%i\"e'f\\g$h"
    plan = Plan([BindDevice(root, DeviceNode("/dev/nvidia0", 195, 0, 0o666, 0, 0), "")])
    lines = ["[Unit]", "DefaultDependencies=no", *units.service(plan, [variable], own_root=True)]
    lines += ["RootDirectory=/srv", "ExecStart=/bin/true"]
    folder = workspace / "units"  # another user runs systemd, whose test mode refuses root
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "odd.service").write_text("".join(f"{line}\n" for line in lines))
    env = dict.fromkeys(("SYSTEMD_UNIT_PATH", "XDG_RUNTIME_DIR", "HOME"), str(folder))
    user = ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"]
    words = (*user, "/lib/systemd/systemd", "--test", "--user", "--unit=odd.service")
    with namespace("host" if host_cgroups() == "v2" else "v2") as entered:  # systemd 258 lacks v1
        done = entered.run(*words, env=env).ok()
    shutil.rmtree(folder)
    assert f"BindPaths: {root}/dev/nvidia0:/dev/nvidia0:rbind\n" in done.stdout
    assert f"Environment: {variable}\n" in done.stdout


def test_an_empty_rootfs_name_is_refused(folder: Folder) -> None:
    before = snapshot(folder)
    done = folder.namespace.run(
        folder.command, "apply", "--rootfs=", "--no-undo", "-e", f"{ASK}=0",
        env={"GPUHOOK_CONFIG": str(folder.config)}, cwd=folder.root,
    )  # fmt: skip
    assert "--rootfs names no folder" in done.failed().stderr
    assert folder.mounts() == []
    assert snapshot(folder) == before


def test_the_hosts_root_is_refused_as_a_folder(folder: Folder) -> None:
    for place in ("/", "/proc/self/root", f"{folder.root}/nothing"):
        done = folder.namespace.run(
            folder.command, "apply", f"--rootfs={place}", "-e", f"{ASK}=0",
            f"--state-dir={folder.state}", env={"GPUHOOK_CONFIG": str(folder.config)},
        ).failed()  # fmt: skip
        assert "the host's own" in done.stderr or "can't be opened" in done.stderr


@pytest.mark.protects(
    "folder-volumes",
    "files for a root folder aren't created in host folders that are mounted inside it",
    instead='self._host_table = proc.Mounts(b"")',
)
def test_a_folder_whose_files_would_be_made_in_a_volume_is_refused(
    folder: Folder, tmp_path: Path
) -> None:
    """A folder of the host is mounted in the folder, so files would be made on the host."""
    volume = tmp_path / "volume"
    volume.mkdir()
    folder.namespace.run("mount", "--bind", volume, folder.root / "dev").ok()
    done = folder.call("-e", f"{ASK}=0").failed()
    assert "would have to be made in a volume" in done.stderr
    assert list(volume.iterdir()) == []


def test_links_out_of_the_folder_are_not_followed(folder: Folder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    shutil.rmtree(folder.root / "dev")
    (folder.root / "dev").symlink_to(victim)
    (folder.root / CACHE).unlink(missing_ok=True)
    (folder.root / CACHE).symlink_to(victim / "cache")
    folder.call("-e", f"{ASK}=0")
    assert list(victim.iterdir()) == []
    folder.call("--undo")
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("place", ["dev", "etc/ld.so.cache", "usr/lib/firmware", "run"])
def test_obstructing_files_cause_no_traceback_and_leave_no_change(
    folder: Folder, place: str
) -> None:
    """Links to themselves and wrong file types in the way cause a plain error, or a workaround."""
    path = folder.root / place
    for kind in ("circle", "other"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "circle":
            path.symlink_to(path.name)
        elif "." in path.name:
            path.mkdir()
        else:
            path.write_text("")
        before = snapshot(folder)
        done = folder.call("-e", f"{ASK}=0")
        assert "Traceback" not in done.stderr
        if done.status == 0:
            folder.call("--undo").ok()
        assert snapshot(folder) == before
        assert folder.mounts() == []


def test_undo_does_not_follow_links_out_of_the_folder(folder: Folder, tmp_path: Path) -> None:
    """The owner replaces folders by links to files that an undo would remove or replace."""
    folder.call("-e", f"{ASK}=0").ok()
    victim = tmp_path / "victim"
    shutil.copytree(folder.root / "etc", victim / "etc", symlinks=True)
    (victim / "dev").mkdir()
    for name in ("nvidiactl", f"nvidia{3}"):
        (victim / "dev" / name).touch()
    before = contents(victim)
    for name in ("etc", "dev"):
        (folder.root / name).rename(folder.root / f"{name}.away")
        (folder.root / name).symlink_to(victim / name)
    folder.call("--undo")
    assert contents(victim) == before


@pytest.mark.protects(
    "undone-folder", "a folder's recorded state isn't restored in another folder at the same path"
)
@pytest.mark.parametrize("verb", ["undo", "give"])
def test_a_folder_replaced_by_a_link_meanwhile_is_refused(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The owner of the folder above replaces the folder by a link before the undo."""
    victim, name = tmp_path / "victim", "ours.conf"
    shutil.copytree(folder.root / "etc", victim / "etc", symlinks=True)
    path = str(folder.root)
    was = {"is": "file", "uid": 0, "gid": 0, "mode": 0o644, "data": "aGVyZQ==", "label": None}
    place = {"path": f"/etc/{name}", "named": [], "was": was, "made": [], "written": True}
    place["now"] = records.digest(b"theirs")
    with inject.open_folder(path, Root) as opened:
        noted = records.FolderRecord(
            records.file_of(str(folder.state), path), path, opened.identity(), records.boot(),
            mount_tracking.namespace(), [], [place],
        )  # fmt: skip
    noted.save()
    for root in (folder.root, victim):
        (root / "etc" / name).write_text("theirs")
    there = contents(victim)
    take_off = mount_tracking.take_off

    def swap(record: records.FolderRecord, place: str, on: str = "") -> list[str]:
        if not on and not folder.root.is_symlink():
            folder.root.rename(f"{path}.away")
            folder.root.symlink_to(victim)
        return take_off(record, place, on)

    monkeypatch.setattr(mount_tracking, "take_off", swap)
    config = load_config(str(folder.config))
    known = registry.all_vendors(config)
    spec = CallerRequest(((ASK, "0"),)).spec(config, known)
    resolved = resolve(spec.data, config, known, Progress())
    assert resolved is not None
    give = (path, resolved, config, spec, str(folder.state))
    try:
        with pytest.raises(FolderError, match="another folder"):
            work.undo(path, str(folder.state)) if verb == "undo" else work.give(*give)
        assert contents(victim) == there
        assert os.path.exists(noted.path), "it can be undone still"
    finally:
        folder.root.unlink()
        os.rename(f"{path}.away", path)
