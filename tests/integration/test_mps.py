"""GPUs that containers share by MPS: the daemon, its clients, and clients beyond their share."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import bundles
from harness.bundles import Bundle
from harness.commands import run, wait_until
from harness.device_plugin import device_plugin
from harness.docker import dockerd
from harness.driver import Driver, simulate
from harness.images import CUDA_PROBE, image
from harness.installation import Installation, write_config
from harness.metrics import GPUHOOK
from harness.mps import LIMITS, PLACE, PROBE, SETTINGS, Site, daemons
from harness.namespaces import Namespace
from harness.podman import podman
from harness.prefork import ONE, RUNTIMES
from timeouts import in_time

DEFAULT, EXCLUSIVE_PROCESS = 0, 3
GPU = "nvidia.com/gpu"
# For tests whose result doesn't depend on the version of MPS: compute modes, and containers
# that aren't clients.
NEWEST = pytest.mark.parametrize("machine", [[*LIMITS][-1]], indirect=True, scope="module")
OLDEST = pytest.mark.parametrize("machine", [next(iter(LIMITS))], indirect=True, scope="module")


@pytest.fixture(scope="module", params=[*LIMITS])
def machine(request: pytest.FixtureRequest, workspace: Path, installation: Installation) -> Driver:
    version = request.param
    options = ("--gpus=3", f"--driver-version={version}")
    return simulate(installation, workspace / f"mps-{version}", *options)


@pytest.fixture
def site(
    machine: Driver,
    workspace: Path,
    roots: dict[str, Path],
    installation: Installation,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> Iterator[Site]:
    runtime, entered = low_level
    config = write_config(tmp_path / "etc", machine.root, [runtime])
    state = Path(f"/run/gpuhook-mps-{os.getpid()}")  # /run, which only root can change
    text = config.read_text().replace(str(tmp_path / "etc/state"), str(state))
    config.write_text(text + SETTINGS)
    (machine.root / "simulate/compute").write_text("")
    with ExitStack() as stack:

        def bundle() -> Bundle:
            made = bundles.bundle(workspace / "bundles", roots["debian"], entered, runtime)
            return stack.enter_context(made)

        made = Site(installation, machine, config, state, runtime, bundle)
        stack.callback(shutil.rmtree, state, ignore_errors=True)
        stack.callback(made.mps, "stop")
        yield made


@RUNTIMES
def test_containers_share_a_gpu(site: Site) -> None:
    site.mps("start").ok()
    first, second = site.client("0"), site.client("0,1")
    limits = LIMITS[site.driver.version]
    assert limits in site.said(first)
    assert limits in site.said(second)
    found = site.status()
    assert (found["version"], found["problem"]) == (2 if "=0=" in limits else 3, "")
    by_id = {each["id"]: each for each in found["containers"]}
    assert by_id.keys() == {first.name, second.name}
    assert all(len(each["clients"]) == 1 for each in by_id.values())
    assert found["others"] == []
    uuids = [gpu.uuid for gpu in site.driver.gpus]
    assert by_id[first.name]["devices"] == uuids[:1]
    assert by_id[second.name]["devices"] == uuids[:2]


@NEWEST
@ONE
def test_a_container_without_a_shared_gpu_is_unchanged(site: Site) -> None:
    site.mps("start").ok()
    other = site.ask("2", command=f"env; ls {PLACE}")
    site.start(other)
    wait_until(lambda: "No such file" in site.said(other), "it has looked")
    assert "CUDA_MPS" not in site.said(other)
    assert site.status()["containers"] == []


@ONE
def test_the_compute_mode_is_set_by_start_and_restored_by_stop(site: Site) -> None:
    site.mps("start").ok()
    assert site.modes() == [EXCLUSIVE_PROCESS, EXCLUSIVE_PROCESS, DEFAULT]
    site.mps("stop").ok()
    assert site.modes() == [DEFAULT] * 3
    assert not (site.state / "mps.json").exists()
    assert not os.path.ismount(site.state / "mps/shm")


@pytest.mark.protects(
    "mps-shared-memory",
    "users' mounts in MPS shared memory don't prevent MPS from being stopped",
    instead='_mount("umount", f"{self.base}/{mps.SHM}")',
)
@OLDEST
@ONE
def test_user_mounts_in_shared_memory_do_not_prevent_mps_stop(site: Site) -> None:
    """Every user may mount (FUSE) in a folder of this kind; version 3 has no such folders."""
    site.mps("start").ok()
    place = site.state / "mps/shm/his"
    place.mkdir()
    run(["mount", "-t", "tmpfs", "tmpfs", place]).ok()
    site.mps("stop").ok()
    assert not os.path.ismount(place.parent)
    assert not (site.state / "mps.json").exists()


@pytest.mark.protects(
    "mps-first-mode",
    "MPS: a GPU's original compute mode is restored even after a daemon was killed",
    only="575 and after_a_kill",
)
@ONE
def test_the_compute_mode_is_restored_after_a_kill(site: Site) -> None:
    """The first mode may differ from the default, and there may be two kills."""
    (site.driver.root / "simulate/compute").write_text("1 2\n")
    for _ in range(2):
        site.mps("start").ok()
        site.kill()
    site.mps("stop").ok()
    assert site.modes() == [DEFAULT, 2, DEFAULT]


@pytest.mark.protects(
    "mps-each-mode",
    "a lost GPU doesn't prevent MPS from restoring the compute mode of other GPUs",
    instead="except ZeroDivisionError as error:",
)
@NEWEST
@ONE
def test_a_lost_gpu_does_not_prevent_restoring_other_compute_modes(site: Site) -> None:
    site.mps("start").ok()
    simulate_command = (site.installation.command, "simulate", site.driver.root)
    run([*simulate_command, "--lost", "0"]).ok()
    try:
        site.mps("stop").failed()
        assert site.modes()[1:] == [DEFAULT] * 2
        assert not site.daemons()
    finally:
        run([*simulate_command, "--found", "0"]).ok()
    site.mps("stop").ok()
    assert site.modes() == [DEFAULT] * 3


@pytest.mark.protects(
    "mps-mode-written", "MPS: a GPU's compute mode is recorded before it is changed"
)
@NEWEST
@ONE
def test_a_daemon_that_does_not_start_changes_nothing(site: Site) -> None:
    program = site.driver.root / "usr/bin/nvidia-cuda-mps-control"
    kept = program.with_suffix(".kept")
    program.rename(kept)
    try:
        program.write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
        program.chmod(0o755)
        done = site.mps("start")
    finally:
        kept.rename(program)
    assert done.status != 0
    assert "MPS' control daemon failed: no luck" in done.stderr
    assert site.modes() == [DEFAULT] * 3
    assert not (site.state / "mps.json").exists()


@pytest.mark.protects("mps-mig", "MPS: no GPU in MIG mode is shared")
@NEWEST
@ONE
def test_a_gpu_in_mig_mode_is_not_shared(site: Site) -> None:
    """This applies when MPS starts, and also when a GPU gets MIG mode afterwards."""
    simulated: list[str | Path] = [site.installation.command, "simulate", site.driver.root]
    site.mps("start").ok()
    run([*simulated, "--mig", "0:1g.18gb"]).ok()
    try:
        assert "GPU 0:0 is in MIG mode" in site.refusal("0:0")
        site.mps("stop").ok()
        assert "GPU 0 is in MIG mode" in site.mps("start").stderr
    finally:
        run([*simulated, "--mig", "0:off"]).ok()


@ONE
def test_the_service_replaces_a_dead_or_hung_daemon(site: Site) -> None:
    """The service also replaces a daemon that hangs, and it stops the daemons that it started."""
    env = {**os.environ, "GPUHOOK_CONFIG": str(site.config)}
    words: list[str | Path] = [site.installation.command, "mps", "serve", "--interval", "0.2"]
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as service:
        try:
            wait_until(lambda: bool(site.mps("status").status == 0), "it serves")
            first = site.daemon()
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: site.mps("status").status == 0, "it serves again")
            second = site.daemon()
            assert second != first
            os.kill(second, signal.SIGSTOP)
            assert "didn't answer" in site.status()["problem"]
            wait_until(lambda: site.daemon() not in (0, second), "a daemon that hangs is replaced")
        finally:
            service.terminate()
            service.wait(timeout=300)
    assert site.modes() == [DEFAULT] * 3
    assert not (site.state / "mps.json").exists()


@ONE
def test_killed_starts_are_completed_or_undone_by_the_next_command(site: Site) -> None:
    """The kill comes before the mode is set, between mode and daemon, or after that."""
    env = {**os.environ, "GPUHOOK_CONFIG": str(site.config)}
    words: list[str | Path] = [site.installation.command, "mps", "start"]
    for number in range(12):
        with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as start:
            time.sleep(0.05 + 0.03 * number)
            start.kill()
    site.mps("start").ok()
    assert site.status()["problem"] == ""
    for number in range(6):
        with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as start:
            time.sleep(0.05 + 0.06 * number)
            start.kill()
        site.mps("stop").ok()
        assert site.modes() == [DEFAULT] * 3
        assert not site.daemons()


# Print a line and wait, when the daemon is started or (set-up) when it has its first limit.
KILLED = """
import sys
import time
from gpuhook.base.config.loader import load
from gpuhook.monitor.mps import control, keep
def stop(*words):
    print("here", flush=True)
    time.sleep(1000)
