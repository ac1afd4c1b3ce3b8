"""The prefork server for the next container: the callers that it serves, and its resources."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.bundles import CGROUP_PARENT
from harness.commands import wait_until
from harness.driver import Driver, lines_of_nvidia_smi, simulate
from harness.engines import Engine
from harness.images import image
from harness.inside import look, seen
from harness.installation import copied
from harness.namespaces import Namespace
from harness.podman import Podman
from harness.prefork import (
    CHANGES,
    NAMES,
    ONE,
    RUNTIMES,
    SERVED,
    Site,
    is_running,
    open_files,
    steps,
)

MEMORY = 25 << 10  # KiB for the waiting processes, with shared pages counted once


@RUNTIMES
def test_next_container_is_served(site: Site) -> None:
    site.stand()
    assert not site.served
    before = site.standing
    for _ in range(3):
        site.works()
        assert site.served
    wait_until(site.is_standing, "it is as before")
    assert site.standing == before


@RUNTIMES
def test_a_container_run_to_its_end_is_served(site: Site) -> None:
    """No server is left by this start, because crun waits for all processes started below it."""
    env = {"GPUHOOK_CONFIG": str(site.config)}
    before = time.monotonic()
    site.sees_its_gpus(site.bundle.run(site.installation.runtime, env))
    assert time.monotonic() - before < 50.0  # less than the minute that an idle server waits
    assert not site.folder.exists()
    site.stand()
    site.bundle.config.write_bytes(site.plain)
    site.sees_its_gpus(site.bundle.run(site.installation.runtime, env))
    assert site.served


@ONE
def test_container_without_gpus_is_not_edited(site: Site) -> None:
    """The request names no GPU, or the container has no request at all."""
    site.stand()
    before = site.standing
    request = b"NVIDIA_VISIBLE_DEVICES=0,2"
    plain = site.plain
    for instead in (b"NVIDIA_VISIBLE_DEVICES=void", b"SOMETHING_ELSE=0,2"):
        site.plain = plain.replace(request, instead)
        assert seen(site.run()).gpu_minors == set()
        assert site.bundle.config.read_bytes() == site.plain
    wait_until(site.is_standing, "it still stands")
    assert site.standing == before


@ONE
def test_a_bad_request_is_refused_with_the_usual_message(site: Site) -> None:
    plain = site.plain
    site.plain = plain.replace(b"VISIBLE_DEVICES=0,2", b"VISIBLE_DEVICES=0,99")
    before = site.run().failed()
    site.plain = plain
    site.stand()
    site.plain = plain.replace(b"VISIBLE_DEVICES=0,2", b"VISIBLE_DEVICES=0,99")
    after = site.run().failed()
    assert after.stdout == before.stdout
    assert "99" in after.stdout
    assert site.bundle.config.read_bytes() == site.plain


@ONE
@pytest.mark.parametrize("ids", [(), ("one", "two")], ids=["no id", "two ids"])
def test_a_command_line_that_the_runtime_refuses_edits_no_config_json(
    site: Site, ids: tuple[str, ...]
) -> None:
    site.stand()
    site.bundle.config.write_bytes(site.plain)
    env = {"GPUHOOK_CONFIG": str(site.config)}
    words: list[str | Path] = ["create", "--bundle", site.bundle.path, *ids]
    site.bundle.call(site.installation.runtime, *words, env=env).failed()
    assert site.bundle.config.read_bytes() == site.plain


@pytest.mark.parametrize("line", ["standby = 0", "helper = false"])
@ONE
def test_no_prefork_server_where_it_is_switched_off(site: Site, line: str) -> None:
    site.configure(line)
    site.works()
    helper = site.helper
    wait_until(lambda: not is_running(helper), "the helper has ended")
    assert not site.folder.exists()


@ONE
def test_the_hook_alone_leaves_no_server(site: Site, low_level: tuple[str, Namespace]) -> None:
    site.bundle.prestart(site.installation.hook, site.config)
    assert seen(site.bundle.run(low_level[0])).gpu_minors
    assert not site.folder.exists()


@ONE
def test_an_idle_prefork_server_ends_and_leaves_nothing(site: Site) -> None:
    site.configure("standby = 1.5")
    site.stand()
    wait_until(site.is_gone, "nothing is left")
    site.stand()


# What it holds ------------------------------------------------------------------------------


@ONE
def test_the_runtime_runs_with_umask_022_for_gpu_containers_only(
    site: Site, tmp_path: Path
) -> None:
    """The engine's own umask doesn't matter for a container that gets GPUs."""
    runtime = tmp_path / "runc"
    told = tmp_path / "umask"
    runtime.write_text(f'#!/bin/sh\n[ "$1" != create ] || umask >{told}\nexec runc "$@"\n')
    runtime.chmod(0o755)
    site.config.write_text(site.config.read_text().replace('["runc"]', f'["{runtime}"]'))
    site.settle()
    closed = ("sh", "-c", 'umask 077; exec "$@"', "sh")
    site.stand()
    for served in (True, False):
        if not served:
            site.configure("standby = 0")
        site.works(*closed)
        assert site.served == served
        assert told.read_text() == "0022\n"
    site.plain = site.plain.replace(b"NVIDIA_VISIBLE_DEVICES=0,2", b"NVIDIA_VISIBLE_DEVICES=")
    site.run(*closed).ok()
    assert told.read_text() == "0077\n"


@RUNTIMES
def test_prefork_server_keeps_nothing_of_its_caller(site: Site, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        site.works("env", "LD_DEBUG_OUTPUT=/x", "PYTHONHOME=/x", "umask-of-the-test=1")
        wait_until(site.is_standing, "a prefork server runs")
    finally:
        os.close(write_end)
    for pid in site.processes:
        assert all(allowed(file, site, pid) for file in open_files(pid)), open_files(pid)
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {item.partition(b"=")[0] for item in environ if item}
        assert names <= {b"PATH", b"GPUHOOK_CONFIG"}
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "nvidia" not in maps.replace(str(site.installation.bin.parent), "")
    assert os.read(read_end, 1) == b"", "somebody else still holds the pipe"
    os.close(read_end)


# Set attributes that all child processes inherit, and that would harm containers of other users.
LENDS = """
import ctypes, os, signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGTERM])
ctypes.CDLL(None).prctl(29, 10**9, 0, 0, 0)  # PR_SET_TIMERSLACK
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.protects(
    "ordinary",
    "the prefork server doesn't inherit its caller's priority, limits and signals",
    instead="pass",
)
@ONE
def test_prefork_server_has_default_priority_limits_and_signals(site: Site) -> None:
    """The caller's settings must not make other users' containers start more slowly, or fail."""
    limits = ("--fsize=200000000:", "--cpu=100:")
    lends = (sys.executable, "-c", LENDS, "setarch", "-R", "nice", "-n", "19", "prlimit", *limits)
    site.stand(*lends)
    files = ("timerslack_ns", "personality", "limits", "status", "stat")
    for pid in site.processes:
        read = {name: Path(f"/proc/{pid}/{name}").read_text() for name in files}
        status = dict(line.split(":\t", 1) for line in read["status"].splitlines())
        assert read["timerslack_ns"].strip() == "50000"
        assert int(read["personality"], 16) == 0
        limited = {line[:25].strip(): line[25:].split()[0] for line in read["limits"].splitlines()}
        assert limited["Max file size"] == limited["Max cpu time"] == "unlimited"
        assert int(status["SigBlk"], 16) == 0
        assert not int(status["SigIgn"], 16) & 1 << (signal.SIGUSR1 - 1)
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(1)
        assert os.sched_getscheduler(pid) == os.SCHED_OTHER
        assert os.getpriority(os.PRIO_PROCESS, pid) == 0


