"""The process that stands ready for the next container: used where it may be, gone where not."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import pytest
from harness.bundles import Bundle
from harness.commands import Result, wait_until
from harness.driver import MINORS, Driver, simulate
from harness.engines import Engine
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace, runtime_layouts
from harness.podman import Podman

from gpuhook.start.standby import ANSWER, ASKED, MARK, SEAT_COUNT

LAUNCHERS = Path("/run/gpuhook/launcher")
NAME = "gpuhook-standby"
MEMORY = 25 << 10  # KiB of the processes that stand, shared pages counted once
KILLS = int(os.environ.get("GPUHOOK_TEST_KILLS", "30"))
OPTIONS = "[gpuhook]\n"
# For what is the same whatever the low-level runtime and the layout of its cgroups are.
ONE = pytest.mark.parametrize("low_level", runtime_layouts()[:1], ids="-".join, indirect=True)
SERVED = rf'"--helper", *"\d+", *"{ASKED}", *"{ANSWER}", *"{MARK}"'


class Site:
    """A configuration with a standing process of its own, and containers that use it."""

    def __init__(
        self, bundle: Bundle, installation: Installation, driver: Driver, runtime: str, folder: Path
    ) -> None:
        self.bundle = bundle
        self.installation = installation
        self.driver = driver
        self.config = write_config(folder / "etc", driver.root, [runtime])
        (self.config.parent / "state").mkdir()
        self.folder = Path(f"{LAUNCHERS}{self.config}/ready")
        self.settle()
        bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
        bundle.command(*look(driver.minors))
        self.plain = bundle.config.read_bytes()

    def settle(self) -> None:
        """Let the configuration be as old as one is that nobody has just written."""
        past = time.time() - 10
        for place in (self.config, self.config.parent):
            os.utime(place, (past, past))

    def configure(self, line: str) -> None:
        """Add a line to our section of the configuration."""
        self.config.write_text(self.config.read_text().replace(OPTIONS, f"{OPTIONS}{line}\n"))
        self.settle()

    def run(self, *prefix: str | Path, runtime: Path | None = None) -> Result:
        """Lead a container through its life as an engine does, with a new config.json."""
        self.bundle.config.write_bytes(self.plain)
        env = {"GPUHOOK_CONFIG": str(self.config)}
        words: list[str | Path] = [runtime or self.installation.runtime]
        create = [*prefix, *words, "create", "--bundle", self.bundle.path, self.bundle.name]
        return self.bundle.live(create, words, self.bundle.name, env)

    def works(self, *prefix: str | Path, runtime: Path | None = None) -> None:
        """Start a container and see that it has its GPUs and no others."""
        self.sees_its_gpus(self.run(*prefix, runtime=runtime))

    def sees_its_gpus(self, result: Result) -> None:
        inside = seen(result)
        given = {gpu.minor for gpu in self.driver.chosen(0, 2)}
        assert inside.gpu_minors == given
        opened = {minor for minor, what in inside.by_hand.items() if what != "EPERM"}
        assert opened == given

    @property
    def helper(self) -> int:
        """The helper of the last container; 0 where it had none."""
        found = re.search(r'"--helper", *"(\d+)"', self.bundle.config.read_text())
        return int(found[1]) if found else 0

    @property
    def served(self) -> bool:
        """Whether the last container was served by the process that stands ready."""
        return re.search(SERVED, self.bundle.config.read_text()) is not None

    @property
    def ready(self) -> set[int]:
        """The processes whose names are in the folder."""
        return {int(path.name) for path in self.folder.glob("[0-9]*")}

    @property
    def server(self) -> int:
        """The process that stands ready."""
        [pid] = self.ready
        return pid

    @property
    def processes(self) -> set[int]:
        """That process, the one that watches it, and children that serve a container."""
        mark = f"\0GPUHOOK_CONFIG={self.config}\0".encode()
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "comm").read_text() == f"{NAME}\n":
                    found |= {int(entry.name)} & pids_with(entry / "environ", mark)
            except OSError:
                continue
        return {pid for pid in found if is_running(pid)}

    def is_standing(self) -> bool:
        """Tell whether one process stands ready, and nothing else is left of what stood."""
        ready = self.ready
        return len(ready) == 1 and self.processes == ready | {parent_of(pid) for pid in ready}

    def stand(self) -> None:
        """Start a container, and wait until a process stands ready for the next."""
        self.works()
        wait_until(self.is_standing, "a process stands ready")

    def stand_again(self, before: Container[int]) -> None:
        """Start containers until a process stands ready that is none of those.

        The first may still find the lock of the old one, or a file so young that it may have
        changed since it was read.
        """

        def stands() -> bool:
            if self.is_standing() and not any(pid in before for pid in self.processes):
                return True
            self.works()
            return False

        wait_until(stands, "another stands", interval=0.3)

    def is_gone(self) -> bool:
        """Tell whether nothing is left of what stood, no process and no name."""
        return not self.processes and not list(self.folder.iterdir())

    def clear(self) -> None:
        """End everything."""
        while left := self.processes:
            for pid in left:
                os.kill(pid, signal.SIGKILL)


def pids_with(environ: Path, mark: bytes) -> set[int]:
    return {int(environ.parent.name)} if mark in b"\0" + environ.read_bytes() else set()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def site(
    bundle: Bundle,
    installation: Installation,
    driver: Driver,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> Iterator[Site]:
    made = Site(bundle, installation, driver, low_level[0], tmp_path)
    yield made
    made.clear()


def test_next_container_is_served(site: Site) -> None:
    site.stand()
    assert not site.served
    before = site.processes
    for _ in range(3):
        site.works()
        assert site.served
    wait_until(site.is_standing, "it is as before")
    assert site.processes == before


def test_container_that_is_run_to_its_end_is_served_too(site: Site) -> None:
    """But leaves nobody standing: crun waits for all that was started below it."""
    env = {"GPUHOOK_CONFIG": str(site.config)}
    before = time.monotonic()
    site.sees_its_gpus(site.bundle.run(site.installation.runtime, env))
    assert time.monotonic() - before < 50.0  # and not the minute that one stands without work
    assert not site.folder.exists()
    site.stand()
    site.bundle.config.write_bytes(site.plain)
    site.sees_its_gpus(site.bundle.run(site.installation.runtime, env))
    assert site.served


@ONE
def test_container_without_gpus_is_not_edited(site: Site) -> None:
    """Words of a request that are none, and no words at all."""
    site.stand()
    before = site.processes
    request = b"NVIDIA_VISIBLE_DEVICES=0,2"
    plain = site.plain
    for instead in (b"NVIDIA_VISIBLE_DEVICES=void", b"SOMETHING_ELSE=0,2"):
        site.plain = plain.replace(request, instead)
        assert seen(site.run()).gpu_minors == set()
        assert site.bundle.config.read_bytes() == site.plain
    wait_until(site.is_standing, "it still stands")
    assert site.processes == before


@ONE
def test_bad_request_is_refused_as_ever(site: Site) -> None:
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


@pytest.mark.parametrize("line", ["standby = 0", "helper = false"])
@ONE
def test_nobody_stands_where_nobody_shall(site: Site, line: str) -> None:
    site.configure(line)
    site.works()
    helper = site.helper
    wait_until(lambda: not is_running(helper), "the helper has ended")
    assert not site.folder.exists()


@ONE
def test_hook_alone_leaves_nobody(site: Site, low_level: tuple[str, Namespace]) -> None:
    words = ["gpuhook-prestart", "--config", str(site.config), "prestart"]
    hook = {"path": str(site.installation.hook), "args": words}
    site.bundle.change(lambda spec: spec.update(hooks={"prestart": [hook]}))
    assert seen(site.bundle.run(low_level[0])).gpu_minors
    assert not site.folder.exists()


@ONE
def test_nothing_is_left_after_the_idle_time(site: Site) -> None:
    site.configure("standby = 1.5")
    site.stand()
    wait_until(site.is_gone, "nothing is left")
    site.stand()


# What it holds ------------------------------------------------------------------------------


def test_it_keeps_nothing_of_its_caller(site: Site, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        site.works("env", "LD_DEBUG_OUTPUT=/x", "PYTHONHOME=/x", "umask-of-the-test=1")
        wait_until(site.is_standing, "a process stands ready")
    finally:
        os.close(write_end)
    for pid in site.processes:
        assert all(allowed(fd, site) for fd in fds(pid)), fds(pid)
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {item.partition(b"=")[0] for item in environ if item}
        assert names <= {b"PATH", b"PWD", b"GPUHOOK_CONFIG"}
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "nvidia" not in maps.replace(str(site.installation.bin.parent), "")
    assert os.read(read_end, 1) == b"", "somebody else still holds the pipe"
    os.close(read_end)


def fds(pid: int) -> list[str]:
    return [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]


def allowed(target: str, site: Site) -> bool:
    """Tell whether an open file is one that the standing process needs."""
    ours = (str(site.folder), str(site.installation.runtime), "/dev/null", "anon_inode:[pidfd]")
    return target.startswith(("pipe:", "/memfd:", f"{site.folder}/.lock-")) or target in ours


def test_it_is_in_no_cgroup_of_its_caller(site: Site) -> None:
    """A scope or a pod could not end before it."""
    folder = "/sys/fs/cgroup" + ("" if site.bundle.namespace.cgroups == "v2" else "/devices")
    group = f"{folder}/gpuhook-standby-{os.getpid()}"
    enter = f'mkdir {group} && echo $$ >{group}/cgroup.procs && exec "$@"'
    try:
        site.works("sh", "-c", enter, "sh")
        wait_until(site.is_standing, "a process stands ready")
        site.bundle.call("cat", f"{group}/cgroup.procs").ok()
    finally:
        done = site.bundle.call("rmdir", group)
    assert done.status == 0, done
    for pid in site.processes:
        assert f"gpuhook-standby-{os.getpid()}" not in Path(f"/proc/{pid}/cgroup").read_text()


@ONE
def test_its_memory(site: Site) -> None:
    site.stand()
    site.works()
    wait_until(site.is_standing, "a process stands ready")
    pages = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in site.processes]
    sizes = [int(found[1]) for text in pages if (found := re.search(r"\nPss: +(\d+) kB", text))]
    assert len(sizes) == 2
    assert sum(sizes) < MEMORY


# Processes that end, hang, or aren't ours ---------------------------------------------------


@pytest.mark.parametrize("which", ["server", "watcher"])
@ONE
def test_killed(site: Site, which: str) -> None:
    site.stand()
    before = site.processes
    os.kill(site.server if which == "server" else parent_of(site.server), signal.SIGKILL)
    wait_until(lambda: not site.processes, "the other one is gone, too")
    site.works()
    site.stand_again(before)


@ONE
def test_stopped_server(site: Site) -> None:
    """It is asked, does not answer, and is killed."""
    site.stand()
    before = site.processes
    os.kill(site.server, signal.SIGSTOP)
    begun = time.monotonic()
    site.works()
    assert time.monotonic() - begun >= 1.5
    assert not site.served
    site.stand_again(before)


@ONE
def test_stopped_watcher(site: Site) -> None:
    site.stand()
    watcher = parent_of(site.server)
    os.kill(watcher, signal.SIGSTOP)
    try:
        site.works()
        assert site.served
    finally:
        os.kill(watcher, signal.SIGCONT)


@ONE
def test_stopped_child(site: Site) -> None:
    """A child that hangs before it has answered is killed, and the container starts."""
    site.stand()
    children = Path(f"/proc/{site.server}/task/{site.server}/children")
    for _ in range(50):
        ended = threading.Event()
        stopping = threading.Thread(target=stop_first, args=(children, ended))
        stopping.start()
        begun = time.monotonic()
        try:
            site.works()
        finally:
            ended.set()
            stopping.join()
        if not site.served:
            assert time.monotonic() - begun >= 1.5
            break
        wait_until(site.is_standing, "that child came too far, and is gone")
    else:
        raise AssertionError("no child could be stopped in time")
    wait_until(site.is_standing, "it stands as before")


def stop_first(children: Path, ended: threading.Event) -> None:
    """Stop the first child that a process has."""
    while not ended.is_set():
        found = children.read_text().split()
        if found:
            os.kill(int(found[0]), signal.SIGSTOP)
            # Where it has answered already, it goes on: what follows is the helper's business.
            if ended.wait(3.0):
                return
            os.kill(int(found[0]), signal.SIGCONT)
            return


@ONE
def test_all_seats_taken(site: Site) -> None:
    """By launchers that have ended before they asked: the ordinary way, until they are freed."""
    site.stand()
    for seat in range(SEAT_COUNT):
        (site.folder / f".{site.server}.{seat}").touch()
    site.works()
    assert not site.served
    wait_until(lambda: not list(site.folder.glob(".[0-9]*")), "the seats are free")
    site.works()
    assert site.served


@ONE
def test_names_of_other_processes(site: Site) -> None:
    """As are left where all was killed, and the numbers are others' now."""
    site.stand()
    site.clear()
    for path in site.folder.iterdir():
        path.unlink()
    for name in (os.getpid(), os.getppid(), 1, 2, 1 << 22):
        (site.folder / str(name)).touch()
    site.works()
    wait_until(site.is_standing, "they are removed")