name = sys.argv[1]
if name == "started":
    keep.MpsController._set_up = stop
else:
    tell, told = control.Control.tell, []
    control.Control.tell = lambda *words: told and stop() or told.append(tell(*words)) or None
    told = []
keep.MpsController(load(), print).start()
"""


@pytest.mark.protects(
    "mps-not-ready",
    "a container isn't accepted as an MPS client before the limits are set",
    only="killed_before_all_limits and 575",
)
@pytest.mark.protects(
    "mps-set-up",
    "an MPS control daemon without its limits is started again",
    only="killed_before_all_limits and 575",
)
@ONE
@pytest.mark.parametrize("moment", ["started", "set-up"])
def test_a_start_killed_before_all_limits_are_set_is_completed_by_the_next(
    site: Site, moment: str
) -> None:
    """No container starts meanwhile, and the next command sets the limits."""
    site.change("active-thread-percentage = 40\n", "")  # the daemon could be asked about this limit
    program = site.installation.command.parent / "python"
    env = {**os.environ, "GPUHOOK_CONFIG": str(site.config)}
    words: list[str | Path] = [program, "-c", KILLED, moment]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE) as start:
        try:
            assert start.stdout is not None
            assert start.stdout.readline() == b"here\n"
            assert "control daemon has no limits yet" in site.refusal("0")
        finally:
            start.kill()
    assert site.status()["problem"] != ""
    site.mps("start").ok()
    made = site.client("0")
    assert re.search(r"percentage=\S* memory=(0=)?8192M", site.said(made)), site.said(made)


@pytest.mark.protects("mps-first-server", "MPS limits are set before the MPS server is started")
@ONE
@pytest.mark.parametrize(
    "machine", [version for version in LIMITS if version < "615"], indirect=True
)
def test_a_client_before_the_limits_are_set_stops_the_start(site: Site) -> None:
    """A container of the previous daemon has its folder, and makes the new one start a server."""
    site.mps("start").ok()
    program = f"while :; do timeout 0.2 {CUDA_PROBE} --context; done"
    eager = site.ask("0", command=program)
    assert site.start(eager).status == 0
    site.kill()
    program_of = site.installation.command.parent / "python"
    code = (
        "import time; from gpuhook.base.config.loader import load;"
        "from gpuhook.monitor.mps import keep; set_up = keep.MpsController._set_up;"
        "keep.MpsController._set_up = lambda *words: time.sleep(3) or set_up(*words);"
        "keep.MpsController(load(), print).start()"
    )
    done = run([program_of, "-c", code], env={"GPUHOOK_CONFIG": str(site.config)})
    assert "became a client of MPS before the limits were set" in done.stderr
    assert site.modes() == [DEFAULT] * 3
    assert not site.daemons()


@pytest.mark.protects(
    "mps-unwritten",
    "MPS: a running daemon that wasn't recorded is also stopped",
    instead="for process in (state.daemon,):",
    only="575 and unrecorded",
)
@ONE
def test_an_unrecorded_daemon_is_ended(site: Site) -> None:
    """A kill between the daemon's start and its record leaves such a daemon."""
    site.mps("start").ok()
    program = site.installation.command.parent / "python"
    code = (
        "from gpuhook.vendors.nvidia import mps;"
        "from gpuhook.monitor.mps.keep import MpsController;"
        "from gpuhook.base.config.loader import load; c = load();"
        "MpsController(c, print)._save(mps.read(c.state_dir).but(daemon=''))"
    )
    run([program, "-c", code], env={"GPUHOOK_CONFIG": str(site.config)}).ok()
    assert site.daemons()
    site.mps("stop").ok()
    assert not site.daemons()
    assert site.modes() == [DEFAULT] * 3