@pytest.mark.protects(
    "own-machine",
    "the machine's architecture is detected regardless of the caller's personality(2)",
    instead="return machine",
    only="32_bits and runc-host",
)
@RUNTIMES
def test_the_personality_of_32_bits_does_not_hide_the_gpus(site: Site) -> None:
    """Libraries go where the container's loader finds them, whichever caller started the server."""
    site.bundle.config.write_bytes(site.plain)
    site.bundle.command("nvidia-smi", "-L")
    site.plain = site.bundle.config.read_bytes()
    gpus = lines_of_nvidia_smi(site.driver.chosen(0, 2))
    assert site.run("setarch", "linux32").ok().stdout.splitlines() == gpus


def allowed(target: str, site: Site, pid: int) -> bool:
    """Return whether an open file is one that the prefork server needs."""
    own = str(site.folder / str(pid))
    launcher = str(site.installation.runtime)
    ours = (str(site.folder), own, launcher, "/dev/null", "anon_inode:[pidfd]")
    return target.startswith(("pipe:", "/memfd:", f"{site.folder}/.lock-")) or target in ours


@pytest.mark.protects(
    "outermost-cgroups",
    "the prefork server leaves its caller's cgroups",
    instead='for path in ("/proc/self/oom_score_adj", *()):',
    only="no_cgroup and runc-host",
)
def test_prefork_server_is_in_no_cgroup_of_its_caller(site: Site) -> None:
    """Otherwise a scope or a pod could not end before the server."""
    folder = "/sys/fs/cgroup" + ("" if site.bundle.namespace.cgroups == "v2" else "/devices")
    name = f"{CGROUP_PARENT}-standby"
    group = f"{folder}{name}"
    enter = f'mkdir {group} && echo $$ >{group}/cgroup.procs && exec "$@"'
    try:
        site.works("sh", "-c", enter, "sh")
        wait_until(site.is_standing, "a prefork server runs")
        site.bundle.call("cat", f"{group}/cgroup.procs").ok()
    finally:
        done = site.bundle.call("rmdir", group)
    assert done.status == 0, done
    for pid in site.processes:
        assert name not in Path(f"/proc/{pid}/cgroup").read_text()


