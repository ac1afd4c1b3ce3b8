"""Prefork servers that exit, hang or become stale, while containers start all the same."""

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from harness.commands import Result, daemon, wait_until
from harness.driver import simulate
from harness.inside import seen
from harness.installation import Installation
from harness.prefork import (
    CHANGES,
    ONE,
    Site,
    asked_child,
    children_of,
    ended_in_a_container,
    is_running,
    parent_of,
)
from timeouts import in_time

from gpuhook.prefork.instance import OPTION, lock_name
from gpuhook.prefork.slots import SLOT_COUNT, SLOTS
from gpuhook.prefork.worker import PATIENCE

STOPS = 6
KILLS = int(os.environ.get("GPUHOOK_TEST_KILLS", "30"))


# Processes that end, hang, or aren't ours ---------------------------------------------------


@pytest.mark.parametrize("which", ["server", "watcher"])
@ONE
def test_a_killed_server_or_watcher_is_replaced(site: Site, which: str) -> None:
    site.stand()
    before = site.processes
    os.kill(site.server if which == "server" else parent_of(site.server), signal.SIGKILL)
    wait_until(lambda: not site.processes, "the other one is gone, too")
    site.works()
    site.stand_again(before)


@pytest.mark.protects(
    "sigkill",
    "stopped processes of the prefork server are killed by a kernel timer",
    instead="event = bytes(8) + (14).to_bytes(4, sys.byteorder) + bytes(52)",
    only="test_stopped_processes_are_replaced and both and runc-host",
)
@pytest.mark.parametrize("which", ["server", "watcher", "both"])
@ONE
def test_stopped_processes_are_replaced(site: Site, which: str) -> None:
    """Stopped processes are never resumed: no start waits, and other processes replace them."""
    site.stand()
    before = site.processes
    for pid in before:
        if which == "both" or (pid == site.server) == (which == "server"):
            os.kill(pid, signal.SIGSTOP)
    with in_time(60):
        site.works()
        assert which == "watcher" or not site.served
        wait_until(lambda: not site.processes & before, "they are gone")
    site.stand_again(before)


@pytest.mark.protects(
    "server-running", "the launcher sends no request to a prefork server that is stopped or traced"
)
@ONE
def test_a_server_held_by_a_stopped_debugger_is_bypassed(site: Site, tmp_path: Path) -> None:
    """Even the kernel doesn't end such a server, and a requester would wait for the debugger."""
    site.stand()
    server, log = site.server, tmp_path / "strace"
    state = Path(f"/proc/{server}/status")
    tracing = ["strace", "-f", "-p", str(server)]
    with daemon(tracing, log, lambda: "attached" in log.read_text()) as tracer:
        os.kill(tracer.pid, signal.SIGSTOP)
        wait_until(lambda: "State:\tt" in state.read_text(), "it is held")
        try:
            with in_time(60):
                site.works()
            assert not site.served
            assert not list(site.folder.glob(f".{server}.*")), "nobody has asked it"
        finally:
            os.kill(tracer.pid, signal.SIGCONT)


@ONE
def test_a_server_stopped_at_any_moment_blocks_no_container(site: Site) -> None:
    """The stop comes before the request is read, before the answer, or in the middle of it."""
    site.configure("standby = 3")
    site.stand()
    chance = random.Random(4712)  # noqa: S311 - any moment will do
    with in_time(400):
        for _ in range(STOPS):
            before = site.processes
            results: list[Result] = []
            starting = threading.Thread(target=lambda: results.append(site.run()))  # noqa: B023
            starting.start()
            time.sleep(chance.uniform(0, 0.03))
            # Workers that may be changing a container's mounts are left out: they get more time.
            for pid in site.standing | {site.ahead}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            starting.join()
            site.sees_its_gpus(results[0])
            site.stand_again(before)


def status_of(pid: int) -> str:
    """Return the status and the timers of a process from /proc."""
    return "".join(Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "timers"))