# A replacement for the daemon's program, which reports its start and waits for permission
# to continue.
SLOW = """#!/bin/sh
[ "$1" = -d ] || exec "$0.real" "$@"
echo begun >{pipe}
read -r word <{pipe}
exec "$0.real" "$@"
"""


@pytest.mark.protects(
    "mps-begun",
    "MPS: stopping waits for a daemon that is still starting, and stops it as well",
    instead="pass",
    only="575 and only_begun",
)
@ONE
def test_a_daemon_that_has_only_begun_is_ended(site: Site, tmp_path: Path) -> None:
    """The starting process was killed before its daemon's pid was recorded."""
    program = site.driver.root / "usr/bin/nvidia-cuda-mps-control"
    real, pipe = program.with_name(f"{program.name}.real"), tmp_path / "pipe"
    os.mkfifo(pipe)
    program.rename(real)
    words: list[str | Path] = [site.installation.command, "mps"]
    env = {**os.environ, "GPUHOOK_CONFIG": str(site.config)}
    try:
        program.write_text(SLOW.format(pipe=pipe))
        program.chmod(0o755)
        with subprocess.Popen([*words, "start"], env=env) as start:
            with in_time(60):
                assert pipe.read_text() == "begun\n"
            start.kill()
        with subprocess.Popen([*words, "stop"], env=env) as stop:
            with pytest.raises(subprocess.TimeoutExpired):
                stop.wait(1)
            pipe.write_text("go on\n")
        assert stop.returncode == 0
        assert not daemons(site.driver, real.name)
    finally:
        real.rename(program)
    assert site.modes() == [DEFAULT] * 3


