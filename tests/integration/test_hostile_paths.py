"""Other users' files where driver files and sockets are searched, and folders with sockets."""

import ctypes
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.bundles import Bundle
from harness.cdi import generate, give
from harness.commands import Result, run, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, harden, write_config
from harness.prefork import ONE, Site
from harness.strangers import UID

from gpuhook.base.container.rootfs import Rootfs, find_socket
from gpuhook.base.errors import UntrustedPathError

DAEMON = 120  # a system user, such as Debian makes for nvidia-persistenced
SOCKET = "run/nvidia-persistenced/socket"
LIMIT_S = 300.0
COMMANDS = (
    ("info",), ("list",), ("refresh",), ("cdi", "generate"), ("slurm", "gres"),
    ("explain", "-e", "NVIDIA_VISIBLE_DEVICES=all"), ("doctor",),
)  # fmt: skip
# Mounts a user's FUSE filesystem, and never answers its requests.
MOUNT_FUSE = """
import ctypes, os, sys, time
place, user, options = sys.argv[1:]
fuse = os.open("/dev/fuse", os.O_RDWR)
data = f"fd={fuse},rootmode=40755,user_id={user},group_id={user}{options}".encode()
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"none", place.encode(), b"fuse", 0, data) == 0, ctypes.get_errno()
print("mounted", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory, installation: Installation) -> Driver:
    """A simulated machine for one test, with a /tmp that all users may write."""
    root = tmp_path_factory.mktemp("hostile-paths")
    made = simulate(installation, root / "driver", "--gpus=2")
    (made.root / "tmp").mkdir(exist_ok=True)
    (made.root / "tmp").chmod(0o1777)
    return made


@pytest.fixture
def config(bundle: Bundle, machine: Driver) -> Path:
    return write_config(bundle.path / "etc", machine.root, [bundle.runtime])


def started(
    bundle: Bundle, installation: Installation, config: Path, script: str, *env: str
) -> Result:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all", *env)
    bundle.command("sh", "-c", script)
    return bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)})


def command(installation: Installation, config: Path, *words: str | Path) -> Result:
    return run([installation.command, *words, "--config", config], timeout=LIMIT_S)


def listening(path: Path, *, owner: int = 0) -> Path:
    """Create a socket in a folder with the same owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as made, at(path.parent):
        made.bind(path.name)  # only the name, because the whole path may be too long
    for each in (path.parent, path):
        os.chown(each, owner, owner)
    return path


@contextmanager
def at(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# In a folder that everybody may write to ------------------------------------------------------


def as_pipe(place: Path) -> None:
    os.mkfifo(place)


def as_folder(place: Path) -> None:
    place.mkdir()
    (place / "his").write_text("his")


def as_link(place: Path) -> None:
    secret = place.parent.parent / "srv/secret"
    secret.mkdir(parents=True)
    (secret / "file").write_text("the administrator's")
    place.symlink_to("/srv/secret")


def as_socket(place: Path) -> None:
    listening(place)


@contextmanager
def fuse(place: Path, options: str = "", *, dead: bool = False) -> Iterator[None]:
    """Mount a user's filesystem that isn't served; if ``dead``, its server has exited."""
    words = [sys.executable, "-c", MOUNT_FUSE, str(place), str(UID), options]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"mounted\n"
            if dead:
                server.kill()
                server.wait()
            yield
        finally:
            server.kill()
            server.wait()
            ctypes.CDLL(None).umount2(str(place).encode(), 2)  # MNT_DETACH


def check_nobody_cares(
    bundle: Bundle, installation: Installation, config: Path, *commands: tuple[str, ...]
) -> None:
    """Check that a container starts without anything from /tmp and that the commands work."""
    done = started(
        bundle, installation, config, "nvidia-smi -L; ls -A /tmp; ls -A /srv 2>/dev/null; true"
    ).ok()
    assert [line[:4] for line in done.stdout.splitlines()] == ["GPU "] * 2
    for words in commands:
        done = command(installation, config, *words)
        assert "Traceback" not in done.stderr + done.stdout
        assert done.status == 0 or words[0] == "doctor", done
    (made,) = (each.stdout for each in [command(installation, config, "cdi", "generate")])
    assert "nvidia-mps" not in made


@pytest.mark.parametrize("make", [as_pipe, as_folder, as_link, as_socket])
@ONE
def test_user_files_in_tmp_are_ignored_by_driver_discovery(
    bundle: Bundle,
    installation: Installation,
    config: Path,
    machine: Driver,
    make: Callable[[Path], None],
) -> None:
    place = machine.root / "tmp/nvidia-mps"
    make(place)
    os.chown(place, UID, UID, follow_symlinks=False)
    check_nobody_cares(bundle, installation, config, ("info",), ("list",))


@pytest.mark.parametrize("options", ["", ",allow_other"], ids=["refuses", "hangs"])
@ONE
def test_a_users_filesystem_in_tmp_is_not_queried(
    bundle: Bundle, installation: Installation, config: Path, machine: Driver, options: str
) -> None:
    place = machine.root / "tmp/nvidia-mps"
    as_folder(place)
    with fuse(place, options):
        check_nobody_cares(bundle, installation, config, *COMMANDS)


def test_paths_below_a_world_writable_folder_are_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777):
        shared = tmp_path / f"{mode:o}"
        as_folder(shared)
        shared.chmod(mode)
        (shared / "it").mkdir()
        with fuse(shared / "it", ",allow_other"), Rootfs(str(tmp_path)) as root:
            for ask in (root.open_own, root.open_socket, root.own_path):
                with pytest.raises(UntrustedPathError, match="all users may write"):
                    ask(f"/{mode:o}/it/file")