@ONE
def test_all_stopped_prefork_processes_end(site: Site) -> None:
    """A worker exits, too, wherever it was on its way to the answer: no launcher waits longer."""
    site.stand()
    server = site.server
    results: list[Result] = []
    starting = threading.Thread(target=lambda: results.append(site.run()))
    starting.start()
    try:
        while not asked_child(server) and starting.is_alive():
            pass
        stopped = {*children_of(server)} | site.processes
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        helper = site.helper
        wait_until(
            lambda: not any(is_running(pid) for pid in stopped - {helper}),
            f"they are gone: {stopped} without {helper}",
            timeout=300.0,  # a worker that was getting ready has a timeout of one minute
            shown=lambda: "".join(status_of(pid) for pid in stopped if is_running(pid)),
        )
        with suppress(ProcessLookupError):
            if helper:  # it had answered, and has a timeout of one minute for the mounts
                os.kill(helper, signal.SIGKILL)
    finally:
        site.clear()
        starting.join()
    if results[0].status == 0:
        site.sees_its_gpus(results[0])
    else:
        kept = (site.config.parent / "state/errors.log").read_text()
        assert "The helper was killed. Start the container again." in kept


@pytest.mark.protects(
    "stopped-child",
    "a prefork server's stopped child processes are resumed when the server exits",
    instead="pass",
)
@ONE
def test_a_worker_stopped_right_after_its_fork_blocks_no_container(
    site: Site, tmp_path: Path
) -> None:
    """The worker has no parent that could kill it, and it hasn't set a timer yet."""
    site.stand()
    stops = "inject=prctl:retval=0:signal=STOP"  # replaces the call that ties it to its parent
    tracing = ["strace", "-f", "-p", str(site.server), "-e", "trace=prctl", "-e", stops]
    log = tmp_path / "strace"
    results: list[Result] = []
    starting = threading.Thread(target=lambda: results.append(site.run()))
    with daemon(tracing, log, lambda: "attached" in log.read_text()):
        before = site.processes
        starting.start()
        wait_until(lambda: "stopped by SIGSTOP" in log.read_text(), "the child is stopped")
    try:
        [child] = site.processes - before
        status = Path(f"/proc/{child}/status")  # it runs for a moment when strace detaches
        wait_until(lambda: "State:\tT" in status.read_text(), "the child is stopped for good")
        os.kill(site.server, signal.SIGKILL)
        wait_until(lambda: not site.processes, "all are gone")
    finally:
        site.clear()
        starting.join()
    site.sees_its_gpus(results[0])


@pytest.mark.protects(
    "work-goes-on",
    "a worker finishes its work in a container when the prefork server or unit is stopped",
    instead="pass",
)
@pytest.mark.parametrize("how", ["killed", "unit"])
@ONE
def test_a_container_outlives_an_ended_prefork_server(site: Site, how: str, tmp_path: Path) -> None:
    """The server is killed, or systemd stops the unit with all its processes."""

    def end(server: int) -> None:
        if how == "killed":
            os.kill(server, signal.SIGKILL)
            return
        for pid in site.processes:
            with suppress(ProcessLookupError):  # it may have exited with its parent
                os.kill(pid, signal.SIGTERM)

    site.stand()
    site.sees_its_gpus(ended_in_a_container(site, site.run, tmp_path / "strace", end))


@pytest.mark.protects(
    "others-signals",
    "a process gets its kill timer even if all pending signals are used up",
    instead="if False:",
)
@ONE
def test_containers_are_served_where_no_signals_can_be_queued(site: Site) -> None:
    """All of root's processes share the number; a container with the host's root may use it up."""
    prefix = "prlimit", "--sigpending=0:"
    site.stand(*prefix)
    site.works(*prefix)
    assert site.served