@ONE
def test_prefork_server_memory_stays_below_its_limit(site: Site) -> None:
    site.stand()
    site.works()
    wait_until(site.is_standing, "a prefork server runs")
    pages = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in site.processes]
    sizes = [int(found[1]) for text in pages if (found := re.search(r"\nPss: +(\d+) kB", text))]
    assert len(sizes) == 3
    assert sum(sizes) < MEMORY


@ONE
def test_a_hook_worker_imports_nothing(own: Site, tmp_path: Path) -> None:
    """Everything that any container may need is already imported."""

    def is_served() -> bool:
        own.run().ok()
        return own.served

    own.driver = simulate(own.installation, own.driver.root, *CHANGES["MIG"])
    own.plain = own.plain.replace(b"DEVICES=0,2", b"DEVICES=0,1:0")
    own.run().ok()
    wait_until(own.is_standing, "a prefork server runs")
    log = tmp_path / "log"
    plain, before = own.plain, steps(own.server)
    words = ["strace", "-f", "-e", "trace=openat,open", "-o", str(log)]
    words += [f"--attach={pid}" for pid in (own.server, own.ahead)]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as tracing:
        assert tracing.stderr is not None
        for _ in range(2):
            tracing.stderr.readline()  # strace prints a line after it has attached to a process
        for name in ("compute,utility", "all", "graphics,display,ngx"):
            more = f'"NVIDIA_DRIVER_CAPABILITIES={name}","NVIDIA_VISIBLE_DEVICES=0,1:0"'.encode()
            own.plain = plain.replace(b'"NVIDIA_VISIBLE_DEVICES=0,1:0"', more)
            wait_until(is_served, "a traced child answers in its time")
        tracing.terminate()
    assert steps(own.server) > before
    opened = re.findall(r'"([^"]+\.(?:py|pyc|so))"', log.read_text())
    ours = str(own.installation.bin.parent)
    assert [path for path in opened if path.startswith(ours) or "/lib/python3" in path] == []


# Engines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["docker", "containerd_runc", "containerd_crun"], indirect=True)
def test_containers_of_engines_are_served(engine: Engine, driver: Driver) -> None:
    """No container waits for the prefork server, and the server keeps no container's root."""

    def start() -> None:
        env = ["NVIDIA_VISIBLE_DEVICES=0,2"]
        inside = seen(engine.run(image("debian"), *look(driver.minors), env=env))
        assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}

    def is_served() -> bool:
        before = servers_of(engine)
        begun = time.monotonic()
        start()
        in_time = time.monotonic() - begun < 30.0
        return in_time and any(
            count > before.get(pid, count) for pid, count in servers_of(engine).items()
        )

    start()
    wait_until(is_served, "a container is served")


def test_no_prefork_server_is_left_below_conmon(podman_runtime: Podman, driver: Driver) -> None:
    """conmon waits for all processes of a container's start before it cleans up."""
    env = ["NVIDIA_VISIBLE_DEVICES=0,2"]
    inside = seen(podman_runtime.run(image("debian"), *look(driver.minors), env=env))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
    folder = str(podman_runtime.folder)
    wait_until(lambda: conmons(folder) == [], "conmon has ended")