@ONE
def test_folder_that_others_may_enter_is_not_used(site: Site) -> None:
    site.stand()
    site.clear()
    site.folder.chmod(0o755)
    site.works()
    helper = site.helper
    wait_until(lambda: not is_running(helper), "the helper has ended")
    assert not site.processes


def test_kills_at_any_moment(site: Site) -> None:
    """None is lost but one that was being injected, and that one is refused in a sentence."""
    site.configure("standby = 3")
    site.stand()
    chance = random.Random(4713)  # noqa: S311 - any moment will do
    refused = []
    for _ in range(KILLS):
        results: list[Result] = []
        starting = threading.Thread(target=lambda: results.append(site.run()))  # noqa: B023
        starting.start()
        time.sleep(chance.uniform(0, 0.12))
        victims = sorted(site.processes)
        for pid in chance.sample(victims, k=min(len(victims), chance.choice((1, 1, 2, 9)))):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        starting.join()
        [result] = results
        if result.status == 0:
            site.sees_its_gpus(result)
        else:
            refused.append(result.stdout)
    assert len(refused) <= KILLS // 3
    if refused:  # crun doesn't show what a hook says
        kept = (site.config.parent / "state/errors.log").read_text()
        assert kept.count("The helper was killed. Start the container again.") == len(refused)
    site.works()
    wait_until(site.is_gone, "nothing is left")


