"""Protection of root's commands from other users' processes, files, links and locks."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.commands import Result, run
from harness.driver import Driver
from harness.installation import Installation, write_config
from harness.strangers import (
    AS_STRANGER,
    UID,
    folder_of_his,
    pipe_of_his,
    pretender,
    process,
)

from gpuhook.monitor.host import processes as host_processes

LIMIT_S = 300.0  # limit for a command that normally takes two seconds
OLD = '{"debug":   true}\n'
PYTHON = "/usr/bin/python3"  # other users can surely start it; perhaps not the tests' own Python
WAIT = "echo ready; read -r end"


@dataclass(frozen=True)
class Site:
    """A folder that every user may enter, with root's daemon.json, and the gpuhook command."""

    folder: Path
    config: Path
    command: Path

    def gpuhook(self, verb: str, *words: str | Path) -> Result:
        options = ["--engine=docker", f"--config={self.config}", f"--state-dir={self.folder}/state"]
        return run([self.command, verb, *options, *words], timeout=LIMIT_S)

    def doctor(self, config: Path, *words: str | Path) -> Result:
        """Examine everything with gpuhook doctor; ``config`` is gpuhook's own configuration."""
        return run([self.command, "doctor", "--config", config, *words], timeout=LIMIT_S)


@pytest.fixture
def site(workspace: Path, installation: Installation) -> Iterator[Site]:
    folder = workspace / "hostile-users"
    folder.mkdir()
    config = folder / "daemon.json"
    config.write_text(OLD)
    yield Site(folder, config, installation.command)
    shutil.rmtree(folder)


# Processes ----------------------------------------------------------------------------------


def test_a_pipe_as_another_users_configuration_does_not_hang_doctor(
    site: Site, driver: Driver, configs: dict[str, Path]
) -> None:
    pipe = pipe_of_his(site.folder / "his/daemon.json")
    options = [f"--config-file={pipe}", f"--config={pipe}", f"-H=unix://{pipe}"]
    with ExitStack() as stack:
        his = [
            stack.enter_context(pretender(site.folder / name, *options))
            for name in ("dockerd", "containerd", "crio")
        ]
        done = site.doctor(configs["runc"])
    assert done.stdout.splitlines()[-1].endswith((" failure", " failures"))
    assert str(pipe) not in done.stdout
    assert not [each.pid for each in his if f"dockerd {each.pid}" in done.stdout]


def test_a_pipe_below_another_users_data_root_does_not_hang_uninstall(site: Site) -> None:
    site.gpuhook("install").ok()
    root = site.folder / "his"
    pipe_of_his(root / "containers/x/hostconfig.json")
    words = [f"--config-file={site.config}", f"--data-root={root}"]
    with pretender(site.folder / "dockerd", *words):
        done = site.gpuhook("uninstall").ok()
    assert "removed" in done.stdout or "changed" in done.stdout
    assert site.config.read_text() == OLD


WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")


@pytest.mark.protects(
    "roots-process",
    "other users: their processes aren't mistaken for root's daemons",
    instead="if int(uid := ids.pop()) < 0:",
)
@pytest.mark.protects(
    "ended-process", "other users: zombies and processes of containers aren't mistaken for daemons"
)
@pytest.mark.protects(
    "no-rights", "other users: a root process without privileges isn't mistaken for the host's root"
)
@pytest.mark.parametrize(
    ("way", "mode"),
    [
        (AS_STRANGER, 0o755),
        (("unshare", "--pid", "--fork", "--kill-child"), 0o755),
        (("unshare", "--user", "--map-root-user"), 0o755),
        (WITHOUT_RIGHTS, 0o755),
        ((), 0o4755),
    ],
    ids=["user", "pid namespace", "user namespace", "no rights", "set-user-ID"],
)
def test_processes_other_than_daemons_of_root_get_no_signal(
    site: Site, way: tuple[str, ...], mode: int
) -> None:
    words = [f"--config-file={site.config}"]
    with pretender(site.folder / "dockerd", *words, way=way, mode=mode) as other:
        done = site.gpuhook("install", "--reload").ok()
        assert "docker: no running process uses " in done.stdout
        done = site.gpuhook("uninstall", "--reload").ok()
        assert "process " not in done.stdout
        assert other.poll() is None


def test_a_user_is_warned_that_the_running_docker_is_of_root(
    site: Site, workspace: Path, reachable: Path
) -> None:
    home = folder_of_his(workspace, "home-of-dockers-user")
    words: list[str | Path] = [*AS_STRANGER, "env", "-i", f"HOME={home}", "PATH=/usr/bin:/bin"]
    words += [reachable / "gpuhook", "install", "--engine=docker"]
    with pretender(site.folder / "dockerd", f"--config-file={site.config}", way=()):
        done = run(words).ok()
    assert f"wrote {home}/.config/docker/daemon.json" in done.stdout
    assert (
        "The running Docker is root's, and this changed only your rootless Docker: for "
        "root's Docker, run gpuhook install --engine docker as root"
    ) in done.stderr


