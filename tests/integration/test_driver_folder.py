"""gpuhook driver-folder: containers of plain runc that mount it, and its upkeep by root."""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from harness import bundles
from harness.bundles import Bundle
from harness.commands import Result, run, wait_until
from harness.docker import Docker
from harness.driver import lines_of_nvidia_smi
from harness.driver_folder import INSIDE, NEW, OLD, SETTINGS, Machine
from harness.engines import settings
from harness.images import image
from harness.installation import Installation
from harness.loader import probed
from harness.namespaces import Namespace
from harness.prefork import RUNTIMES
from harness.strangers import folder_of_his

from gpuhook.tools.driver_folder import place


@pytest.fixture
def machine(
    installation: Installation, workspace: Path, request: pytest.FixtureRequest
) -> Iterator[Machine]:
    made = Machine(installation, workspace / f"folder-{abs(hash(request.node.name))}")
    yield made
    made.destroy()


def gives(machine: Machine, *indices: int) -> Iterator[tuple[Path, int, int]]:
    """Yield path, major and minor number of the nodes for some GPUs."""
    minors = [machine.driver.gpus[index].minor for index in indices]
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in minors)):
        node = machine.root / "dev" / name
        numbers = node.stat().st_rdev
        yield Path("/dev", name), os.major(numbers), os.minor(numbers)


def mount(bundle: Bundle, machine: Machine, *indices: int) -> None:
    """Add the nodes of some GPUs, and the driver folder, to a container."""
    spec = bundle.spec()
    options = ["rbind", "rprivate", "ro"]
    spec["mounts"].append(
        {"destination": INSIDE, "type": "bind", "source": str(machine.folder), "options": options}
    )
    for path, major, minor in gives(machine, *indices):
        node = {"type": "c", "major": major, "minor": minor}
        spec["linux"].setdefault("devices", []).append({"path": str(path), **node})
        spec["linux"]["resources"]["devices"].append({"allow": True, "access": "rw", **node})
    bundle.change(lambda found: found.update(spec))
    bundle.environ(*SETTINGS)


@contextmanager
def running(bundle: Bundle, runtime: str) -> Iterator[None]:
    """Run the container of a bundle until the end of the block."""
    bundle.command("sh", "-c", "echo ready && exec sleep infinity")
    words = bundle.namespace.enter(runtime, "run", "--bundle", bundle.path, bundle.name)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            # The container's program may run before its runtime has recorded the container.
            wait_until(
                lambda: bundle.namespace.run(runtime, "state", bundle.name).status == 0,
                "the runtime knows the container",
            )
            yield
        finally:
            bundle.namespace.run(runtime, "kill", bundle.name, "KILL")


def inside(bundle: Bundle, runtime: str, script: str) -> Result:
    return bundle.namespace.run(runtime, "exec", bundle.name, "sh", "-ec", script)


PROBE = "nvidia-smi -L; gpuhook-cuda-probe; nvidia-smi | busybox grep -o 'Driver Version: [0-9.]*'"


def seen_by(bundle: Bundle, runtime: str) -> list[str]:
    """Return the GPUs, the CUDA device count and the driver version that a container sees."""
    lines = inside(bundle, runtime, PROBE).ok().stdout.splitlines()
    return [line for line in lines if not line.startswith("CUDA device ")]


def expected(machine: Machine, version: str, *indices: int) -> list[str]:
    gpus = lines_of_nvidia_smi(machine.driver.chosen(*indices))
    return [*gpus, f"CUDA devices: {len(indices)}", f"Driver Version: {version}"]


LowLevel = tuple[str, Namespace]


