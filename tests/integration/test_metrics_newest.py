"""Values of newer drivers and GPUs: shares of MIG devices, links, errors, and Slurm jobs."""

import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness.bundles import GpuBundle
from harness.commands import run, stop, wait_until
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.metrics import (
    COMMAND,
    GIB,
    Samples,
    exporter,
    labels_of,
    of_container,
    pid_of,
    scrape,
    using,
)

from gpuhook.base.host import proc
from gpuhook_simulate.vendors.nvidia import report_xid
from gpuhook_simulate.vendors.nvidia.state import load_machine

MIB = 1 << 20
SHARES = ("GR_ENGINE_ACTIVE", "PIPE_TENSOR_ACTIVE", "DRAM_ACTIVE")
HIERARCHIES = ("/sys/fs/cgroup/devices", "/sys/fs/cgroup")  # paths of v1 and v2, listed for names


class Machine:
    """A separate simulated driver, and a configuration for it."""

    def __init__(self, installation: Installation, folder: Path, *options: str) -> None:
        self.driver = simulate(installation, folder / "driver", *options)
        self.config = write_config(folder / "config", self.driver.root, ["runc"])


@pytest.fixture
def make(installation: Installation, workspace: Path) -> Iterator[type[Machine]]:
    made = []

    def build(*options: str) -> Machine:
        folder = workspace / f"newest-{uuid.uuid4().hex[:8]}"
        made.append(Machine(installation, folder, *options))
        return made[-1]

    yield build  # type: ignore[misc]
    for each in made:
        run([installation.command, "simulate", "--remove", each.driver.root]).ok()


def values(samples: Samples, name: str) -> dict[str, float]:
    """Return the values of a series by the device's UUID.

    In series of DCGM, a MIG device has its id instead.
    """
    return {
        labels.get("uuid") or labels.get("GPU_I_ID") or labels["UUID"]: value
        for each, labels, value in samples
        if each == name
    }


def test_first_scrape_has_utilization_and_later_ones_cover_the_interval(make: type) -> None:
    here = make("--gpus=2", "--mig=0:1g.18gb,2g.35gb")
    first = load_machine(str(here.driver.root)).gpus[0].migs[0].uuid
    whole = here.driver.gpus[1].uuid
    with (
        using(here.driver, first, 11, GIB, 60),
        using(here.driver, whole, 12, GIB, 40),
        exporter(here.config, "--dcgm") as port,
    ):
        found = scrape(port)
        shares = values(found, "gpuhook_gpu_utilization_ratio")
        assert shares[first] == pytest.approx(0.6, abs=0.01)
        assert sorted(shares.values())[:1] == [0]  # the other GPU's
        for name, expected in zip(SHARES, (0.4, 0.2, 0.0), strict=True):
            seen = values(found, f"DCGM_FI_PROF_{name}")
            assert seen[whole] == pytest.approx(expected, abs=0.01), name
            assert len(seen) == 3  # a whole GPU, and the other GPU's two parts
        sent = values(found, "DCGM_FI_PROF_PCIE_TX_BYTES")[whole]
        assert sent == pytest.approx(400 * MIB, rel=0.01)
        begun = time.monotonic()
        with using(here.driver, whole, 13, GIB, 40):
            time.sleep(1)
            busy = time.monotonic() - begun
        time.sleep(1)
        whole_time = time.monotonic() - begun
        share = values(scrape(port), f"DCGM_FI_PROF_{SHARES[0]}")[whole]
        assert share == pytest.approx(0.4 + 0.4 * busy / whole_time, abs=0.05)


def test_older_drivers_and_gpus_lack_new_values_without_errors(make: type) -> None:
    for options in (
        ["--driver-version=470.57.02", "--mig=0:1g.18gb"],
        ["--model=A100"],
        ["--model=L4"],
    ):
        here = make("--gpus=1", *options)
        gpu = here.driver.gpus[0].uuid
        with exporter(here.config, "--dcgm") as port:
            found = scrape(port)
            errors = [value for name, _, value in found if name == "gpuhook_metrics_errors_total"]
            assert set(errors) == {0}
            for name in SHARES:
                assert values(found, f"DCGM_FI_PROF_{name}") == {}, options
            assert gpu in values(found, "DCGM_FI_PROF_PCIE_TX_BYTES")
            has_stack = "--model=L4" not in options
            assert (gpu in values(found, "gpuhook_gpu_memory_temperature_celsius")) == has_stack
            is_old = "--driver-version=470.57.02" in options
            assert (gpu in values(found, "gpuhook_gpu_recovery_action")) != is_old


