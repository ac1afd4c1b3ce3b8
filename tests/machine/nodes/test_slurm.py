"""Slurm with cgroup v2: jobs on two nodes get exactly their GPUs, in containers and outside."""

from booted import ALLOWED, DENIED, DRIVER, GPUS
from clusters import BUNDLE, Slurm, uuids
from harness.commands import wait_until
from nodes import SECOND, THIRD, Node

OPEN_ALL = (
    "import errno, os\n"
    f"for minor in range({GPUS}):\n"
    f"    try: os.open('{DRIVER}/dev/nvidia%d' % minor, os.O_RDWR)\n"
    "    except OSError as error: print(errno.errorcode[error.errno])\n"
)
CONTAINER = f"--container={BUNDLE}"
LOOK = ("sh", "-c", "nvidia-smi -L; ls /dev/nvidia[0-9]")
LIES = ("env", "NVIDIA_VISIBLE_DEVICES=all", "SLURM_STEP_GPUS=0,1,2,3", "CUDA_VISIBLE_DEVICES=0,1")


def test_a_slurm_job_can_open_only_its_own_gpus(slurm: Slurm) -> None:
    done = slurm.call("srun", "--gres=gpu:3", "python3", "-c", OPEN_ALL).ok()
    assert sorted(done.stdout.split()) == sorted([ALLOWED] * 3 + [DENIED])


def test_a_container_in_a_slurm_job_has_the_jobs_gpus(
    slurm: Slurm, nodes: dict[Node, list[str]]
) -> None:
    for node in (SECOND, THIRD):
        where = ("--gres=gpu:2", f"--nodelist={node.name}", CONTAINER)
        done = slurm.call("srun", *where, *LOOK).ok()
        assert len(uuids(done.stdout)) == 2
        assert uuids(done.stdout) <= set(nodes[node])
        assert done.stdout.count("/dev/nvidia") == 2


def test_a_container_in_a_slurm_job_without_gpus_has_none(slurm: Slurm) -> None:
    done = slurm.call("srun", CONTAINER, "sh", "-c", "ls /dev/nvidia* || true").ok()
    assert done.stdout == ""


def test_device_variables_of_a_slurm_user_are_ignored(slurm: Slurm) -> None:
    done = slurm.call(*LIES, "srun", "--gres=gpu:1", CONTAINER, *LOOK).ok()
    assert len(uuids(done.stdout)) == done.stdout.count("/dev/nvidia") == 1


def test_jobs_share_no_gpu_and_wait_for_a_free_one(
    slurm: Slurm, nodes: dict[Node, list[str]]
) -> None:
    jobs = [slurm.submit(2) for _ in range(4)]
    given = {job: slurm.started(job, 2) for job in jobs}
    every = [gpu for gpus in given.values() for gpu in gpus]
    assert sorted(every) == sorted([*nodes[SECOND], *nodes[THIRD]])
    last = slurm.submit(2)
    wait_until(lambda: slurm.job(last)["Reason"] == "Resources", "a fifth waits", interval=0.2)
    slurm.call("scancel", jobs[2]).ok()
    assert slurm.started(last, 2) == given[jobs[2]]