@NEWEST
@ONE
def test_the_mode_of_a_device_no_longer_shared_is_restored(site: Site) -> None:
    site.mps("start").ok()
    site.change('devices = "0,1"', 'devices = "0"')
    site.mps("start").ok()
    assert site.modes() == [EXCLUSIVE_PROCESS, DEFAULT, DEFAULT]


@pytest.mark.protects(
    "mps-daemon",
    "MPS: a shared device is refused while no control daemon is running",
    instead="if state is None:",
    only="575 and without_a_daemon",
)
@ONE
def test_a_container_is_refused_without_a_daemon(site: Site) -> None:
    assert "no control daemon of MPS is running" in site.refusal("0")
    site.mps("start").ok()
    site.kill()
    assert site.refusal("0").count("no control daemon of MPS is running") > 1
    assert site.mps("status").status == 1


@pytest.mark.protects(
    "mps-most-clients",
    "MPS: no more containers share a device than allowed",
    only="575 and no_more_containers",
)
@pytest.mark.protects(
    "mps-claim",
    "MPS: a container's client slot is free again when its process has exited",
    only="575 and no_more_containers",
)
@ONE
def test_no_more_containers_than_allowed_share_a_gpu(site: Site) -> None:
    site.mps("start").ok()
    first, _ = site.client("0"), site.client("0")
    assert "GPU 0 is shared by 2 containers" in site.refusal("0")
    site.client("1")
    [process] = [
        each["process"] for each in site.status()["containers"] if each["id"] == first.name
    ]
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: len(site.status()["containers"]) == 2, "its place is free")
    site.client("0")


@pytest.mark.protects(
    "mps-threads",
    "MPS: a client gets no higher thread percentage than the administrator allows",
    instead="return asked",
    only="575 and widen",
)
@pytest.mark.protects(
    "mps-memory",
    "MPS: a client gets no more memory than the administrator allows",
    instead="limits[place] = wanted",
    only="575 and widen",
)
@ONE
def test_variables_widen_no_limit(site: Site) -> None:
    """Larger values of the image are replaced, and smaller values stay."""
    site.mps("start").ok()
    more = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=80G")
    other = "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps/../gpuhook/mps/pipe/c01"
    greedy = site.ask("0", *more, other, command=f"env; {PROBE}")
    site.start(greedy)
    wait_until(lambda: "CUDA context" in site.said(greedy), "it has a context")
    said = site.said(greedy).splitlines()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40" in said
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M" in said
    assert f"CUDA_MPS_PIPE_DIRECTORY={PLACE}" in said
    less = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G")
    modest = site.ask("0", *less, command="env")
    site.start(modest)
    wait_until(lambda: "CUDA_MPS_PINNED" in site.said(modest), "it has printed")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10\n" in site.said(modest)
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M\n" in site.said(modest)