def test_a_driver_without_events_has_all_other_values(make: type) -> None:
    """A vGPU's driver may lack events."""
    here = make("--gpus=2")
    (here.driver.root / "simulate/no-events").touch()
    first, second = (gpu.uuid for gpu in here.driver.gpus)
    with exporter(here.config, "--dcgm") as port, using(here.driver, first, 1, GIB, 50):
        found = scrape(port)
        assert values(found, "gpuhook_gpu_memory_used_bytes")[first] >= GIB
        assert values(found, "DCGM_FI_DEV_GPU_TEMP").keys() == {first, second}
        assert values(found, "DCGM_FI_DEV_XID_ERRORS") == {}  # 0 would mean that none has occurred
        errors = {labels["kind"]: value for name, labels, value in found
                  if name == "gpuhook_metrics_errors_total"}  # fmt: skip
        assert set(errors.values()) == {0}
    words = [*COMMAND, "--config", here.config, "--textfile", here.config.parent / "gpus.prom"]
    said = run(words).ok().stderr
    assert "NVIDIA: errors (XIDs) aren't counted of 0, 1 (Not Supported)." in said


def test_memory_errors_and_recovery_actions_are_exported(make: type) -> None:
    here = make("--gpus=2", "--nvlink=pairs")
    well, ill = (gpu.uuid for gpu in here.driver.gpus)
    with exporter(here.config, "--dcgm") as port, using(here.driver, well, 1, GIB, 50):
        found = scrape(port)
        assert _actions(found) == {well: "none", ill: "none"}
        report_xid(str(here.driver.root), 48, ill)
        found = scrape(port)
        assert _actions(found) == {well: "none", ill: "gpu_reset"}
        assert values(found, "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION") == {well: 0, ill: 1}
        errors = {(labels["uuid"], labels["kind"]): value for name, labels, value in found
                  if name == "gpuhook_gpu_ecc_errors_total"}  # fmt: skip
        assert errors == {(well, "corrected"): 0, (well, "uncorrected"): 0,
                          (ill, "corrected"): 0, (ill, "uncorrected"): 1}  # fmt: skip
        assert values(found, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL") == {well: 0, ill: 1}
        idle = [labels["uuid"] for name, labels, _ in found if name == "gpuhook_gpu_clock_reason"]
        assert idle == [ill]
        assert values(found, "DCGM_FI_DEV_VGPU_LICENSE_STATUS") == {well: 0, ill: 0}
        before = values(found, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL")
        time.sleep(0.2)
        after = values(scrape(port), "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL")
        assert after[well] > before[well] > 0
        assert after[ill] == 0


def _actions(samples: Samples) -> dict[str, str]:
    return {labels["uuid"]: labels["action"] for name, labels, value in samples
            if name == "gpuhook_gpu_recovery_action" and value == 1}  # fmt: skip


# A container as enroot and Apptainer start it: it has its own root and device, but no cgroup.
CONTAINER = """echo $$ >$1/cgroup.procs && mount --bind $2 $2 && mount -t tmpfs none $2/dev &&
: >$2/dev/gpu && mount --bind $3 $2/dev/gpu && exec chroot $2 sleep 1000"""


@contextmanager
def within(group: Path, *argv: str | Path) -> Iterator[int]:
    """Run a command in a cgroup, which the command may enter itself; yield its pid."""
    made = [folder for folder in (group, *group.parents) if not folder.exists()]
    group.mkdir(parents=True, exist_ok=True)
    enter = ("sh", "-c", 'echo $$ >"$0"/cgroup.procs; exec "$@"', group)
    process = subprocess.Popen([*map(str, enter), *map(str, argv)])
    try:
        pids = group / "cgroup.procs"
        wait_until(lambda: str(process.pid) in pids.read_text().split(), "it is in its cgroup")
        yield process.pid
    finally:
        stop(process)
        for folder in made:
            wait_until(lambda here=folder: _is_removed(here), "the cgroup is removed")  # type: ignore[misc]


def _hierarchy() -> Path:
    return next(Path(each) for each in HIERARCHIES if Path(each, "cgroup.procs").exists())


@pytest.fixture
def slurm() -> Path:
    """The cgroup in which slurmd creates the cgroups of jobs."""
    hierarchy, name = _hierarchy(), f"slurm_{uuid.uuid4().hex[:8]}"
    if hierarchy.name == "devices":
        return hierarchy / name / "uid_0"
    return hierarchy / "system.slice" / f"{name}_slurmstepd.scope"


@pytest.fixture
def job(slurm: Path) -> Iterator[int]:
    """The pid of a process of job 41."""
    with within(slurm / "job_41", "sleep", "1000") as pid:
        yield pid


def _is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def test_gpu_use_of_a_slurm_job_outside_containers_is_reported(
    driver: Driver, configs: dict[str, Path], job: int
) -> None:
    device = driver.gpus[1].uuid
    with using(driver, device, job, 2 * GIB, 30), exporter(configs["runc"], "--dcgm") as port:
        found = scrape(port)
        assert of_container(found, "slurm:41")["memory_used_bytes", device] == 2 * GIB
        labels = labels_of(found, "slurm:41")
        assert (labels["engine"], labels["slurm_job"]) == ("slurm", "41")
        assert ("memory_used_bytes", device) not in of_container(found, "")
        jobs = {labels["UUID"]: labels.get("hpc_job", "") for name, labels, _ in found
                if name == "DCGM_FI_DEV_FB_USED"}  # fmt: skip
        assert jobs == {gpu.uuid: "41" if gpu.uuid == device else "" for gpu in driver.gpus}


def test_containers_of_slurm_jobs_without_a_cgroup_are_assigned_to_the_job(
    driver: Driver, configs: dict[str, Path], roots: dict[str, Path], slurm: Path
) -> None:
    """Tasks of all jobs have the same names, and no job has another job's device."""
    gpus, root = driver.gpus[2:4], roots["debian"]
    with ExitStack() as stack:
        for job, gpu in zip((41, 42), gpus, strict=True):
            task = slurm / f"job_{job}/step_0/task_0"
            node = driver.root / f"dev/nvidia{gpu.minor}"
            words = ("unshare", "--mount", "--propagation=private", "sh", "-ec", CONTAINER)
            stack.enter_context(within(task, *words, "sh", task, root, node))
        port = stack.enter_context(exporter(configs["runc"]))

        def assigned() -> dict[tuple[str, str], str]:
            name = "gpuhook_container_gpu_assigned"
            given = [labels for each, labels, _ in scrape(port) if each == name]
            return {
                (each["slurm_job"], each["uuid"]): each["container_id"]
                for each in given
                if each["slurm_job"]
            }

        expected = {("41", gpus[0].uuid): "slurm:41", ("42", gpus[1].uuid): "slurm:42"}
        wait_until(lambda: assigned() == expected, "each job has its device")


def test_processes_moved_by_systemd_count_for_their_container(
    bundle: GpuBundle, driver: Driver
) -> None:
    """Processes below the container's recorded cgroup belong to it, wherever its first one is."""
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command("sleep", "1000")
    config, device = bundle.settings, driver.gpus[5].uuid
    bundle.detach(bundle.gpu_py, config)
    first = pid_of(config, bundle.name)
    paths = proc.cgroups(Path(f"/proc/{first}/cgroup").read_bytes())
    places = (("devices", HIERARCHIES[0]), ("", f"{HIERARCHIES[1]}/unified"), ("", HIERARCHIES[1]))
    group = next(
        folder
        for kind, hierarchy in places
        if paths.get(kind, "/") != "/" and (folder := Path(f"{hierarchy}{paths[kind]}")).exists()
    )
    with (
        within(group / "init.scope", "sleep", "1000"),
        within(group / "system.slice/web.service", "sleep", "1000") as other,
        using(driver, device, other, 2 * GIB, 40),
    ):
        (group / "init.scope/cgroup.procs").write_text(str(first))
        try:
            with exporter(config) as port:
                found = scrape(port)
                assert of_container(found, bundle.name)["memory_used_bytes", device] == 2 * GIB
                assert ("memory_used_bytes", device) not in of_container(found, "")
        finally:
            (group / "cgroup.procs").write_text(str(first))