def test_a_daemon_of_root_gets_the_reload_signal(site: Site) -> None:
    words = [f"--config-file={site.config}"]
    with pretender(site.folder / "dockerd", *words, way=()) as daemon:
        done = site.gpuhook("install", "--reload").ok()
        assert f"docker: process {daemon.pid} has reloaded " in done.stdout
        assert daemon.wait(30) == -signal.SIGHUP


def test_files_of_a_daemon_in_a_chroot_are_found_below_its_root(
    site: Site, roots: dict[str, Path]
) -> None:
    """/usr/bin/gpu-py or its socket in the chroot isn't our file of the same name."""
    root, upper, work = (site.folder / name for name in ("root", "upper", "work"))
    for folder in (root, upper, work):
        folder.mkdir()
    layers = f"lowerdir={roots['debian']},upperdir={upper},workdir={work}"
    run(["mount", "-t", "overlay", "-o", layers, "overlay", root]).ok()
    try:
        shutil.copy("/bin/sh", root / "dockerd-inside")
        with process(["chroot", root, "/dockerd-inside", "-c", WAIT]) as inside:
            [found] = host_processes.running("dockerd-inside")
            assert (found.pid, found.root) == (inside.pid, f"/proc/{inside.pid}/root")
    finally:
        run(["umount", root]).ok()


# Listen at the socket that the argument names, and send data to each client until it disconnects.
TALKS_FOR_EVER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    try:
        connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
        while True:
            connection.sendall(b" " * 65536)
    except OSError:
        pass
"""


@pytest.mark.protects(
    "docker-peer", "other users: answers are accepted only from a Docker daemon of root"
)
def test_another_user_on_the_socket_of_roots_docker_is_reported(
    site: Site, driver: Driver, configs: dict[str, Path]
) -> None:
    """gpuhook only learns who owns the server, and reads nothing more from it."""
    path = folder_of_his(site.folder, "his") / "docker.sock"
    words = [f"--config-file={site.config}", f"--host=unix://{path}"]
    with (
        process([*AS_STRANGER, PYTHON, "-I", "-S", "-c", TALKS_FOR_EVER, path]),
        pretender(site.folder / "dockerd", *words, way=()),
    ):
        done = site.doctor(configs["runc"])
    assert f"its socket belongs to user {UID}" in done.stdout


# Locks --------------------------------------------------------------------------------------


def test_an_old_lock_of_another_user_does_not_block_install(site: Site) -> None:
    """The state folder was open to all users when that lock was taken."""
    folder = site.folder / "state/engines"
    folder.mkdir(parents=True)
    with process([*AS_STRANGER, "flock", folder, "sh", "-c", WAIT]):
        site.gpuhook("install").ok()
        run([*AS_STRANGER, "ls", folder]).failed()
        run([*AS_STRANGER, "flock", "-n", folder, "true"]).failed()
        site.gpuhook("uninstall").ok()
    assert site.config.read_text() == OLD


def test_a_hung_installation_is_named_by_its_process(site: Site) -> None:
    folder = site.folder / "state/engines"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "lock").write_text("4711")
    with process(["flock", folder / "lock", "sh", "-c", WAIT]):
        done = site.gpuhook("uninstall").failed()
    assert "The process 4711 has been changing the engines' files for more than 20" in done.stderr


def test_locks_of_other_users_do_not_block_the_inventory(site: Site, driver: Driver) -> None:
    """Every user may read the inventory, and so lock that file; gpuhook locks another file."""
    config = write_config(site.folder / "config", driver.root, ["runc"])
    refresh: list[str | Path] = [site.command, "refresh", "--config", config]
    run(refresh).ok()
    state = site.folder / "config/state"
    [lock] = state.glob("inventory-nvidia-*.lock")
    [saved] = state.glob("inventory-nvidia-????????????????")
    run([*AS_STRANGER, "flock", "-n", lock, "true"]).failed()
    assert driver.gpus[0].uuid in run([*AS_STRANGER, "cat", saved]).ok().stdout
    before = saved.stat().st_ino
    with (
        process([*AS_STRANGER, "flock", state, "sh", "-c", WAIT]),
        process([*AS_STRANGER, "flock", saved, "sh", "-c", WAIT]),
    ):
        run(refresh, timeout=LIMIT_S).ok()
    assert saved.stat().st_ino != before


# Links --------------------------------------------------------------------------------------


@pytest.mark.protects(
    "owners-identity", "other users: root doesn't follow their links", instead="if True:"
)
@pytest.mark.parametrize("link", ["daemon.json", "docker"])
def test_a_link_in_another_users_home_is_refused(site: Site, link: str) -> None:
    """Root may install for a user whose folders are links to root's folders."""
    home = folder_of_his(site.folder, "home")
    named = home / "docker/daemon.json"
    if link == "docker":
        (home / "docker").symlink_to(site.folder)
    else:
        os.chown(folder_of_his(home, "docker"), UID, UID)
        named.symlink_to(site.config)
    for verb in (["install", "--engine=docker"], ["runtime", "configure", "--runtime=docker"]):
        words = [f"--config={named}", f"--state-dir={site.folder}/state"]
        done = run([site.command, *verb, *words], timeout=LIMIT_S).failed()
        assert f"{home}, which belongs to user {UID}" in done.stderr
        assert "Run this as that user" in done.stderr
    assert site.config.read_text() == OLD
    assert not (site.folder / "state").exists()