# What changes between two starts ------------------------------------------------------------


@pytest.fixture
def own(site: Site, workspace: Path, tmp_path: Path) -> Iterator[Site]:
    """A site with a driver that a test may change."""
    root = workspace / f"driver-{tmp_path.name}"
    text = site.config.read_text()
    minors = ",".join(map(str, MINORS[:4]))
    site.driver = simulate(site.installation, root, "--gpus=4", f"--minors={minors}")
    site.config.write_text(re.sub(r'root = ".*"', f'root = "{root}"', text, count=1))
    site.settle()
    yield site
    site.bundle.call(site.installation.command, "simulate", "--remove", root)


CHANGES = {
    "minors": ["--gpus=4", "--minors=5,4,3,2"],
    "GPUs": ["--gpus=3", "--minors=1,2,3"],
    "driver": ["--gpus=4", "--driver-version=570.86.15"],
    "MIG": ["--gpus=3", "--model=H100", "--mig=1:1g.10gb,1g.10gb"],
}


@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES.keys())
def test_machine_changes(own: Site, options: list[str]) -> None:
    own.stand()
    before = own.processes
    own.driver = simulate(own.installation, own.driver.root, *options)
    own.works()
    assert not own.served
    own.stand_again(before)
    own.works()
    assert own.served