# Sockets of the driver's daemons --------------------------------------------------------------

GIVEN = f"if busybox test -S /{SOCKET}; then echo given; fi"


def _roots(place: Path) -> None:
    listening(place)


def _daemons(place: Path) -> None:
    listening(place, owner=DAEMON)


def _gone(place: Path) -> None:
    place.unlink(missing_ok=True)


def _strangers(place: Path) -> None:
    listening(place, owner=UID)


def _in_a_strangers_folder(place: Path) -> None:
    os.chown(listening(place), 0, 0)
    os.chown(place.parent, UID, UID)


def _of_another_user(place: Path) -> None:
    listening(place, owner=DAEMON)
    os.chown(place, UID, UID)


def _link(place: Path) -> None:
    listening(place.parent / "other", owner=DAEMON)
    place.unlink(missing_ok=True)
    place.symlink_to("other")


def _folder_link(place: Path) -> None:
    listening(place)
    place.parent.rename(place.parent.with_name("elsewhere"))
    place.parent.symlink_to("elsewhere")


def _pipe(place: Path) -> None:
    place.unlink(missing_ok=True)
    os.mkfifo(place)


def _everybodys(place: Path) -> None:
    listening(place)
    place.parent.chmod(0o1777)


def _below_everybodys(place: Path) -> None:
    listening(place)
    place.parent.parent.chmod(0o1777)


@pytest.mark.parametrize("make", [_roots, _daemons])
@ONE
def test_a_daemons_socket_is_given(
    bundle: Bundle,
    installation: Installation,
    config: Path,
    machine: Driver,
    make: Callable[[Path], None],
) -> None:
    make(machine.root / SOCKET)
    assert started(bundle, installation, config, GIVEN).ok().stdout == "given\n"


HOSTILE = [
    _gone, _strangers, _in_a_strangers_folder, _of_another_user, _link, _folder_link, _pipe,
    _everybodys, _below_everybodys,
]  # fmt: skip


@pytest.mark.protects(
    "strangers-folder",
    "files in another user's folder aren't treated as parts of a driver",
    only="in_a_strangers_folder",
)
@pytest.mark.protects(
    "whose-socket",
    "a socket is passed to containers only if root or its daemon's user owns it",
    instead="if alone:",
    only="of_another_user",
)
@pytest.mark.parametrize("make", HOSTILE)
@ONE
def test_an_untrusted_socket_is_not_given(
    bundle: Bundle,
    installation: Installation,
    config: Path,
    machine: Driver,
    make: Callable[[Path], None],
) -> None:
    """The container starts without the socket, even if the inventory was made before."""
    command(installation, config, "refresh").ok()
    make(machine.root / SOCKET)
    assert started(bundle, installation, config, GIVEN).ok().stdout == ""
    words = ["explain", "-e", "NVIDIA_VISIBLE_DEVICES=all", "--format", "json"]
    told = json.loads(command(installation, config, *words).ok().stdout)
    given = {each.get("destination") for each in told["operations"]}
    assert f"/{SOCKET}" not in given
    assert "/run/nvidia-fabricmanager/socket" in given or make is _below_everybodys
    refused = [text for text in told["warnings"] if "is passed to containers" in text]
    assert len(refused) == (0 if make in (_gone, _folder_link) else 1), told["warnings"]