@pytest.mark.protects(
    "stopped-start",
    "a prefork server that is stopped during its start is killed by a timer",
    instead="pass",
)
@ONE
def test_a_server_stopped_while_it_starts_has_a_kill_timer(site: Site, tmp_path: Path) -> None:
    """The server already has the lock: unless it is killed, no other server can ever serve."""
    site.stand()
    site.clear()
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    log = tmp_path / "strace"
    stops = ["-e", "trace=openat", "-e", "inject=openat:signal=STOP", "-P", str(site.config)]
    tracing = subprocess.Popen(
        ["strace", "-f", "-o", log, *stops, site.installation.runtime, OPTION, str(lock), "60"],
        env={"PATH": os.environ["PATH"], "GPUHOOK_CONFIG": str(site.config)},
        pass_fds=[lock],
    )
    try:
        wait_until(lambda: log.exists() and "stopped by SIGSTOP" in log.read_text(), "it reads")
        [pid] = site.processes
        assert f"signal: {signal.SIGKILL.value}/" in Path(f"/proc/{pid}/timers").read_text()
    finally:
        site.clear()
        tracing.kill()
        tracing.wait()
        os.close(lock)


@pytest.mark.protects(
    "late-child",
    "a prefork worker that hangs is killed",
    instead="if not 0 < worker.deadline <= 0:",
)
@ONE
def test_a_stopped_worker_is_killed_and_the_container_starts(site: Site) -> None:
    """The spare worker has no kill timer, so its parent kills it, and a container starts."""
    site.stand()
    child = site.ahead
    os.kill(child, signal.SIGSTOP)
    begun = time.monotonic()
    site.works()
    assert not site.served
    assert time.monotonic() - begun >= PATIENCE
    assert not is_running(child)
    site.works()
    assert site.served


@ONE
def test_a_killed_worker_is_replaced(site: Site) -> None:
    """Another spare worker serves the next request, or that start works without the server."""
    site.stand()
    server = site.server
    for at_once in (False, True):
        child = site.ahead
        os.kill(child, signal.SIGKILL)
        if not at_once:
            wait_until(lambda: child not in children_of(server), "it is gone")  # noqa: B023
        site.works()
        assert site.served or at_once
    site.works()
    assert site.served
    assert site.server == server


@pytest.mark.protects("one-slot", "a response slot is claimed by only one launcher")
@pytest.mark.protects(
    "freed-slots",
    "a launcher that reads from a freed response slot gets end of file instead of waiting",
    instead="pass",
)
@ONE
def test_with_all_slots_taken_a_container_starts_without_the_server(site: Site) -> None:
    """The slots belong to launchers that exited before they sent a request.

    Containers start the ordinary way until the slots are free. A launcher that is only late
    reads the end of its file, and then starts that way, too.
    """
    site.stand()
    for slot in range(SLOT_COUNT):
        (site.folder / f".{site.server}.{slot}").touch()
    with open(f"/proc/{site.server}/fd/{SLOTS}", "rb") as late:
        site.works()
        assert not site.served
        wait_until(lambda: not list(site.folder.glob(".[0-9]*")), "the slots are free")
        with in_time(10):
            assert late.read() == b""
    site.works()
    assert site.served


@ONE
def test_stale_names_of_other_processes_are_removed(site: Site) -> None:
    """Names remain where all processes were killed, and other processes have the numbers now."""
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


def test_kills_at_any_moment_refuse_only_containers_being_injected(site: Site) -> None:
    """A kill stops only a container that is being injected, which is refused with a message."""
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
    if refused:  # crun doesn't show what a hook prints
        kept = (site.config.parent / "state/errors.log").read_text()
        assert kept.count("The helper was killed. Start the container again.") == len(refused)
    site.works()
    wait_until(site.is_gone, "nothing is left")


# What changes between two starts ------------------------------------------------------------


@pytest.mark.protects(
    "machine-changed",
    "the prefork server is replaced when the machine's state changes",
    instead="return _are_same(self._seen)",
    only="machine_changes and runc-host",
)
@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES.keys())
def test_machine_changes_replace_the_server(own: Site, options: list[str]) -> None:
    own.stand()
    before = own.processes
    own.driver = simulate(own.installation, own.driver.root, *options)
    own.works()
    assert not own.served
    own.stand_again(before)
    own.works()
    assert own.served