@pytest.mark.parametrize("bundle", ["debian", "lib64"], indirect=True)
@RUNTIMES
def test_a_container_of_plain_runc_uses_the_folder_read_only(
    bundle: Bundle, machine: Machine
) -> None:
    runtime = bundle.runtime
    machine.keep().ok()
    mount(bundle, machine, 1)
    with running(bundle, runtime):
        assert seen_by(bundle, runtime) == expected(machine, OLD, 1)
        # The other GPU's node can be made but not opened, and nothing in the folder can be changed.
        other = machine.driver.gpus[0].minor
        made = f"busybox mknod /dev/other c 195 {other}; devopen /dev/other"
        assert inside(bundle, runtime, made).stdout.split()[-1] == "EPERM"
        assert "Read-only" in inside(bundle, runtime, f": > {INSIDE}/bin/x").failed().stderr


@RUNTIMES
def test_every_library_is_found_by_its_soname(bundle: Bundle, machine: Machine) -> None:
    machine.keep().ok()
    mount(bundle, machine, 0)
    folder = machine.driver.library("libcuda.so.1").parent
    names = [path.name for path in folder.glob("lib*.so.*") if path.is_symlink()] + ["libcuda.so"]
    assert len(names) > 20
    bundle.command("dlprobe", *names)
    found = probed(bundle.run(bundle.runtime).ok().stdout.splitlines())
    kept = machine.folder / "lib64"
    assert found == {
        name: f"{status.st_dev}:{status.st_ino}"
        for name, status in ((name, (kept / name).stat()) for name in names)
    }


def test_docker_uses_the_folder_with_its_own_runtime(docker: Docker, machine: Machine) -> None:
    machine.keep().ok()
    options = [f"--volume={machine.folder}:{INSIDE}:ro", *settings("--env", SETTINGS)]
    options += [f"--device={machine.root}{path}:{path}" for path, _, _ in gives(machine, 1)]
    done = docker.run(image("debian"), "nvidia-smi", "-L", options=options, runtime="runc").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(machine.driver.chosen(1))


@pytest.mark.protects(
    "folder-in-use",
    "a driver folder that a running container uses isn't removed",
    instead="return False",
)
@RUNTIMES
def test_an_update_leaves_running_containers_with_the_old_driver(
    bundle: Bundle,
    low_level: LowLevel,
    machine: Machine,
    workspace: Path,
    roots: dict[str, Path],
) -> None:
    runtime, entered = low_level
    machine.keep().ok()
    mount(bundle, machine, 0, 1)
    with running(bundle, runtime):
        machine.install(NEW)
        assert f"driver {NEW}" in machine.keep().ok().stdout
        assert seen_by(bundle, runtime) == expected(machine, OLD, 0, 1)
        with bundles.bundle(workspace / "bundles", roots["debian"], entered, runtime) as next_one:
            mount(next_one, machine, 1)  # mounted from the same path
            with running(next_one, runtime):
                assert seen_by(next_one, runtime) == expected(machine, NEW, 1)
        # Another run doesn't remove it either while a container has it.
        assert "unchanged" in machine.keep().ok().stdout
        [older] = machine.older
        assert place._is_mounted(older.name)
        assert seen_by(bundle, runtime) == expected(machine, OLD, 0, 1)
    wait_until(lambda: not place._is_mounted(older.name), "no container has the older folder")
    machine.keep().ok()
    assert machine.older == ([] if place._sees_every_process() else [older])


def test_files_are_hard_links_on_the_same_filesystem(machine: Machine) -> None:
    machine.keep().ok()
    for name, path in (("bin/nvidia-smi", "/usr/bin/nvidia-smi"), ("lib64/libcuda.so.1", None)):
        source = machine.driver.path(path) if path else machine.driver.library("libcuda.so.1")
        assert os.path.samefile(machine.folder / name, source)