@pytest.mark.protects(
    "mps-read-only",
    "MPS: a container can't replace the sockets of the control daemon",
    instead='_PIPE_OPTIONS = ("nosuid", "nodev", "noexec")',
    only="575 and hostile and runc-host",
)
@RUNTIMES
def test_a_hostile_client_reaches_no_socket_and_no_other_namespace(site: Site) -> None:
    """The client's folder is read-only, and it shows no other namespace."""
    site.mps("start").ok()
    first = site.client("0")
    script = f"rm -f {PLACE}/control; touch {PLACE}/x; ls -a {PLACE}; ls {PLACE}/.. ; echo end"
    hostile = site.ask("0", command=script)
    assert site.start(hostile).status == 0, site.said(hostile)
    wait_until(
        lambda: "end\n" in site.said(hostile), "it has tried", shown=lambda: site.said(hostile)
    )
    said = site.said(hostile)
    assert "Read-only file system" in said
    assert "c00" not in said
    assert site.status()["problem"] == ""
    assert site.status()["containers"][0]["id"] == first.name


@ONE
def test_a_mount_or_link_at_the_mps_folder_does_not_prevent_a_client(site: Site) -> None:
    """gpuhook mounts over an existing mount, and a link at that path leads nowhere else."""
    site.mps("start").ok()
    covered = site.ask("0")
    mount = {"destination": PLACE, "type": "tmpfs", "source": "t", "options": ["mode=777"]}
    covered.change(lambda spec: spec["mounts"].append(mount))
    assert site.start(covered).status == 0
    wait_until(lambda: "CUDA context" in site.said(covered), "it has a context")
    linked = site.ask("0")
    (linked.root / "run").mkdir(exist_ok=True)
    (linked.root / "run/nvidia-mps").symlink_to("/tmp")
    site.start(linked)
    wait_until(lambda: "CUDA context" in site.said(linked), "it has a context")
    assert LIMITS[site.driver.version] in site.said(linked)


@ONE
def test_a_start_that_fails_leaves_no_claim(site: Site) -> None:
    site.mps("start").ok()
    for _ in range(3):
        made = site.ask("0")
        made.change(lambda spec: spec["process"].update(args=["/no/such/program"]))
        assert site.start(made).status != 0
    assert site.status()["containers"] == []


@NEWEST
@ONE
def test_mode_spec_is_refused(site: Site) -> None:
    site.mps("start").ok()
    site.change("[nvidia-container-runtime]\n", '[nvidia-container-runtime]\nmode = "spec"\n')
    assert "can't be given in mode spec" in site.refusal("0")


@NEWEST
@ONE
def test_shared_and_unshared_devices_together_are_refused(site: Site) -> None:
    site.mps("start").ok()
    assert "GPU 2 isn't among the devices that MPS serves" in site.refusal("0,2")


@pytest.mark.protects(
    "mps-folder",
    "MPS: the daemon's folder is mounted only from a path that only root can change",
    instead="parent = host.open(above)",
    also=("mps-claims-folder", "above = host.open(path)"),
    only="575 and others_may_change",
)
@ONE
def test_a_folder_that_others_may_change_is_not_given(site: Site) -> None:
    site.mps("start").ok()
    (site.state / "mps").chmod(0o777)
    assert "all users may write to it" in site.refusal("0")


@ONE
def test_explain_shows_the_operations_for_a_client(site: Site) -> None:
    site.mps("start").ok()
    asked = ("--gpus", "device=0", "--format", "json")
    env = {"GPUHOOK_CONFIG": str(site.config)}
    done = run([site.installation.command, "explain", *asked], env=env).ok()
    plan = json.loads(done.stdout)["operations"]
    reasons = [op["reason"] for op in plan if op.get("destination") == PLACE]
    assert reasons == ["GPU 0 is shared by MPS"]
    assert any(op.get("name") == "CUDA_MPS_PIPE_DIRECTORY" for op in plan)
    assert any(
        op.get("destination") == "/dev/shm" for op in plan
    ) == site.driver.version.startswith("575")


@pytest.fixture
def podmans(site: Site, podman_config: Path) -> Iterator[None]:
    """The site's configuration, used for podman's containers."""
    before = podman_config.readlink()
    podman_config.unlink()
    podman_config.symlink_to(site.config)
    yield
    podman_config.unlink()
    podman_config.symlink_to(before)