@ONE
def test_cdi_specs_name_no_socket_and_work_without_daemons(
    bundle: Bundle, installation: Installation, config: Path, machine: Driver
) -> None:
    (machine.root / "tmp/nvidia-mps").mkdir()
    document = generate(installation, config, bundle.path / "cdi")
    (machine.root / "tmp/nvidia-mps").rmdir()
    text = document.read_text()
    assert "/socket" not in text
    bundle.command("sh", "-c", f"nvidia-smi -L; {GIVEN}")
    give(bundle, document, "all")
    assert bundle.run("runc").ok().stdout.splitlines()[2:] == ["given"]  # by the CDI spec's hook
    for each in (machine.root / "run").glob("nvidia-*"):
        for name in each.iterdir():
            name.unlink()
        each.rmdir()
    assert len(bundle.run("runc").ok().stdout.splitlines()) == 2


@pytest.mark.protects(
    "sockets-age-nothing",
    "a daemon's socket that appears or disappears doesn't make the inventory stale",
    instead="files = self.inventory.files\nreturn [file.path for file in files]",
)
@ONE
def test_daemons_and_users_do_not_end_the_prefork_server(
    bundle: Bundle, installation: Installation, machine: Driver, tmp_path: Path
) -> None:
    site = Site(bundle, installation, machine, bundle.runtime, tmp_path)
    site.bundle.change(lambda spec: spec["process"].update(args=["nvidia-smi", "-L"]))
    site.bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    site.plain = site.bundle.config.read_bytes()
    try:
        site.run().ok()
        wait_until(site.is_standing, "a prefork server runs")
        standing = site.server
        for change in (
            (machine.root / "tmp/nvidia-mps").mkdir,
            (machine.root / "tmp/nvidia-mps").rmdir,
            (machine.root / SOCKET).unlink,
            lambda: listening(machine.root / SOCKET),
        ):
            change()
            site.run().ok()
            assert site.served
        wait_until(site.is_standing, "a prefork server runs")
        assert site.server == standing
    finally:
        site.clear()


def test_a_dead_filesystem_over_driver_files_causes_a_short_error(
    installation: Installation, machine: Driver, tmp_path: Path
) -> None:
    """A filesystem whose server has exited covers a folder of the driver."""
    config = write_config(tmp_path / "etc", machine.root, ["runc"])
    library = machine.library("libcuda.so.1").parent
    with fuse(library, ",allow_other", dead=True):
        for words in (("info",), ("refresh",), ("cdi", "generate"), ("slurm", "gres")):
            done = command(installation, config, *words)
            assert done.status != 0
            assert "Traceback" not in done.stderr
            assert len(done.stderr.splitlines()) <= 3, done.stderr
        done = command(installation, config, "doctor")
        assert "Traceback" not in done.stderr


# Features --------------------------------------------------------------------------------------

LOOK = "ls -A /run/udev /etc/cufile.json 2>/dev/null; true"


@pytest.fixture
def udev(machine: Driver) -> Driver:
    """A simulated machine with GPUDirect Storage's configuration, and with udev and its socket."""
    data = machine.root / "run/udev/data"
    data.mkdir(parents=True)
    (data / "c195:0").write_text("E:ID=x\n")
    listening(machine.root / "run/udev/control")
    (machine.root / "etc/cufile.json").write_text("{}")
    return machine


def nvidia_fs(machine: Driver) -> None:
    os.mknod(machine.root / "dev/nvidia-fs0", stat.S_IFCHR | 0o666, os.makedev(510, 0))


@ONE
def test_a_missing_feature_mounts_no_files(
    bundle: Bundle, installation: Installation, config: Path, udev: Driver
) -> None:
    done = started(bundle, installation, config, LOOK, "NVIDIA_GDS=enabled").ok()
    assert done.stdout == ""