def test_files_are_copies_where_they_are_on_another_filesystem(machine: Machine) -> None:
    folder = Path("/var/lib") / machine.root.parent.name
    try:
        source = machine.driver.library("libcuda.so.1")
        assert folder.parent.stat().st_dev != source.stat().st_dev
        machine.keep(folder / "driver").ok()
        made = folder / "driver/lib64/libcuda.so.1"
        assert made.read_bytes() == source.read_bytes()
        status, before = made.stat(), source.stat()
        assert (status.st_uid, status.st_gid, status.st_nlink) == (0, 0, 1)
        assert (status.st_mode, status.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
        assert "unchanged" in machine.keep(folder / "driver").ok().stdout
        machine.keep("--remove", folder / "driver").ok()
        kept = [] if place._sees_every_process() else [".driver.gpuhook"]  # stays until a reboot
        assert [path.name for path in folder.iterdir()] == kept
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.protects(
    "file-rights",
    "files in a driver folder belong to root, without set-user-ID bits or capabilities",
    instead="if _link(fd, target):",
)
def test_set_uid_bits_capabilities_and_owners_are_removed(machine: Machine) -> None:
    """The copies have no set-user-ID bit and no file capability, and root owns them."""
    programs = {name: machine.root / "usr/bin" / name for name in (
        "nvidia-smi", "nvidia-debugdump", "nvidia-persistenced",
    )}  # fmt: skip
    programs["nvidia-smi"].chmod(0o4755)
    one = b"\1\0\0\2" + b"\1\0\0\0" * 4  # struct vfs_cap_data: CAP_CHOWN, permitted and effective
    os.setxattr(programs["nvidia-debugdump"], "security.capability", one)
    os.chown(programs["nvidia-persistenced"], 65534, 65534)
    machine.keep().ok()
    for name in programs:
        made = machine.folder / "bin" / name
        status = made.stat()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o755, 0, 0)
        assert "security.capability" not in os.listxattr(made)


def test_a_missing_driver_keeps_the_old_folder(machine: Machine) -> None:
    machine.keep().ok()
    before = [*machine.folder.rglob("*")]
    machine.destroy()
    machine.root.mkdir()
    said = machine.keep().failed()
    assert said.status == 1
    assert "There is no NVIDIA driver" in said.stderr
    assert "is kept unchanged" in said.stderr
    assert [*machine.folder.rglob("*")] == before


def test_check_changes_nothing(machine: Machine) -> None:
    assert machine.keep("--check").status == 1
    assert not machine.folder.parent.exists()
    machine.keep().ok()
    machine.keep("--check").ok()
    assert machine.keep("--check", "--capabilities=utility").status == 1
    machine.install(NEW)
    assert machine.keep("--check").status == 1
    assert (machine.folder / f"lib64/libcuda.so.{OLD}").exists()


def test_json_output_reports_path_version_and_changes(machine: Machine) -> None:
    def told(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(machine.keep("--format=json", *options).stdout)
        return found

    assert (told("--check")["current"], told("--check")["changed"]) == (False, False)
    first = told()
    assert (first["path"], first["version"], first["changed"]) == (str(machine.folder), OLD, True)
    assert first["files"] > 10
    assert told()["changed"] is False
    assert told("--check")["current"] is True
    removed = told("--remove")
    left = len(machine.older)  # in a PID namespace, gpuhook can't see which processes use it
    assert removed == {"path": str(machine.folder), "removed": True, "in_use": left}
    assert not machine.folder.exists()


def test_concurrent_runs_create_the_folder_once(machine: Machine) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = [*pool.map(lambda _: machine.keep().ok().stdout, range(8))]
    assert len([text for text in done if "unchanged" not in text]) == 1
    assert machine.older == []


def test_a_mounted_folder_is_refused(machine: Machine) -> None:
    machine.folder.mkdir(parents=True)
    run(["mount", "-t", "tmpfs", "tmpfs", machine.folder]).ok()
    try:
        said = machine.keep().failed().stderr
        assert "mount its parent folder" in said
        assert not [*machine.folder.iterdir()]
    finally:
        run(["umount", machine.folder]).ok()
    machine.keep().ok()


def test_a_driver_folder_on_a_noexec_mount_is_refused(machine: Machine) -> None:
    place = machine.folder.parent
    place.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", place]).ok()
    try:
        assert "noexec" in machine.keep().failed().stderr
    finally:
        run(["umount", place]).ok()


def test_a_full_filesystem_is_refused_and_leaves_no_folder(machine: Machine) -> None:
    place = machine.folder.parent
    place.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place]).ok()
    try:
        assert "Free space" in machine.keep().failed().stderr
        assert [*machine.older] == []
        assert not machine.folder.exists()
    finally:
        run(["umount", place]).ok()