# Engines and clusters -------------------------------------------------------------------------


@ONE
def test_docker_containers_share_a_gpu_up_to_the_allowed_number(
    site: Site, workspace: Path, host: Namespace, archive: Path, tmp_path: Path
) -> None:
    """Two containers may be clients at a time, and the status lists both; a third is refused."""
    site.mps("start").ok()
    env = {"GPUHOOK_CONFIG": str(site.config)}
    runtimes = {"gpu-py": site.installation.runtime}
    folder = workspace / f"mps-{site.driver.version[:3]}"
    with dockerd(folder, host, runtimes, archive, env) as engine:
        for name in ("one", "two"):
            words = ["run", "--detach", "--runtime=gpu-py", f"--name={name}", "--interactive"]
            more = ["-e", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90", "-e", "NVIDIA_VISIBLE_DEVICES=0"]
            engine.call(*words, *more, image("debian"), "sh", "-c", PROBE).ok()
        limits = LIMITS[site.driver.version]
        wait_until(lambda: limits in engine.call("logs", "two").stdout, "it is a client")
        found = {each["id"]: each for each in site.status()["containers"]}
        assert all(len(each["clients"]) == 1 for each in found.values())
        ids = engine.call("ps", "--quiet", "--no-trunc").ok().stdout.split()
        assert found.keys() == {*ids}
        words = ["run", "--rm", "--runtime=gpu-py", "-e", "NVIDIA_VISIBLE_DEVICES=0"]
        third = engine.call(*words, image("debian"), "true")
        assert "GPU 0 is shared by 2 containers" in third.stderr
        engine.call("kill", "one").ok()
        engine.call(*words, image("debian"), "true").ok()


@ONE
def test_podman_containers_get_the_limits_of_clients(
    site: Site, workspace: Path, host: Namespace, archive: Path, podmans: None
) -> None:
    site.mps("start").ok()
    folder = workspace / f"mpsp-{site.driver.version[:3]}"
    with podman(folder, host, site.installation.runtime, archive) as engine:
        env = ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90"]
        command = f"env; {CUDA_PROBE} --context </dev/null"
        said = engine.run(image("debian"), "sh", "-c", command, env=env).ok().stdout
        assert LIMITS[site.driver.version] in said
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40\n" in said
    assert site.status()["containers"] == []


@ONE
@pytest.mark.parametrize(
    ("entry", "count", "threads", "share"),
    [
        ("replicas: 2", 1, "50", 50),
        ("sizes: [25, 75]", 2, "100", 100),
        ("sizes: [20, 20], unlimited: true", 3, None, None),
    ],
)
def test_pods_get_their_shares_limited_by_the_configuration(
    site: Site,
    workspace: Path,
    tmp_path: Path,
    entry: str,
    count: int,
    threads: str | None,
    share: int | None,
) -> None:
    """The plugin sets a pod's shares, and gpu-py allows no more than config.toml does."""
    site.change("clients = 2", "clients = 3")
    site.change('devices = "0,1"', 'devices = "0"')
    site.mps("start").ok()
    file = tmp_path / "plugin.yaml"
    file.write_text(
        "sharing:\n  mps:\n    failRequestsGreaterThanOne: false\n    resources:\n"
        f"    - {{name: gpu, {entry}}}\n"
    )
    place = workspace / f"m{hash(tmp_path) & 0xFFFFFFFF:x}"
    words = (f"--config-file={file}",)
    with device_plugin(place, site.installation, site.config, GPU, *words) as kubelet:
        devices = kubelet.devices(GPU)
        healthy = {each.partition("::")[0] for each, it in devices.items() if it.healthy}
        assert healthy == {site.driver.gpus[0].uuid}  # config.toml shares only this GPU
        envs = kubelet.admit("pod", {GPU: count})["envs"]
        assert envs.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") == threads
        total = site.kept()["devices"][0]["total"] >> 20
        limit = None if share is None else f"0={total * share // 100}M"
        assert envs.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") == limit
        made = site.ask("0", *(f"{name}={value}" for name, value in envs.items()))
        made.command("sh", "-c", f"env; {PROBE}")
        site.start(made)
        wait_until(lambda: "CUDA context" in site.said(made), "it has a context")
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40\n" in site.said(made)
        assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M\n" in site.said(made)
        site.kill()
        kubelet.wait_until(lambda: kubelet.allocatable(GPU) == 0, "the plugin says so")
        site.mps("start").ok()
        kubelet.wait_until(lambda: kubelet.allocatable(GPU) > 0, "it is healthy again")


@ONE
def test_doctor_and_metrics_report_the_daemons_state(site: Site, tmp_path: Path) -> None:
    env = {"GPUHOOK_CONFIG": str(site.config)}
    file = tmp_path / "gpus.prom"

    def said(*words: str) -> str:
        return run([site.installation.command, *words], env=env).stdout

    def metrics() -> str:
        words = (*GPUHOOK, "metrics", "--textfile", file)
        run(words, env=env).ok()
        return file.read_text()

    site.mps("start").ok()
    assert "MPS' control daemon answers" in said("doctor")
    assert "gpuhook_mps_up 1.0\n" in metrics()
    site.kill()
    assert "MPS' control daemon isn't running" in said("doctor")
    assert "gpuhook_mps_up 0.0\n" in metrics()


@NEWEST
@RUNTIMES
@pytest.mark.parametrize("capabilities", ["graphics", "utility", "graphics,utility,display"])
def test_a_client_is_counted_with_any_capability(site: Site, capabilities: str) -> None:
    """The device is shared, so its container has the limits and is counted, or isn't started."""
    env = f"NVIDIA_DRIVER_CAPABILITIES={capabilities}"
    assert "no control daemon of MPS is running" in site.refusal("0", env)
    site.mps("start").ok()
    found = [site.ask("0", env, command=f"ls {PLACE}; env; sleep 1000") for _ in range(3)]
    assert [site.start(made).status for made in found] == [0, 0, 1], "two may be clients"
    wait_until(lambda: "CUDA_MPS_PIPE_DIRECTORY" in site.said(found[0]), "it has looked")
    assert {each["id"] for each in site.status()["containers"]} == {each.name for each in found[:2]}
    assert "as many as gpuhook.mps.clients" in (site.state / "errors.log").read_text()


@NEWEST
@ONE
@pytest.mark.parametrize("path", ["/dev/nvidia{}", "/dev/card", ""])
def test_a_node_of_a_shared_gpu_given_by_the_engine_is_refused(
    site: Site, path: str, tmp_path: Path
) -> None:
    """gpu-py finds a node from --device, whatever its name is, even without a variable.

    It also finds a node with another name that is a volume ("").
    """
    site.mps("start").ok()
    shared, other = (site.driver.gpus[at].minor for at in (0, 2))
    for minor, status in ((shared, 1), (other, 0)):
        made = site.bundle()
        made.command("true")
        node = {"path": path.format(minor), "type": "c", "major": 195, "minor": minor}
        rule = {"allow": True, "type": "c", "major": 195, "minor": minor, "access": "rwm"}

        place = tmp_path / f"card{minor}"
        os.mknod(place, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
        options = ["bind", "rw"]
        mount = {"destination": "/x", "type": "bind", "source": str(place), "options": options}

        def give(spec: Any, node: Any = node, rule: Any = rule, mount: Any = mount) -> None:
            if path:
                spec["linux"].setdefault("devices", []).append(node)
            else:
                spec["mounts"].append(mount)
            spec["linux"]["resources"]["devices"].append(rule)

        made.change(give)
        assert site.start(made).status == status, (made.path / "output").read_text()
    assert "only gpu-py makes clients of it" in (site.state / "errors.log").read_text()


@NEWEST
@ONE
def test_a_shared_gpu_is_refused_to_the_hook_alone_and_left_out_of_specs(site: Site) -> None:
    """A hook without gpu-py sets no variable, and CDI specs contain nothing about MPS."""
    site.mps("start").ok()
    made = site.ask("0", "NVIDIA_DRIVER_CAPABILITIES=graphics", command="true")
    made.prestart(site.installation.hook, site.config)
    done = made.run(Path(shutil.which(site.runtime) or site.runtime), {})
    assert (
        "only gpu-py makes clients of it"
        in done.stderr + done.stdout + (site.state / "errors.log").read_text()
    )
    env = {"GPUHOOK_CONFIG": str(site.config)}
    text = run([site.installation.command, "cdi", "generate"], env=env).ok().stdout
    assert '"2"' in text
    assert '"0"' not in text