@ONE
def test_driver_is_gone(own: Site) -> None:
    own.stand()
    own.bundle.call(own.installation.command, "simulate", "--remove", own.driver.root).ok()
    assert "Start the driver container" in own.run().failed().stdout
    wait_until(own.is_gone, "nothing is left")


@ONE
def test_configuration_changes(site: Site) -> None:
    site.stand()
    before = site.processes
    site.config.write_text(
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n" + site.config.read_text()
    )
    site.settle()
    assert seen(site.run()).gpu_minors == set()
    wait_until(lambda: not site.processes & before, "the old one is gone")


def touched(path: Path) -> None:
    """Change nothing but when the file was last changed, as another one in its place would."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


FILES: dict[str, Callable[[Installation], Path]] = {
    "package": lambda installed: next(installed.bin.parent.glob("lib/*/*/gpuhook/plan/planner.py")),
    "launcher": lambda installed: installed.runtime,
    "interpreter": lambda installed: Path(os.path.realpath(installed.bin / "python3")),
}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES.keys())
@ONE
def test_our_own_files_change(site: Site, file: Callable[[Installation], Path]) -> None:
    site.stand()
    before = site.processes
    touched(file(site.installation))
    site.works()
    assert not site.served
    site.stand_again(before)


@ONE
def test_state_is_deleted(site: Site) -> None:
    site.stand()
    before = site.processes
    for path in site.folder.iterdir():
        path.unlink()
    site.folder.rmdir()
    site.works()
    site.stand_again(before)


@ONE
def test_child_imports_nothing(own: Site, tmp_path: Path) -> None:
    """Whatever the container asks for: all that it needs is there before."""
    own.driver = simulate(own.installation, own.driver.root, *CHANGES["MIG"])
    own.plain = own.plain.replace(b"DEVICES=0,2", b"DEVICES=0,1:0")
    own.run().ok()
    wait_until(own.is_standing, "a process stands ready")
    log = tmp_path / "log"
    plain, before = own.plain, steps(own.server)
    words = ["strace", "-f", "-p", str(own.server), "-e", "trace=openat,open", "-o", str(log)]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as tracing:
        assert tracing.stderr is not None
        tracing.stderr.readline()  # once it is attached
        for name in ("compute,utility", "all", "graphics,display,ngx"):
            more = f'"NVIDIA_DRIVER_CAPABILITIES={name}","NVIDIA_VISIBLE_DEVICES=0,1:0"'.encode()
            own.plain = plain.replace(b'"NVIDIA_VISIBLE_DEVICES=0,1:0"', more)
            own.run().ok()
            assert own.served
        tracing.terminate()
    assert steps(own.server) > before
    opened = re.findall(r'"([^"]+\.(?:py|pyc|so))"', log.read_text())
    ours = str(own.installation.bin.parent)
    assert [path for path in opened if path.startswith(ours) or "/lib/python3" in path] == []


def steps(server: int) -> int:
    """Return how far a process has come that stands ready; two steps for each question."""
    for fd in Path(f"/proc/{server}/fd").iterdir():
        if os.readlink(fd).startswith("/memfd:"):
            return int((fd.read_text() or "0 idle").split()[0])
    raise AssertionError("it shows no progress")


# Engines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["docker", "containerd_runc", "containerd_crun"], indirect=True)
def test_containers_of_engines_are_served(engine: Engine, driver: Driver) -> None:
    """And none waits for the process that stands ready, nor keeps a container's root for it."""

    def start() -> None:
        env = ["NVIDIA_VISIBLE_DEVICES=0,2"]
        inside = seen(engine.run(image("debian"), *look(driver.minors), env=env))
        assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}

    def is_served() -> bool:
        before = servers_of(engine)
        begun = time.monotonic()
        start()
        assert time.monotonic() - begun < 30.0
        return any(count > before.get(pid, count) for pid, count in servers_of(engine).items())

    start()
    wait_until(is_served, "a container is served")


