"""Simulated GPUs that real Slurm daemons allocate to containers of an ordinary user's jobs."""

from harness.commands import run
from harness.images import REPOSITORY
from harness.installation import Installation

SCRIPT = REPOSITORY / "scripts/test-slurm"
STEPS = (
    "the two that Slurm gave it",
    "their nodes and no other",
    "the job has one, in one of root's",
    "nothing is seen or changed beside it",
    "it goes with the job",
    "nothing of it runs outside of the job",
    "its processes are gone, and its folder",
    "a container that ends runs its hook in the job",
    "each has its own",
    "the kernel lets it open one",
    "nothing of it is saved for others",
    "it has the same by what is saved",
    "its numbers count them",
    "eight have each its own",
    "the ninth waits for resources",
    "it has the GPU of the one that ended",
)


def test_all_steps_of_the_slurm_script_succeed(installation: Installation) -> None:
    assert installation.command.exists()  # the script finds this installation, too
    done = run([SCRIPT]).ok()
    assert [step for step in STEPS if f"ok: {step}" not in done.stdout] == []