def conmons(folder: str) -> list[str]:
    """Return the command lines of conmon below a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[0].endswith("conmon") and any(folder in word for word in words):
            found.append(" ".join(words))
    return found


def servers_of(engine: Engine) -> dict[int, int]:
    """Return the progress of each prefork process in an engine's mount namespace."""
    namespace = os.stat(f"/proc/{engine.pid or os.getpid()}/ns/mnt").st_ino
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            named = (entry / "comm").read_bytes() in NAMES
            if named and os.stat(entry / "ns/mnt").st_ino == namespace:
                found[int(entry.name)] = steps(int(entry.name))
        except OSError:
            continue
    return found


# Several at once ----------------------------------------------------------------------------


@pytest.mark.protects(
    "own-mount-namespace",
    "the launcher uses only a prefork server in its own mount namespace",
    also=("also-namespaces", ""),
)
@ONE
def test_each_mount_namespace_has_its_own_prefork_server(site: Site) -> None:
    """Neither server serves callers in the other namespace."""
    site.stand()
    site.works("unshare", "-m", "--propagation", "unchanged")
    assert not site.served
    wait_until(lambda: len(site.ready) == 2, "another one stands")
    site.works()
    assert site.served


@pytest.mark.protects(
    "also-namespaces", "the prefork server serves only launchers with its own root and namespaces"
)
@ONE
def test_a_caller_in_another_root_is_not_served(site: Site, tmp_path: Path) -> None:
    """The caller's paths may lead to other files, so other containers could be edited."""
    root = tmp_path / "root"
    root.mkdir()
    site.stand()
    subprocess.run(["mount", "--rbind", "--make-rprivate", "/", root], check=True)
    try:
        site.run("chroot", root)  # low-level runtimes refuse to leave a chroot
        assert site.helper
        assert not site.served
        site.works()
        assert site.served
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)


@ONE
def test_each_configuration_has_its_own_prefork_server(
    site: Site, driver: Driver, tmp_path: Path
) -> None:
    site.stand()
    first = site.standing
    runtime = re.search(r'runtimes = \["(.*)"\]', site.config.read_text())
    assert runtime is not None
    other = Site(site.bundle, site.installation, driver, runtime[1], tmp_path / "other")
    try:
        other.stand()
        assert not other.served
        other.works()
        assert other.served
        assert site.standing == first
    finally:
        other.clear()


@pytest.mark.protects(
    "own-installation", "the launcher uses only a prefork server of its own installation"
)
@ONE
def test_each_installation_has_its_own_prefork_server(site: Site, tmp_path: Path) -> None:
    """The proof includes the launcher, so it doesn't ask another launcher's server."""
    site.stand()
    other = copied(site.installation, tmp_path / "other").runtime

    def other_stands() -> bool:
        site.works(runtime=other)
        return site.served

    site.works(runtime=other)
    assert not site.served
    wait_until(other_stands, "the other's stands beside it", interval=0.3)
    assert len(site.ready) == 2
    site.works()
    assert site.served


MANY = 30
SHAM = """\
#!/bin/sh
case "$*" in */many-*) exit 0 ;; esac
exec {runtime} "$@"
"""
AT_ONCE = """\
import subprocess, sys
calls = [subprocess.Popen([*sys.argv[1:4], folder, "x"]) for folder in sys.argv[4:]]
sys.exit(sum(call.wait() != 0 for call in calls))
"""


@ONE
def test_concurrent_starts_are_served_by_different_workers(
    site: Site, driver: Driver, low_level: tuple[str, Namespace], tmp_path: Path
) -> None:
    """One worker never serves two launchers.

    The low-level runtime here creates none of the many containers.
    """
    sham = tmp_path / "sham"
    sham.write_text(SHAM.format(runtime=low_level[0]))
    sham.chmod(0o755)
    crowd = Site(site.bundle, site.installation, driver, str(sham), tmp_path / "crowd")
    folders = [site.bundle.path / f"many-{number}" for number in range(MANY)]
    for folder in folders:
        folder.mkdir()
        text = site.plain.replace(b'"rootfs"', f'"{site.bundle.root}"'.encode())
        (folder / "config.json").write_bytes(text)
    try:
        crowd.stand()
        words = (site.installation.runtime, "create", "--bundle")
        env = {"GPUHOOK_CONFIG": str(crowd.config)}
        crowd.bundle.call(sys.executable, "-c", AT_ONCE, *words, *folders, env=env).ok()
    finally:
        crowd.clear()
    texts = [(folder / "config.json").read_text() for folder in folders]
    helpers = [found[1] for text in texts if (found := re.search(r'"--helper", *"(\d+)"', text))]
    assert len(set(helpers)) == MANY
    served = [text for text in texts if re.search(SERVED, text)]
    assert len(served) >= MANY // 2