def test_nobody_stands_below_conmon(podman_runtime: Podman, driver: Driver) -> None:
    """It waits for all that comes out of a container's start, before it tidies up."""
    env = ["NVIDIA_VISIBLE_DEVICES=0,2"]
    inside = seen(podman_runtime.run(image("debian"), *look(driver.minors), env=env))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
    folder = str(podman_runtime.folder)
    wait_until(lambda: conmons(folder) == [], "conmon has ended", timeout=20.0)


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
    """Return how far each process has come that stands in an engine's mount namespace."""
    namespace = os.stat(f"/proc/{engine.pid or os.getpid()}/ns/mnt").st_ino
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            named = (entry / "comm").read_text() == f"{NAME}\n"
            if named and os.stat(entry / "ns/mnt").st_ino == namespace:
                found[int(entry.name)] = steps(int(entry.name))
        except (OSError, AssertionError):
            continue
    return found


# Several at once ----------------------------------------------------------------------------


@ONE
def test_two_mount_namespaces(site: Site) -> None:
    """Each has its own, and neither uses the other's."""
    site.stand()
    site.works("unshare", "-m", "--propagation", "unchanged")
    assert not site.served
    wait_until(lambda: len(site.ready) == 2, "another one stands")
    site.works()
    assert site.served


@ONE
def test_two_configurations(site: Site, driver: Driver, tmp_path: Path) -> None:
    site.stand()
    first = site.processes
    runtime = re.search(r'runtimes = \["(.*)"\]', site.config.read_text())
    assert runtime is not None
    other = Site(site.bundle, site.installation, driver, runtime[1], tmp_path / "other")
    try:
        other.stand()
        assert not other.served
        other.works()
        assert other.served
        assert site.processes == first
    finally:
        other.clear()


@ONE
def test_two_installations(site: Site, tmp_path: Path) -> None:
    """The launcher is part of what is proved: another one's process is not asked."""
    site.stand()
    other = tmp_path / "bin"
    other.mkdir()
    for name in ("gpu-py", "gpuhook-prestart"):
        (other / name).write_bytes((site.installation.bin / name).read_bytes())
        (other / name).chmod(0o755)
    for name in ("python3", "gpuhook"):
        (other / name).symlink_to(site.installation.bin / name)
    packages = next(site.installation.bin.parent.glob("lib/python3*"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / packages.name).symlink_to(packages)
    (tmp_path / "pyvenv.cfg").write_bytes(
        (site.installation.bin.parent / "pyvenv.cfg").read_bytes()
    )

    def other_stands() -> bool:
        site.works(runtime=other / "gpu-py")
        return site.served

    site.works(runtime=other / "gpu-py")
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
def test_many_at_once(
    site: Site, driver: Driver, low_level: tuple[str, Namespace], tmp_path: Path
) -> None:
    """No two launchers are served by one child. The low-level runtime makes none of the many."""
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