@pytest.mark.protects(
    "owners-identity", "other users: root doesn't follow their links", instead="if True:"
)
@pytest.mark.parametrize("protected", [False, True])
def test_another_users_link_in_a_world_writable_folder_is_refused(
    site: Site, protected: bool
) -> None:
    """The kernel may also forbid the access (fs.protected_symlinks, systemd's default)."""
    everybody = site.folder / "tmp"
    everybody.mkdir()
    everybody.chmod(0o1777)
    link = everybody / "daemon.json"
    run([*AS_STRANGER, "ln", "-s", site.config, link]).ok()
    words = ["--engine=docker", f"--config={link}", f"--state-dir={site.folder}/state"]
    refused = ("strace", "-f", "-qq", "-o", "/dev/null", "-P", str(link), "-e")
    kernel = (*refused, "inject=openat:error=EACCES") if protected else ()
    done = run([*kernel, site.command, "install", *words]).failed()
    assert f"the link {link}, which user {UID} made" in done.stderr
    documents = run([*kernel, site.command, "cdi", "validate", link])
    if protected:
        assert "it is a link in a folder where other users may write" in documents.failed().stderr
    link.unlink()
    link.symlink_to(site.config)
    run([site.command, "install", *words]).ok()
    assert "gpu-py" in site.config.read_text()


@pytest.mark.protects(
    "owners-identity", "other users: root doesn't follow their links", instead="if True:"
)
def test_a_link_out_of_another_users_home_is_refused_for_other_files(site: Site) -> None:
    """This covers the links with NVIDIA's names, and gpuhook's own configuration."""
    home = folder_of_his(site.folder, "home")
    (home / "bin").symlink_to(site.folder)
    done = site.gpuhook("install", "--gpus", f"--bin-dir={home}/bin").failed()
    assert f"{home}, which belongs to user {UID}" in done.stderr
    words = ["config", "set", f"--config={home}/bin/new/config.toml", "disable-require"]
    done = run([site.command, *words]).failed()
    assert f"{home}, which belongs to user {UID}" in done.stderr
    assert sorted(path.name for path in site.folder.iterdir()) == ["daemon.json", "home"]
    assert site.config.read_text() == OLD


@pytest.mark.protects(
    "owners-identity", "other users: root doesn't follow their links", instead="if True:"
)
def test_a_home_that_later_belongs_to_another_user_is_refused(site: Site) -> None:
    """The path that uninstall would write or remove may now lead to a file of root."""
    home = site.folder / "home"
    named = home / "docker/daemon.json"
    words = ["--engine=docker", f"--config={named}", f"--state-dir={site.folder}/state"]
    run([site.command, "install", *words]).ok()
    site.config.write_bytes(named.read_bytes())
    shutil.rmtree(home / "docker")
    (home / "docker").symlink_to(site.folder)
    os.chown(home, UID, UID)
    done = run([site.command, "uninstall", *words]).failed()
    assert f"belongs to user {UID}" in done.stderr
    assert "gpu-py" in site.config.read_text()


@pytest.mark.protects(
    "owners-identity", "other users: root doesn't follow their links", instead="if True:"
)
def test_a_state_folder_of_another_user_is_refused(site: Site) -> None:
    """The records in that folder would decide which files root writes."""
    home = folder_of_his(site.folder, "home")
    site.gpuhook("install").ok()
    shutil.copytree(site.folder / "state", home / "state")
    installed = site.config.read_bytes()
    words = ["--engine=docker", f"--config={site.config}", f"--state-dir={home}/state"]
    for verb in (["uninstall"], ["uninstall", "--dry-run"], ["install"]):
        done = run([site.command, *verb, *words]).failed()
        assert f"belongs to user {UID}" in done.stderr
    assert site.config.read_bytes() == installed


def test_root_commands_ignore_a_home_folder_in_the_environment(site: Site) -> None:
    """sudo may keep a user's variables, so root's commands ignore every such variable."""
    home = folder_of_his(site.folder, "home")
    env = {"HOME": str(home), "XDG_CONFIG_HOME": f"{home}/.config"}
    env |= {"XDG_STATE_HOME": f"{home}/.local/state", "XDG_RUNTIME_DIR": f"{home}/run"}
    words = ["--engine=docker", "--engine=podman", "--gpus", "--hook=prestart"]
    for verb in (["install", *words], ["uninstall"]):
        done = run([site.command, *verb, "--dry-run"], env=env)
        assert str(home) not in done.stdout + done.stderr
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_report_path_that_is_another_users_link_or_pipe_is_refused(
    site: Site, driver: Driver, configs: dict[str, Path], kind: str
) -> None:
    his = folder_of_his(site.folder, "his") / "report.tar.gz"
    if kind == "pipe":
        pipe_of_his(his)
    else:
        his.symlink_to(site.config)
    done = site.doctor(configs["runc"], "--report", his)
    assert f"The report {his} can't be written" in done.stderr
    assert site.config.read_text() == OLD
