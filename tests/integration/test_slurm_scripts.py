"""packaging/slurm: what root does for jobs, and users who would have it do something else."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Result, run
from harness.images import REPOSITORY

SCRIPTS = REPOSITORY / "packaging/slurm"
ADA, BEA = 4401, 4402
# Where cgroups are, of v1 or v2.
HIERARCHIES = [Path("/sys/fs/cgroup", name) for name in ("freezer", "unified", "")]


@pytest.fixture
def site(workspace: Path) -> Iterator[Path]:
    """A folder of root's that everybody may enter."""
    made = workspace / "slurm-scripts"
    made.mkdir(mode=0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def folder(site: Path) -> Path:
    """Where the jobs' folders are to be; it isn't there yet."""
    return site / "containers"


def call(script: str, folder: Path | str, user: int, job: int) -> Result:
    """Run a script as slurmd does: with no PATH, and what Slurm says of the job."""
    job_is = (f"SLURM_JOB_UID={user}", f"SLURM_JOB_ID={job}", f"SLURM_JOB_USER={user}")
    return run(["env", "-i", *job_is, SCRIPTS / script, folder])


def prolog(folder: Path | str, user: int, job: int) -> Result:
    return call("prolog", folder, user, job)


def epilog(folder: Path | str, user: int, job: int) -> Result:
    return call("epilog", folder, user, job)


def as_user(user: int, *words: str | Path) -> Result:
    return run(["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *words])


def look(path: Path) -> tuple[int, int]:
    """Return owner and mode of what is there, a link or not."""
    status = path.lstat()
    return status.st_uid, status.st_mode & 0o7777


def theirs(path: Path, user: int, mode: int = 0o755) -> Path:
    """Make a folder of a user's."""
    path.mkdir()
    os.chown(path, user, user)
    path.chmod(mode)
    return path


def test_each_job_has_a_folder_that_is_its_users_alone(folder: Path) -> None:
    for user, job in ((ADA, 5), (BEA, 6), (ADA, 7), (0, 8)):
        prolog(folder, user, job).ok()
        assert look(folder / f"{user}.{job}") == (user, 0o700)
    assert look(folder) == (0, 0o711)
    as_user(ADA, "touch", folder / f"{ADA}.5/state").ok()
    as_user(ADA, "ls", folder).failed()
    as_user(ADA, "ls", folder / f"{BEA}.6").failed()
    as_user(ADA, "touch", folder / f"{BEA}.6/state").failed()
    epilog(folder, ADA, 5).ok()
    assert sorted(os.listdir(folder)) == ["0.8", f"{ADA}.7", f"{BEA}.6"]


def test_a_user_puts_a_link_where_the_next_folder_will_be(site: Path, folder: Path) -> None:
    """As in a folder that was made with its parent by install -d -o USER."""
    victim = site / "victim"
    victim.mkdir(mode=0o700)
    prolog(folder, ADA, 5).ok()
    as_user(ADA, "rm", "-rf", folder / f"{ADA}.5")
    for name in (f"{ADA}.5", f"{ADA}.6", f"{BEA}.7"):
        as_user(ADA, "ln", "-s", victim, folder / name)
    as_user(ADA, "mv", folder, site / "moved")
    for user, job in ((ADA, 5), (ADA, 6), (BEA, 7)):
        prolog(folder, user, job)
        assert look(victim) == (0, 0o700)
        assert look(folder / f"{user}.{job}") == (user, 0o700)
    assert look(folder) == (0, 0o711)


@pytest.mark.parametrize("kind", ["link", "dead link", "file", "pipe", "folder"])
def test_what_is_no_folder_of_the_jobs_user_is_left_as_it_is(
    site: Path, folder: Path, kind: str
) -> None:
    victim = site / "victim"
    victim.mkdir(mode=0o700)
    prolog(folder, ADA, 5).ok()
    place = folder / f"{ADA}.6"
    if kind.endswith("link"):
        place.symlink_to(victim if kind == "link" else site / "nothing")
    elif kind == "folder":
        theirs(place, BEA)
    else:
        os.mknod(place, 0o600 | {"file": 0o100000, "pipe": 0o010000}[kind])
    before = look(place)
    refused = prolog(folder, ADA, 6).failed()
    assert refused.stderr.startswith(f"prolog: {place} ")
    assert look(place) == before
    assert look(victim) == (0, 0o700)
    assert not (site / "nothing").exists()


@pytest.mark.parametrize("kind", ["link", "file", "a user's", "0731", "0713", "1777"])
def test_a_folder_that_others_could_change_is_refused(site: Path, folder: Path, kind: str) -> None:
    if kind == "link":
        folder.symlink_to(theirs(site / "his", ADA))
    elif kind == "file":
        folder.touch()
    elif kind == "a user's":
        theirs(folder, ADA)
    else:
        folder.mkdir()
        folder.chmod(int(kind, 8))
    before = look(folder)
    assert "prolog: " in prolog(folder, ADA, 5).failed().stderr
    assert look(folder) == before
    assert kind == "file" or os.listdir(folder) == []


def test_the_way_to_it_is_roots(site: Path) -> None:
    place = "containers"
    his, link, open_to_all, sticky = (site / name for name in ("his", "link", "open", "sticky"))
    theirs(his, ADA)
    link.symlink_to("sticky")
    theirs(open_to_all, 0, 0o777)
    theirs(sticky, 0, 0o1777)
    for way in (his, link, open_to_all, site / "missing"):
        prolog(way / place, ADA, 5).failed()
        assert not (way / place).exists()
    prolog(sticky / place, ADA, 5).ok()
    for path in ("containers", f"{sticky}/../sticky/{place}", f"{sticky}/{place}/"):
        assert "whole path" in prolog(path, ADA, 5).failed().stderr


def test_a_jobs_number_that_is_used_again(folder: Path) -> None:
    """After a job whose epilog didn't run: what it left is its user's and nobody else's."""
    prolog(folder, ADA, 5).ok()
    as_user(ADA, "touch", folder / f"{ADA}.5/left").ok()
    prolog(folder, BEA, 5).ok()
    assert os.listdir(folder / f"{BEA}.5") == []
    prolog(folder, ADA, 5).ok()  # as slurmd does that is started again while the job runs
    assert os.listdir(folder / f"{ADA}.5") == ["left"]
    epilog(folder, BEA, 5).ok()
    assert os.listdir(folder) == [f"{ADA}.5"]


def test_a_prolog_that_was_killed_before_the_end(folder: Path) -> None:
    prolog(folder, ADA, 5).ok()
    (folder / f"{ADA}.6").mkdir(mode=0o700)
    prolog(folder, ADA, 6).ok()
    assert look(folder / f"{ADA}.6") == (ADA, 0o700)


def test_many_jobs_at_once(folder: Path) -> None:
    env = {"SLURM_JOB_UID": str(ADA), "SLURM_JOB_USER": "ada"}
    prologs = [
        subprocess.Popen([SCRIPTS / "prolog", folder], env={**env, "SLURM_JOB_ID": str(job)})
        for job in range(20)
    ]
    assert [each.wait(60) for each in prologs] == [0] * 20
    assert len(os.listdir(folder)) == 20


def test_the_epilog_follows_no_link_and_enters_no_file_system(site: Path, folder: Path) -> None:
    victim = site / "victim"
    victim.mkdir(mode=0o700)
    (victim / "file").touch()
    prolog(folder, ADA, 5).ok()
    for target in (victim, victim / "file", Path("/")):
        as_user(ADA, "ln", "-s", target, folder / f"{ADA}.5/to {target.name}").ok()
    (folder / f"{ADA}.6").symlink_to(victim)
    for job in (5, 6, 7):
        epilog(folder, ADA, job).ok()
    assert os.listdir(folder) == []
    assert os.listdir(victim) == ["file"]

    prolog(folder, ADA, 8).ok()
    point = folder / f"{ADA}.8/point"
    point.mkdir()
    run(["mount", "-t", "tmpfs", "tmpfs", point]).ok()
    (point / "file").touch()
    try:
        # The node isn't drained for what a user may have done.
        assert "isn't removed as a whole" in epilog(folder, ADA, 8).ok().stderr
        assert os.listdir(point) == ["file"]
    finally:
        run(["umount", point]).ok()
    epilog(folder, ADA, 8).ok()
    assert os.listdir(folder) == []


def test_the_epilog_removes_nothing_elsewhere(site: Path, folder: Path) -> None:
    epilog(folder, ADA, 5).ok()  # no job has done anything on this node yet
    his = theirs(site / "his", ADA)
    kept = theirs(his / f"{ADA}.5", ADA)
    assert "has to be root's" in epilog(his, ADA, 5).failed().stderr
    folder.symlink_to(his)
    assert "without a link" in epilog(folder, ADA, 5).failed().stderr
    assert kept.is_dir()


def test_the_epilog_ends_what_is_left_of_the_job_and_nothing_else(
    folder: Path, workspace: Path
) -> None:
    """With cgroup v1 a user's runtime makes groups below the step's, which Slurm doesn't see."""
    top = next(each for each in HIERARCHIES if (each / "cgroup.procs").exists()) / workspace.name
    users = {
        f"uid_{ADA}/job_5/step_0/task_0/x": ADA,
        f"uid_{ADA}/job_5/step_1": BEA,  # of a container with users of its own
        f"uid_{ADA}/job_55/step_0": ADA,
        f"uid_{BEA}/job_5/step_0": BEA,
        f"uid_{ADA}/job_5/step_0/slurm": 0,
    }
    processes = []
    try:
        for group, user in users.items():
            (top / group).mkdir(parents=True)
            words = ["setpriv", f"--reuid={user}", "sleep", "100"]
            processes.append(subprocess.Popen(words))
            (top / group / "cgroup.procs").write_text(str(processes[-1].pid))
        epilog(folder, ADA, 5).ok()
        assert [each.wait(60) for each in processes[:2]] == [-signal.SIGKILL] * 2
        assert [each.poll() for each in processes[2:]] == [None] * 3
    finally:
        for each in processes:
            each.kill()
            each.wait()
        run(["find", top, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]).ok()


FREEZER = Path("/sys/fs/cgroup/freezer")
RUNS_AWAY = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork():
        os._exit(0)
"""


@pytest.mark.skipif(not FREEZER.is_dir(), reason="with cgroup v2 Slurm looks into all groups")
def test_the_epilog_ends_processes_that_are_another_each_moment(
    folder: Path, workspace: Path
) -> None:
    """They fork and end, so that whoever lists them signals those that are gone."""
    job = FREEZER / workspace.name / f"uid_{ADA}/job_5"
    group = job / "step_0/x"
    try:
        group.mkdir(parents=True)
        words = ["setpriv", f"--reuid={ADA}", "--clear-groups", sys.executable, "-IS", "-c"]
        to_group = f'echo $$ >{group}/cgroup.procs; exec "$@" >/dev/null 2>&1'
        run(["sh", "-c", to_group, "sh", *words, RUNS_AWAY]).ok()
        assert (group / "cgroup.procs").read_text()
        epilog(folder, ADA, 5).ok()
        assert (group / "cgroup.procs").read_text() == ""
        assert (job / "freezer.state").read_text() == "THAWED\n"
    finally:
        if group.is_dir():
            (job / "freezer.state").write_text("FROZEN")
            for process in (group / "cgroup.procs").read_text().split():
                os.kill(int(process), signal.SIGKILL)
            (job / "freezer.state").write_text("THAWED")
            while (group / "cgroup.procs").read_text():
                time.sleep(0.01)
        run(["find", job.parents[1], "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]).ok()


def test_the_epilog_ends_one_of_more_processes_than_a_command_has_arguments(site: Path) -> None:
    proc = site / "proc"
    proc.mkdir()
    process = subprocess.Popen(["setpriv", f"--reuid={ADA}", "sleep", "100"])
    try:
        for number in range(9_000_000, 9_005_000):
            (proc / str(number)).mkdir()
            (proc / str(number) / "cgroup").touch()
        found = proc / str(process.pid)
        found.mkdir()
        (found / "cgroup").write_text(f"1:freezer:/slurm/uid_{ADA}/job_5/step_0\n")
        os.chown(found, ADA, ADA)
        text = (SCRIPTS / "epilog").read_text()
        text = text.replace("/proc/[", f"{proc}/[").replace("#/proc/", f"#{proc}/")
        made = site / "epilog"
        made.write_text(text.replace("tries=50", "tries=1"))
        job_is = [f"SLURM_JOB_UID={ADA}", "SLURM_JOB_ID=5", "SLURM_JOB_USER=ada"]
        run(["prlimit", "--stack=131072", "env", "-i", *job_is, "sh", made, site / "x"])
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("script", ["prolog", "epilog"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=5"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_USER=a"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=", "SLURM_JOB_USER=a"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=../x", "SLURM_JOB_USER=a"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=5", "SLURM_JOB_USER=../x"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=5", "SLURM_JOB_USER=x/y"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=5", "SLURM_JOB_USER=.."),
    ],
)
def test_without_slurm_they_do_nothing(folder: Path, script: str, words: tuple[str, ...]) -> None:
    assert "slurmd" in run(["env", "-i", *words, SCRIPTS / script, folder]).failed().stderr
    assert not folder.exists()