@pytest.mark.protects(
    "work-way", "the work folder next to a driver folder is refused if another user controls it"
)
@pytest.mark.parametrize("name", ["driver", ".driver.gpuhook", "kept"])
def test_a_folder_of_another_user_is_refused(machine: Machine, name: str, tmp_path: Path) -> None:
    """The user owns the folder above, or was the first to create the folder in one such as /tmp."""
    parent = machine.folder.parent
    if name == "kept":
        his = folder_of_his(machine.root.parent, name)
    else:
        parent.mkdir()
        parent.chmod(0o1777)
        his = folder_of_his(parent, name)
    (his / "file").touch()
    assert "user 65534" in machine.keep().failed().stderr
    assert [path.name for path in his.rglob("*")] == ["file"]
    machine.keep("--remove").failed()
    assert [path.name for path in his.rglob("*")] == ["file"]


@pytest.mark.protects(
    "folder-way", "a driver folder is created only at a path that other users can't redirect"
)
def test_a_link_of_another_user_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.folder.parent.mkdir()
    machine.folder.symlink_to(tmp_path)
    os.chown(machine.folder, 65534, 65534, follow_symlinks=False)
    assert "user 65534" in machine.keep().failed().stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.protects(
    "work-way", "the work folder next to a driver folder is refused if another user controls it"
)
@pytest.mark.protects(
    "folder-owner", "a driver folder that another user creates in the meantime isn't used"
)
def test_a_folder_another_user_puts_there_meanwhile_is_not_used(machine: Machine) -> None:
    """In a folder such as /tmp, a user's folder can look complete and be changed later."""
    machine.folder.parent.mkdir()
    machine.folder.parent.chmod(0o1777)
    machine.keep().ok()
    his = machine.root.parent / "his"
    shutil.copytree(machine.folder, his, symlinks=True)
    shutil.rmtree(machine.folder)
    for path in (his, *his.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    work = machine.folder.with_name(".driver.gpuhook")
    lock = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            kept = pool.submit(machine.keep, start=True)  # a started program has its name in /proc
            try:
                wait_until(lambda: waits_for(work), "somebody waits for the lock")
                his.rename(machine.folder)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)
            assert "files" in kept.result().ok().stdout
    finally:
        os.close(lock)
    assert {path.lstat().st_uid for path in (machine.folder, *machine.folder.rglob("*"))} == {0}
    assert "unchanged" in machine.keep().ok().stdout
    assert [*machine.older] == []


def waits_for(folder: Path) -> bool:
    """Return whether a ``gpuhook driver-folder`` process has a folder open.

    A child process of the tests that hasn't called exec yet has all open files of the tests.
    """
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            is_one = b"driver-folder" in (link.parents[1] / "cmdline").read_bytes()
            if is_one and link.readlink() == folder:
                return True
    return False


def test_selinux_labels_are_copied_from_the_driver(machine: Machine) -> None:
    """The test checks only the labels, because nothing enforces them here."""
    labels = {"/usr": b"system_u:object_r:usr_t:s0\0", "/usr/bin/nvidia-smi": b"u:r:bin_t:s0\0"}
    program = machine.driver.path("/usr/bin/nvidia-smi")
    program.chmod(0o4755)  # so that gpuhook copies the program
    for path, label in labels.items():
        os.setxattr(machine.driver.path(path), "security.selinux", label)
    machine.keep().ok()
    for made, path in ((".", "/usr"), ("lib64", "/usr"), ("bin/nvidia-smi", "/usr/bin/nvidia-smi")):
        assert os.getxattr(machine.folder / made, "security.selinux") == labels[path]