@pytest.mark.protects(
    "udev-socket",
    "udev's socket isn't mounted into containers",
    instead='_GDS_FILES = ("/run/udev", "/etc/cufile.json")',
)
@pytest.mark.parametrize("mode", ["hook", "spec"])
@ONE
def test_udevs_socket_is_never_given(
    bundle: Bundle, installation: Installation, config: Path, udev: Driver, mode: str
) -> None:
    nvidia_fs(udev)
    config.write_text(f"{config.read_text()}mode = '{mode}'\n")
    done = started(bundle, installation, config, LOOK, "NVIDIA_GDS=enabled").ok()
    assert done.stdout.split() == ["/etc/cufile.json", "/run/udev:", "data"]


@pytest.mark.protects(
    "feature-policy",
    "requests for driver features obey the same policy as requests for devices",
    instead="options.features = tuple(sorted(enabled))",
)
@ONE
def test_features_obey_the_policy_of_devices(
    bundle: Bundle, installation: Installation, config: Path, udev: Driver
) -> None:
    nvidia_fs(udev)
    harden(config)
    bundle.change(
        lambda spec: spec["mounts"].append(
            {
                "destination": "/var/run/nvidia-container-devices/all",
                "source": "/dev/null",
                "type": "bind",
                "options": ["bind"],
            }
        )
    )
    script = f"{LOOK}; ls /dev/nvidia-fs0; true"
    done = started(bundle, installation, config, script, "NVIDIA_GDS=enabled").ok()
    assert done.stdout == ""
    words = ("explain", "--bundle", bundle.path, "--format", "json")
    told = json.loads(command(installation, config, *words).ok().stdout)
    [why] = [each["reason"] for each in told["request"]["ignored"] if "GDS" in each["reason"]]
    assert "is not privileged" in why


# Folders that hold sockets ---------------------------------------------------------------------

TABLE = """
[[gpuhook.vendors]]
name = "maker"
kind = "maker.example/npu"
variable = "MAKER_VISIBLE_DEVICES"
present = "/etc/maker"
nodes = ["/dev/maker{n}"]
folders = ["/run/maker", "/var/lib/maker"]
"""
ASK = "MAKER_VISIBLE_DEVICES=all"


@pytest.mark.protects(
    "mounted-socket", "a folder that contains a socket is never mounted in a container"
)
@pytest.mark.parametrize("mode", ["hook", "spec"])
@ONE
def test_a_socket_that_appears_in_a_folder_is_not_given(
    bundle: Bundle, installation: Installation, config: Path, machine: Driver, mode: str
) -> None:
    """The inventory may be older, so each start checks the folders where daemons have files."""
    os.mknod(machine.root / "dev/maker0", stat.S_IFCHR | 0o666, os.makedev(511, 0))
    (machine.root / "etc/maker").write_text("")
    for folder in ("run/maker/deep/er", "var/lib/maker"):
        (machine.root / folder).mkdir(parents=True)
        (machine.root / folder / "file").write_text("")
    text = config.read_text().replace("[gpuhook]\n", f'[gpuhook]\nroot = "{machine.root}"\n')
    config.write_text(f"{text}mode = '{mode}'\n{TABLE}")
    bundle.environ(ASK)
    bundle.command("sh", "-c", "ls -d /run/maker /var/lib/maker 2>/dev/null; true")
    env = {"GPUHOOK_CONFIG": str(config)}
    done = bundle.run(installation.runtime, env).ok()
    assert done.stdout.split() == ["/run/maker", "/var/lib/maker"]
    bundle.change(lambda spec: spec.update(mounts=spec["mounts"][:5]))
    listening(machine.root / "run/maker/deep/er/socket")
    assert bundle.run(installation.runtime, env).ok().stdout.split()[-1:] == ["/var/lib/maker"]
    told = command(installation, config, "explain", "-e", ASK).ok().stdout
    assert "/run/maker is passed to containers" in " ".join(told.split())
    made = command(installation, config, "cdi", "generate", "--kind=maker.example/npu")
    assert "hostPath: " in made.stdout
    assert "/run/maker" not in made.stdout
    assert "it contains the socket deep/er/socket" in made.stderr


def test_sockets_are_searched_to_a_limited_depth(tmp_path: Path) -> None:
    listening(tmp_path / "1/2/3/socket")
    fd = os.open(tmp_path, os.O_PATH)
    try:
        assert find_socket(fd) == "1/2/3/socket"
        assert find_socket(fd, 3) == ""
    finally:
        os.close(fd)