@ONE
def test_a_missing_driver_is_refused_and_ends_the_server(own: Site) -> None:
    own.stand()
    own.bundle.call(own.installation.command, "simulate", "--remove", own.driver.root).ok()
    assert "Start the driver container" in own.run().failed().stdout
    wait_until(own.is_gone, "nothing is left")


@pytest.mark.protects(
    "own-settings",
    "the prefork server isn't used after the configuration has changed",
    instead="self._seen = _identities([launcher, program, *folders])",
)
@ONE
def test_a_changed_configuration_applies_at_once_and_ends_the_server(site: Site) -> None:
    site.stand()
    before = site.processes
    site.config.write_text(
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n" + site.config.read_text()
    )
    site.settle()
    assert seen(site.run()).gpu_minors == set()
    # It exits sooner than an idle server would, which waits for a minute.
    wait_until(lambda: not site.processes & before, "the old one is gone", timeout=50)


def touch(path: Path) -> None:
    """Change only the time of the file's last change, as a write would."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    """Replace the file by a copy, as packages and pip do."""
    copy = path.with_name(f"{path.name}.new")
    shutil.copy2(path, copy)
    copy.replace(path)


FILES: dict[str, Callable[[Installation], Path]] = {
    "package": lambda installed: next(installed.bin.parent.glob("lib/*/*/gpuhook/core/planner.py")),
    "launcher": lambda installed: installed.runtime,
    "interpreter": lambda installed: Path(os.path.realpath(installed.bin / "python3")),
}


def copy_of(installation: Installation, folder: Path) -> Installation:
    """Copy an installation with its interpreter, so that no other test's files change."""
    shutil.copytree(installation.bin.parent, folder, symlinks=True)
    python = folder / "bin/python3"
    python.unlink()
    shutil.copy(os.path.realpath(installation.bin / "python3"), python)
    return Installation(folder / "bin")


@pytest.mark.protects(
    "own-settings",
    "the prefork server isn't used after a file of the installation has changed",
    instead="self._seen = _identities([path or DEFAULT_PATH])",
)
@pytest.mark.parametrize("file", FILES.values(), ids=FILES.keys())
@ONE
def test_changed_files_of_the_installation_replace_the_server(
    site: Site, file: Callable[[Installation], Path], tmp_path: Path
) -> None:
    site.installation = copy_of(site.installation, tmp_path / "venv")
    site.stand_again(())  # a start may find the copied files too recent to trust
    before = site.processes
    replace(file(site.installation))
    site.works()
    assert not site.served
    site.stand_again(before)
    wait_until(lambda: not site.processes & before, "the old one is gone", timeout=50)
    lock = lock_name(str(site.installation.runtime))
    assert lock in os.listdir(site.folder), "a running server keeps its lock file"


@pytest.mark.protects(
    "written-in-place",
    "the prefork server is replaced after a package file is overwritten in place",
    instead="if not self.is_same():",
)
@ONE
def test_server_is_replaced_after_a_package_file_is_written_in_place(
    site: Site, tmp_path: Path
) -> None:
    site.installation = copy_of(site.installation, tmp_path / "venv")
    site.stand_again(())
    before = site.processes
    touch(FILES["package"](site.installation))

    def is_gone() -> bool:
        site.works()
        return not site.processes & before

    # The server checks its files in detail every ten seconds, also while containers start.
    wait_until(is_gone, "the old one is gone", timeout=50)


@ONE
def test_a_deleted_state_folder_is_recreated_with_a_new_server(site: Site) -> None:
    site.stand()
    before = site.processes
    for path in site.folder.iterdir():
        path.unlink()
    site.folder.rmdir()
    site.works()
    site.stand_again(before)
